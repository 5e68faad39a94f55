"""What a run has to do about layers with another parameter than their weight: sparse, low-rank or partly trained ones.

They change before optimizers step, and checkpoints have the layout of the dense model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.lightning_compat import callbacks_named
from lightning_memsave.techniques.optimizer_state import decoded_state_dict
from lightning_memsave.techniques.optimizer_state.projection import PROJECTION
from lightning_memsave.torch_internals.compact_layers import compact_layers
from lightning_memsave.torch_internals.coupling import held_by


class CompactTraining:
    """The changed layers of one run. Once that is over it knows what checkpoints need, and no layer.

    Args:
        trainer: whose model was changed.
        applied: what was done.
    """

    technique: ClassVar[str]

    def __init__(self, trainer: L.Trainer, applied: Applied) -> None:
        self._model: Any = trainer.lightning_module
        self.applied = dataclasses.replace(applied, restore=lambda: self._finish(applied))
        """What was done; its `undo` ends the run."""
        self._at_end: dict[str, Any] = {}
        own = (layer.get_parameter(layer.parameter_name) for layer in compact_layers(self._model).values())
        self._parameters = tuple(p for p in own if p.requires_grad)
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._left: dict[torch.optim.Optimizer, dict[Tensor, Any]] = {}
        """State of these that the run has left: once it is over, they are dense."""

    def follow(self, trainer: L.Trainer, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take part in the steps of `optimizers`, where the technique does so.

        Where they come from an earlier fit, their state of these layers begins anew: it is that of other numbers.

        Raises:
            ValueError: an optimizer is bitsandbytes' own, whose state has no dense layout on disk.
        """
        self._optimizers = optimizers
        for optimizer in optimizers:
            self._take_state(optimizer)
            if type(optimizer).__module__.startswith("bitsandbytes"):
                raise setting_error(
                    self.technique,
                    "cannot write the state of bitsandbytes' own optimizers in the dense layout",
                    type(optimizer).__name__,
                    'Use torch\'s optimizer and `MemSave(optimizer_state="8bit")`.',
                )

    def refuse_held(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that hold others.

        Raises:
            ValueError: one does.
        """
        for optimizer in filter(held_by, optimizers):
            raise setting_error(
                self.technique,
                "cannot write the state of optimizers that are inside of another one in the dense layout",
                type(optimizer).__name__,
                "Use one optimizer, or manual optimization with several.",
            )

    def stepped(self, trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Do what is due after a step of an optimizer."""

    def has_moved(self) -> bool:
        """Return whether `metrics` have changed since this was asked last."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return what loggers see."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state: what layers are besides their weight."""
        return self._at_end if self._model is None else self._now()

    @contextlib.contextmanager
    def as_in_the_run(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let an optimizer have its state and its parameters' shapes as in the run, also once that is over."""
        dense = {p: p.data for p in self._left.get(optimizer, {})}
        for p, weight in dense.items():
            p.data = weight.new_empty(()).expand(self._shapes[p])  # takes no memory
            optimizer.state[p] = self._left[optimizer][p]
        try:
            yield
        finally:
            for p, weight in dense.items():
                p.data = weight
                del optimizer.state[p]

    def to_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict as that of a dense run."""
        raise NotImplementedError

    def from_disk(self, optimizers: Sequence[torch.optim.Optimizer], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint of a dense run with the optimizer states of this one."""
        states = list(checkpoint["optimizer_states"])
        for number, optimizer in enumerate(optimizers[: len(states)]):  # Lightning leaves the others alone as well
            states[number] = self._state_from_disk(optimizer, _decoded(states[number]))
        return {**checkpoint, "optimizer_states": states}

    def _now(self) -> dict[str, Any]:
        raise NotImplementedError

    def _state_from_disk(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _finish(self, applied: Applied) -> None:
        self._at_end = self._now()
        self._shapes: dict[Tensor, torch.Size] = {p: p.shape for p in self._parameters}
        self._model = None
        applied.undo()
        self._left = {optimizer: self._take_state(optimizer) for optimizer in self._optimizers}

    def _take_state(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
        return {p: optimizer.state.pop(p) for p in self._parameters if p in optimizer.state}


def _decoded(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without codes, which are those of whole dense moments; as it is where moments are others."""
    if not isinstance(state.get("state"), Mapping) or any(PROJECTION in each for each in state["state"].values()):
        return state
    return decoded_state_dict(state)


def refuse_readers(trainer: L.Trainer, technique: str) -> None:
    """Raise `ValueError` for a callback that would read or replace parameters of the dense model."""
    for what, names in _READ_WEIGHTS.items():
        if found := callbacks_named(trainer, *names):
            raise setting_error(
                technique,
                f"cannot be combined with a callback that {what}",
                type(found[0]).__name__,
                f"Remove the callback, or set `{technique}=False`.",
            )


_READ_WEIGHTS = {
    "averages a copy of the dense model": ("WeightAveraging", "StochasticWeightAveraging"),
    "masks the dense weights": ("ModelPruning",),
}
