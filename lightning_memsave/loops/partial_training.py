"""Sparse update in a run: layers change before optimizers exist, and checkpoints stay dense.

What is trained is part of the callback's state: a resumed run trains the same. In checkpoints frozen parameters have
the optimizer state of a first step, zeros, as those of a dense run have some; it is left out again when one is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import callbacks_named
from lightning_memsave.loops.compact_training import CompactTraining, refuse_readers
from lightning_memsave.techniques.sparse_update import (
    SparseUpdate,
    apply_sparse_update,
    partial_layers,
    with_channels,
)
from lightning_memsave.torch_internals.state_layout import (
    before_a_step,
    from_dense_layout,
    has_layout_of_torch,
    numbered,
    to_dense_layout,
)


class PartialTraining(CompactTraining):
    """The layers of one run that are trained in part. Once that is over it knows what checkpoints need, and no layer.

    Args:
        trainer: whose model is changed.
        config: has layers.
        saved: what `state_dict` said, of the run that is resumed.

    Raises:
        ValueError: as `apply_sparse_update`; a callback that copies the dense model, or that unfreezes parts of it.
    """

    technique = "sparse_update"

    def __init__(self, trainer: L.Trainer, config: SparseUpdate, saved: Mapping[str, Any] | None) -> None:
        refuse_readers(trainer, "sparse_update")
        _refuse_finetuning(trainer)
        module = trainer.lightning_module
        found = with_channels(module, config)
        self._asked = _plain(config)
        if saved is not None and saved["asked"] == self._asked:
            config = as_saved(saved)
        else:
            config = trainer.strategy.broadcast(found)  # ranks may have other weights
        trained_before = {p for p in module.parameters() if p.requires_grad}
        total = sum(p.numel() for p in trained_before)
        super().__init__(trainer, apply_sparse_update(module, config))
        self._trained = _plain(config)
        self._layouts = {layer.values: layer.layout for layer in partial_layers(module).values()}
        self._frozen = {p for p in module.parameters() if not p.requires_grad and p in trained_before}
        self._fraction = sum(p.numel() for p in module.parameters() if p.requires_grad) / total

    def metrics(self) -> dict[str, float]:
        """Return the numbers that are trained, as a fraction of those that were before."""
        return {"memsave/trained_fraction": self._fraction}

    def to_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict as that of a dense run."""
        if not has_layout_of_torch(state):
            return state
        found, frozen = dict(state["state"]), {}
        known = [(number, p) for number, p in numbered(optimizer, state) if number in found]
        for number, p in numbered(optimizer, state):
            if p in self._frozen and number not in found and known:
                like_number, like = known[0]
                if (first := before_a_step(found[like_number], like.shape, p.shape)) is not None:
                    frozen[number] = first
        dense = to_dense_layout(optimizer, state, self._layouts)
        return {**dense, "state": dict(sorted({**dense["state"], **frozen}.items()))}

    def _state_from_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if not has_layout_of_torch(state):
            return state
        frozen = {number for number, p in numbered(optimizer, state) if p in self._frozen}
        left = {number: each for number, each in state["state"].items() if number not in frozen}
        return from_dense_layout(optimizer, {**state, "state": left}, self._layouts)

    def _now(self) -> dict[str, Any]:
        return {**self._trained, "asked": self._asked}


def _refuse_finetuning(trainer: L.Trainer) -> None:
    """Raise `ValueError` for a callback that would train what is frozen here."""
    if found := callbacks_named(trainer, "BaseFinetuning"):
        raise setting_error(
            "sparse_update",
            "cannot be combined with a callback that freezes and unfreezes parameters",
            type(found[0]).__name__,
            "Remove the callback, or set `sparse_update=False`.",
        )


def as_saved(saved: Mapping[str, Any]) -> SparseUpdate:
    """Return the settings of the run whose `PartialTraining.state_dict` this is."""
    return SparseUpdate(layers=saved["layers"], biases=saved["biases"])


def _plain(config: SparseUpdate) -> dict[str, Any]:
    """Return settings as checkpoints hold them."""
    assert config.layers is not None, "else it is refused"
    layers = {name: list(share) if isinstance(share, tuple) else share for name, share in config.layers.items()}
    return {"layers": layers, "biases": config.biases if isinstance(config.biases, bool) else list(config.biases)}
