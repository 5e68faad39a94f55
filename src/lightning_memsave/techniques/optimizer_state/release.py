"""Gradient release: each parameter steps inside of backward, as soon as its gradient is complete, and frees it.

Never more than one gradient is there, instead of all of them. The step is the optimizer's own, of one parameter, so the
results are the same bits; the `optimizer.step()` that follows finds no gradients.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.optimizers import bare_step, check_steps_parameters_alone, step_one


class GradientRelease:
    """Steps in backward, from now until `remove`.

    Args:
        optimizers: whose parameters.
        before_step: called with each parameter whose gradient is complete, for example to clip it by value.

    Raises:
        ValueError: an optimizer that needs all gradients at once.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], before_step: Callable[[Tensor], object] | None = None
    ) -> None:
        self._before_step, self._stepped = before_step, set[Tensor]()
        self._is_rehearsal = False
        self._hooks = []
        for optimizer in optimizers:
            check_steps_parameters_alone(optimizer, "OptimizerState.gradients")
            reference = weakref.ref(optimizer)  # its state must not wait for the garbage collector
            self._hooks.append(optimizer.register_step_post_hook(self._step_is_over))
            for gindex, group in enumerate(optimizer.param_groups):
                for p in group["params"]:
                    if p.requires_grad:
                        hook = functools.partial(self._release, reference, gindex)
                        self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    @torch.no_grad()
    def _release(self, reference: Callable[[], torch.optim.Optimizer | None], gindex: int, p: Tensor) -> None:
        optimizer = reference()
        if optimizer is None:
            return
        if self._is_rehearsal:
            p.grad = None
            return
        if p in self._stepped:
            raise RuntimeError(
                'A second backward before `optimizer.step()`: with `OptimizerState(gradients="release")` each backward '
                'is a step of its own, so gradients cannot be accumulated. Use `gradients="keep"`.'
            )
        if self._before_step is not None:
            self._before_step(p)
        # The group is looked up now: loading a state dict replaces it.
        step_one(bare_step(type(optimizer)), optimizer, optimizer.param_groups[gindex], p)
        p.grad = None
        self._stepped.add(p)

    def _step_is_over(self, *_: Any) -> None:
        self._stepped.clear()

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Inside, gradients are freed and nothing steps."""
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    def remove(self) -> None:
        """Backward only computes gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before_step = [], None
        self._stepped.clear()
