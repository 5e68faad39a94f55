"""Sparsity in a run: layers change before optimizers exist, patterns after each step, and checkpoints stay dense.

The patterns are part of the callback's state, because a live weight may be zero. A checkpoint without them (of a dense
run, or of another sparsity) is pruned to the largest weights, which are all it has where it is as sparse already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.loops.compact_training import CompactTraining, refuse_readers
from lightning_memsave.techniques.optimizer_state import is_low_bit
from lightning_memsave.techniques.sparsity import (
    MaskUpdates,
    Sparsity,
    apply_sparsity,
    choose_patterns,
    sparse_layers,
)
from lightning_memsave.techniques.sparsity.checkpoints import layouts_of
from lightning_memsave.techniques.sparsity.updates import refuse_codes, refuse_lost_gradients
from lightning_memsave.torch_internals.optimizer_class import PENDING
from lightning_memsave.torch_internals.state_layout import from_dense_layout, to_dense_layout


class SparseTraining(CompactTraining):
    """The sparse layers of one run. Once that is over it knows where values were, and no layer.

    Args:
        trainer: whose model is changed.
        config: the settings.
        saved: what `state_dict` said, of the run that is resumed.

    Raises:
        ValueError: as `apply_sparsity`; a callback that copies the dense model; a method that resizes parameters with
            several processes.
    """

    technique = "sparsity"

    def __init__(self, trainer: L.Trainer, config: Sparsity, saved: Mapping[str, Any] | None) -> None:
        _refuse(trainer, config)
        model: Any = trainer.lightning_module
        self._config = config
        self._updates: dict[torch.optim.Optimizer, MaskUpdates] = {}
        self._saved = saved if saved is not None and saved["sparsity"] == config.sparsity else None
        if self._saved is not None:
            patterns = self._saved["patterns"]
        else:
            is_given = trainer.ckpt_path is not None and config.initial == "random"
            patterns = choose_patterns(model, dataclasses.replace(config, initial="magnitude") if is_given else config)
            patterns = trainer.strategy.broadcast(patterns)  # ranks may have drawn different weights
        super().__init__(trainer, apply_sparsity(model, config, patterns))
        self._num_moved = self._num_told = 0

    def follow(self, trainer: L.Trainer, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Update patterns after the steps of `optimizers`, where the method does so.

        Raises:
            ValueError: as `CompactTraining.follow`, and as `MaskUpdates`.
        """
        super().follow(trainer, optimizers)
        if not self._config.is_updated:
            return
        for optimizer in optimizers:
            refuse_codes(self._config, is_low_bit(optimizer))
            refuse_lost_gradients(self._config, PENDING in vars(optimizer))
        num_steps = trainer.estimated_stepping_batches if isinstance(self._config.schedule.until, float) else None
        for number, optimizer in enumerate(optimizers):
            updates = MaskUpdates(self._model, optimizer, self._config, num_steps, trainer.strategy.reduce)
            if self._saved is not None and number < len(self._saved["updates"]):
                updates.load_state_dict(self._saved["updates"][number])
            self._updates[optimizer] = updates

    def stepped(self, trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer, and move patterns that are due."""
        updates = self._updates.get(optimizer)
        if updates is None:
            return
        if self._saved is None and updates.num_steps == 0:  # resumed, maybe, from a checkpoint of another run
            updates.join_at(trainer.global_step)
        self._num_moved += updates.step()

    def has_moved(self) -> bool:
        """Return whether weights have moved since this was asked last."""
        before, self._num_told = self._num_told, self._num_moved
        return self._num_moved > before

    def metrics(self) -> dict[str, float]:
        """Return what loggers see: the share of weights that live, and how many moved in this run."""
        layers = sparse_layers(self._model).values() if self._model is not None else ()
        total = sum(layer.dense_shape.numel() for layer in layers)
        live = sum(layer.values.numel() for layer in layers)
        return {"memsave/density_fraction": live / total, "memsave/num_weights_moved": self._num_moved} if total else {}

    def _now(self) -> dict[str, Any]:
        return {
            "sparsity": self._config.sparsity,
            "patterns": {name: layer.values_index for name, layer in sparse_layers(self._model).items()},
            "updates": [updates.state_dict() for updates in self._updates.values()],
        }

    def to_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict as that of a dense run."""
        return to_dense_layout(optimizer, state, self._layouts())

    def _state_from_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return from_dense_layout(optimizer, state, self._layouts())

    def _layouts(self) -> dict[Any, Any]:
        return self._layouts_at_end if self._model is None else layouts_of(self._model)

    def _finish(self, applied: Applied) -> None:
        self._layouts_at_end = layouts_of(self._model)
        super()._finish(applied)
        self._saved = None
        self._updates.clear()


def _refuse(trainer: L.Trainer, config: Sparsity) -> None:
    refuse_readers(trainer, "sparsity")
    if config.resizes and trainer.world_size > 1:
        raise setting_error(
            "sparsity",
            "must keep the size of each parameter with several processes, whose gradient buckets are made once",
            (config.method, config.initial),
            'Use `method="rigl"`, "set" or "static".',
        )
