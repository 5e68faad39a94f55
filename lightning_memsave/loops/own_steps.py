"""Optimizers that `training_step` steps itself, beside Lightning: once for each batch, so in no trial of a batch.

The inner loop of meta-learning, an adversary or a probe with an optimizer of its own: questions about the loss and
rehearsals run `training_step` with other weights or samples, and such an update could not be undone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OwnStepError(ValueError):
    """`training_step` was about to step an optimizer where it runs for a trial."""


class NoOwnSteps:
    """Raises `OwnStepError` inside where an optimizer is about to step; `has_found` tells of it afterwards."""

    has_found = False

    def __enter__(self) -> NoOwnSteps:
        self._hook = register_optimizer_step_pre_hook(self._refuse)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.has_found = True
        raise OwnStepError(
            f"`training_step` steps an optimizer ({type(optimizer).__name__}) itself, so it cannot be tried before it "
            "is run. Set `self.automatic_optimization = False`, or leave out what needs a trial: "
            '`checkpointing="blocks"` does not.'
        )
