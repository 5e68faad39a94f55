"""The scopes that `training_step` runs in: the store of saved tensors, and checkpointed regions with their inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L

from lightning_memsave.core.report import Applied
from lightning_memsave.loops.forward_scope import ForwardScope
from lightning_memsave.loops.planned_checkpointing import PlannedCheckpointing
from lightning_memsave.saved_tensors.region_inputs import keeping_inputs_in
from lightning_memsave.saved_tensors.store import SavedTensorStore
from lightning_memsave.techniques.tiling import Tiles


class StepScopes:
    """What is open around `training_step`; opened when a run is set up, or by a fallback."""

    def __init__(self) -> None:
        self.activations: ForwardScope | None = None
        self.evaluated: ForwardScope | None = None
        """What validation, test and prediction run in without a fit."""
        self.tiles: Tiles | None = None
        """Modules that run in slices."""
        self.regions: Applied | None = None
        """Regions that are known before the first batch."""
        self.planned: PlannedCheckpointing | None = None
        """Regions that are chosen when the first batch comes."""
        self.region_inputs: SavedTensorStore | None = None
        """Keeps the inputs of regions; `None`: they stay on the device."""
        self.is_rehearsing = False
        """Whether `training_step` runs to learn something of it, which is no time to plan regions."""

    def plan(self, trainer: L.Trainer, args: tuple[Any, ...]) -> None:
        """Plan regions for `training_step(*args)`, where that is due."""
        if self.planned is not None and self.planned.is_due and not self.is_rehearsing:
            self.planned.plan(trainer, args, self._scope(trainer))

    def _scope(self, trainer: L.Trainer) -> Callable[[Callable[[], Any]], Any] | None:
        return None if self.activations is None else functools.partial(self.activations.run, trainer)

    def run(self, trainer: L.Trainer, step: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Run `step`, which is `training_step(*args)`, in these scopes; plan regions first, where that is due."""
        self.plan(trainer, args)
        scope = self._scope(trainer)
        with nullcontext() if self.region_inputs is None else keeping_inputs_in(self.region_inputs):
            output = step() if scope is None else scope(step)
        if self.tiles is not None:
            self.tiles.warn_if_unused()
        return output

    def evaluate(self, trainer: L.Trainer, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step of validation, test or prediction, whose losses compute no logits of a vocabulary either."""
        scope = self.activations or self.evaluated
        return step(*args) if scope is None else scope.evaluate(trainer, step, args)

    def evaluating(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """What `training_step` is evaluated in without gradients."""
        return nullcontext() if self.activations is None else self.activations.evaluating(trainer)

    @property
    def applied(self) -> list[Applied]:
        """What was done so far, as far as anybody waits to hear of it."""
        done = [] if self.tiles is None or not self.tiles.is_worth_telling else [self.tiles.applied]
        done += [] if self.regions is None else [self.regions]
        if self.planned is not None and self.planned.applied is not None and self.planned.is_worth_telling:
            done.append(self.planned.applied)
        return done if self.activations is None else [*done, self.activations.applied]

    def undo_regions(self) -> bool:
        """Give checkpointed modules back as they were; return whether there were any."""
        planned = None if self.planned is None else self.planned.applied
        taken = [applied for applied in (planned, self.regions) if applied is not None]
        for applied in taken:
            applied.undo()
        return bool(taken)

    def close(self) -> None:
        """Give the model back as it was; what was done stays on record."""
        for scope in (self.activations, self.evaluated):
            if scope is not None:
                scope.close()
        self.evaluated = None
        self.undo_regions()
        if self.tiles is not None:
            self.tiles.applied.undo()
