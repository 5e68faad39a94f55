"""Low-rank layers in a run: layers change before optimizers exist, and checkpoints stay dense.

The factors are part of the callback's state, because a weight has many pairs of them, and so are their moments, beside
those of the dense layout. A checkpoint without them (of a dense run, or of another rank) gives the best factors of its
weights, whose moments start anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch

from lightning_memsave.loops.compact_training import CompactTraining, refuse_readers
from lightning_memsave.loops.optimizer_changes import readable
from lightning_memsave.techniques.low_rank import LowRank, apply_low_rank, low_rank_layers
from lightning_memsave.techniques.low_rank.factored_state import from_dense_layout, to_dense_layout


class LowRankTraining(CompactTraining):
    """The low-rank layers of one run. Once that is over it knows their factors, for checkpoints, and no layer.

    Args:
        trainer: whose model is changed.
        config: the settings.
        saved: what `state_dict` said, of the run that is resumed.

    Raises:
        ValueError: as `apply_low_rank`; a callback that copies the dense model.
    """

    technique = "low_rank"

    def __init__(self, trainer: L.Trainer, config: LowRank, saved: Mapping[str, Any] | None) -> None:
        refuse_readers(trainer, "low_rank")
        super().__init__(trainer, apply_low_rank(trainer.lightning_module, config, saved and saved["factors"]))
        total = sum(shape.numel() for shape in self._dense_shapes.values())
        self._fraction = sum(p.numel() for p in self._dense_shapes) / total

    def metrics(self) -> dict[str, float]:
        """Return the numbers that are left of the weights of these layers, as a fraction."""
        return {"memsave/low_rank_fraction": self._fraction}

    def to_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict as that of a dense run."""
        return to_dense_layout(optimizer, state, self._dense_shapes)

    def from_disk(self, optimizers: Sequence[torch.optim.Optimizer], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of a dense run with the optimizer states of this one, as these optimizers read them."""
        return readable(optimizers, super().from_disk(optimizers, checkpoint))

    def _state_from_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return from_dense_layout(optimizer, state, self._dense_shapes)

    def _now(self) -> dict[str, Any]:
        return {"factors": {name: layer.whole_values() for name, layer in low_rank_layers(self._model).items()}}
