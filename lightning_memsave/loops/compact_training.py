"""What a run has to do about layers with another parameter than their weight: sparse, low-rank or partly trained ones.

They change before optimizers step, and checkpoints have the layout of the dense model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from lightning_memsave.torch_internals.state_layout import before_a_step


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
        layers = compact_layers(self._model).values()
        shapes = ((layer.get_parameter(layer.parameter_name), layer.dense_shape) for layer in layers)
        self._dense_shapes: dict[Tensor, torch.Size] = {p: shape for p, shape in shapes if p.requires_grad}
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._left: dict[torch.optim.Optimizer, dict[Tensor, Any]] = {}
        """State of these that the run has left: once it is over, they are dense."""
        self._early = set[torch.optim.Optimizer]()
        """Optimizers that have had a state before, and may not make one by themselves."""

    def follow(self, trainer: L.Trainer, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take part in the steps of `optimizers`, where the technique does so.

        Raises:
            ValueError: an optimizer is bitsandbytes' own, whose state has no dense layout on disk.
        """
        for optimizer in optimizers:
            if type(optimizer).__module__.startswith("bitsandbytes"):
                raise setting_error(
                    self.technique,
                    "cannot write the state of bitsandbytes' own optimizers in the dense layout",
                    type(optimizer).__name__,
                    'Use torch\'s optimizer and `MemSave(optimizer_state="8bit")`.',
                )

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take up optimizers that have just been made, or come from an earlier fit.

        State of these layers that is of other numbers begins anew.

        Raises:
            ValueError: an optimizer holds others.
        """
        self._optimizers = optimizers
        for optimizer in optimizers:
            for p, dense_shape in self._dense_shapes.items():
                state = optimizer.state.get(p)
                if state is None:
                    continue
                self._early.add(optimizer)
                if _is_of(p, state.values()):
                    continue
                if (first := before_a_step(state, dense_shape, p.shape)) is not None:
                    optimizer.state[p] = first
                else:
                    del optimizer.state[p]
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
        left = self._left.get(optimizer, {})
        dense, state = {p: p.data for p in left}, {p: optimizer.state[p] for p in left if p in optimizer.state}
        try:
            for p, weight in dense.items():
                p.data = weight.new_empty(()).expand(self._shapes[p])  # takes no memory
                optimizer.state[p] = left[p]
            yield
        finally:
            for p, weight in dense.items():
                p.data = weight
                optimizer.state.pop(p, None)
            optimizer.state.update(state)

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
        self._shapes: dict[Tensor, torch.Size] = {p: p.shape for p in self._dense_shapes}
        self._model = None
        applied.undo()
        for optimizer in self._optimizers:
            left: dict[Tensor, Any] = {p: optimizer.state.pop(p) for p in self._dense_shapes if p in optimizer.state}
            self._left[optimizer] = left
            for p, state in left.items() if optimizer in self._early else ():
                if (first := before_a_step(state, self._shapes[p], p.shape)) is not None:
                    optimizer.state[p] = first


def _is_of(p: Tensor, state: Iterable[Any]) -> bool:
    """Return whether a parameter's state is of as many numbers as it has, or of none: not of what it was before."""
    tensors = [value for value in state if isinstance(value, Tensor)]
    return any(value.shape == p.shape for value in tensors) or all(value.numel() <= 1 for value in tensors)


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
