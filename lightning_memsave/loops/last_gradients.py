"""The gradients of the step before while a batch runs: zeroed between forward and backward, as Lightning does.

`on_before_zero_grad` comes first. What it edits (a teacher that is averaged) is not to be seen by a later microbatch's
forward, so in a batch that is cut it waits for the last one's. A hook that reads gradients cannot wait: the first
microbatch's backward would add to those of the step before.

When a batch is run again, what the hook did to the module was put back, so it runs again. One that reads gradients does
not: those of the step before are gone. What a callback keeps in itself is not put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_memsave.lightning_compat import callbacks_of, has_hook, reaches_grad, says_grad
from lightning_memsave.loops.step_effects import StepEffects
from lightning_memsave.torch_internals.sharded_parameters import written_part

_HOOK = "on_before_zero_grad"


class LastGradients:
    """Zeroes the gradients of an optimizer in the tries of one batch.

    Args:
        loop: a `MicrobatchLoop`.
        optimizer: whose parameters.
        zero_grad: Lightning's function, with its hooks; `None`: gradients accumulate, and stay.
    """

    def __init__(self, loop: Any, optimizer: torch.optim.Optimizer, zero_grad: Callable[[], None] | None) -> None:
        self._trainer: L.Trainer = loop.trainer
        self._session, self._optimizer, self._zero_grad = loop.session, optimizer, zero_grad
        self._zeroes_itself: bool = loop.zeroes_itself
        self.accumulates = zero_grad is None
        """Whether they stay."""
        self.are_gone = False
        """Whether they have been freed or zeroed."""
        self._is_zeroed = self._is_repeated = False  # this try; and whether one before it was
        self._hooks_wait = self._have_hooks_run = False  # for the last forward pass of this try; in any try
        self._left: Sequence[Tensor] = []  # norms of gradients that a module's own `optimizer_zero_grad` has left
        self._zeros: list[Tensor] = []  # parameters whose gradients became zeros (`set_to_none=False`)

    def free(self) -> None:
        """Free them before the forward pass; Lightning's own `zero_grad` and its hooks follow where they do."""
        if not self.accumulates:
            self.are_gone = True
            for p in self._parameters():
                p.grad = None

    def zero(self, *, is_cut: bool) -> None:
        """Zero them behind the first forward pass of a try, unless they accumulate."""
        if self._zero_grad is None:
            return
        self._hooks_wait = is_cut or self._is_repeated
        if self._is_repeated:
            self._drop()
        elif is_cut:
            with _others_silent(self._trainer), self._session.cutter.record.noting_early_effects(self._early()):
                self._zero_grad()
        else:
            self._zero_grad()
            self._have_hooks_run = True
        self.are_gone = self._is_zeroed = True
        self._zeros = [p for p in self._parameters() if p.grad is not None]
        if self._zeroes_itself and (gradients := self._gradients()):
            self._left = torch._foreach_norm([written_part(gradient) for gradient in gradients])

    def end_forward(self) -> None:
        """Run the hooks that have waited for the last forward pass."""
        if not self._hooks_wait:
            return
        of_callbacks = _run_others(self._trainer, self._optimizer)
        if self._have_hooks_run:
            self._session.cutter.record.note_hooks(of_callbacks)
        self._hooks_wait, self._have_hooks_run = False, True

    def begin_again(self) -> None:
        """Begin another try, with a module that was put back."""
        self._is_repeated, self._left = self._is_zeroed, []

    @property
    def why_final(self) -> str | None:
        """Why a try cannot be undone: it has added to gradients of which nobody has a copy."""
        if not any(map(bool, self._left)):
            return None
        what = "`optimizer_zero_grad` has left gradients of earlier batches, of which there is no copy"
        return f"{what}. For sums over batches use `Trainer(accumulate_grad_batches=...)`"

    def _drop(self) -> None:
        """Drop gradients of a `training_step` that calls backward itself, in another try."""
        for p in (p for p in self._zeros if p.grad is None):
            p.grad = torch.zeros_like(p)
        self._session.cutter.record.note_lost_gradients(self._session.reads_gradients)
        if self._zeroes_itself:
            epoch, batch_idx = self._trainer.current_epoch, self._trainer.fit_loop.batch_idx
            self._trainer.lightning_module.optimizer_zero_grad(epoch, batch_idx, self._optimizer)
        elif self._gradients():
            self._optimizer.zero_grad()

    def _early(self) -> StepEffects | None:
        """Return what the module holds, where what comes now may change what later microbatches compute with."""
        is_quiet = not self._zeroes_itself and not list(_owners(self._trainer, reads_gradients=True))
        if is_quiet or not self._session.cutter.record.looks:
            return None
        device = self._trainer.strategy.root_device
        return StepEffects(self._trainer.lightning_module, device, reads_values=True)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]


@contextlib.contextmanager
def _others_silent(trainer: L.Trainer) -> Iterator[None]:
    """Let Lightning call the hooks that may read gradients alone."""
    with contextlib.ExitStack() as stack:
        for owner in _owners(trainer, reads_gradients=False):
            own = {name: hook for name, hook in vars(owner).items() if name == _HOOK}
            stack.callback(vars(owner).update, own)
            stack.callback(vars(owner).pop, _HOOK)
            vars(owner)[_HOOK] = lambda *_: None
        yield


def _run_others(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Run the hooks that read no gradients; return the names of those that are of callbacks."""
    owners = [*_owners(trainer, reads_gradients=False)]
    for owner in owners:
        _run(owner, trainer, optimizer)
    return [f"{type(owner).__name__}.{_HOOK}" for owner in owners if owner is not trainer.lightning_module]


def _owners(trainer: L.Trainer, *, reads_gradients: bool) -> Iterator[Any]:
    """Yield callbacks and the module, in Lightning's order, that have such a hook."""
    for owner in dict.fromkeys((*callbacks_of(trainer), trainer.lightning_module)):
        if has_hook(owner, _HOOK) and _may_read(owner) == reads_gradients:
            yield owner


def _may_read(owner: Any) -> bool:
    """Return whether a hook reads gradients, as far as its code and that of the user's functions in it tell."""
    own = vars(owner).get(_HOOK)
    return reaches_grad(owner, _HOOK) if own is None else says_grad(own)


def _run(owner: Any, trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> None:
    module = trainer.lightning_module
    name_before, module._current_fx_name = module._current_fx_name, _HOOK  # as logs want it
    try:
        if owner is module:
            module.on_before_zero_grad(optimizer)
        else:
            owner.on_before_zero_grad(trainer, module, optimizer)
    finally:
        module._current_fx_name = name_before
