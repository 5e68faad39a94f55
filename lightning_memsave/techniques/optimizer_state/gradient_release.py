"""Gradients that end in backward: each parameter's, as soon as it is complete, and then it is freed.

`GradientRelease` steps the parameter at once, with the optimizer's own step of one parameter, so that the results are
the same bits; the `optimizer.step()` that follows finds no gradients. `GradientsIntoState` adds the gradient to the
optimizer's moments, and the step moves the parameters. Either way there is one gradient instead of all.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.saved_tensors.checkpoint_regions import before_change, expect_changes, expect_no_changes
from lightning_memsave.techniques.optimizer_state import optimizer_accumulation
from lightning_memsave.techniques.optimizer_state.gradient_exchange import GradientExchange
from lightning_memsave.techniques.optimizer_state.quantized import is_quantized, memory_of
from lightning_memsave.torch_internals.autograd_graph import version_of
from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone, register_first
from lightning_memsave.torch_internals.optimizer_class import IN_BACKWARD, PENDING, bare_step, step_one


class InBackward(ABC):
    """What happens to gradients inside of backward, from now until `remove`.

    Args:
        optimizers: whose parameters.
        exchange: averages gradients over processes before they are used; `None`: they are this process's own.

    Raises:
        ValueError: an optimizer that needs all gradients at once.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], exchange: GradientExchange | None = None) -> None:
        self._is_rehearsal, self._exchange = False, exchange
        self._is_open = True
        self._observe: Callable[[Tensor], object] | None = None
        self._hooks = []
        self._optimizers = list(map(weakref.ref, optimizers))  # their state must not wait for the garbage collector
        for reference in self._optimizers:
            check_steps_parameters_alone(_alive(reference), "OptimizerState.gradients")
            vars(_alive(reference))[IN_BACKWARD] = True
        self._places: dict[Tensor, tuple[weakref.ref[torch.optim.Optimizer], int]] = {}
        for reference in self._optimizers:
            for gindex, group in enumerate(_alive(reference).param_groups):
                for p in group["params"]:
                    if p.requires_grad:
                        self._places[p] = reference, gindex
                        self._hooks.append(p.register_post_accumulate_grad_hook(self._complete))
            if exchange is not None:
                self._hooks.append(_alive(reference).register_step_post_hook(self._check_nothing_is_left))
        if exchange is not None:
            exchange.use = self._use

    @torch.no_grad()
    def _complete(self, p: Tensor) -> None:
        if self._is_rehearsal:
            p.grad = None
        elif not self._is_open:
            return
        elif self._exchange is not None and p in self._exchange:
            self._exchange.add(p)
        else:
            self._use(p)

    def _use(self, p: Tensor) -> None:
        if self._observe is not None:
            self._observe(p)
            p.grad = None
            return
        reference, gindex = self._places[p]
        if (optimizer := reference()) is not None:
            self._take(optimizer, optimizer.param_groups[gindex], p)  # looked up now: loading a state dict replaces it
            p.grad = None

    @property
    def is_exchanged(self) -> bool:
        """Whether processes wait for each other in every backward."""
        return self._exchange is not None

    @torch.no_grad()
    def finish_backward(self) -> None:
        """Exchange what other processes still wait for; called after each backward."""
        if self._exchange is not None and not self._is_rehearsal:
            self._exchange.finish()

    def check_is_known(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that came later: gradients end in those that were there.

        Raises:
            RuntimeError: it is one.
        """
        if not any(reference() is optimizer for reference in self._optimizers):
            raise RuntimeError(
                f"{type(optimizer).__name__} has taken the place of another optimizer, and gradients are to "
                'end in backward. Use `OptimizerState(gradients="keep")`.'
            )

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of the optimizers, in order."""
        for optimizer in filter(None, (reference() for reference in self._optimizers)):
            for group in optimizer.param_groups:
                yield from group["params"]

    def _check_nothing_is_left(self, *_: Any) -> None:
        if any(p.grad is not None for p in self.parameters()):
            raise RuntimeError(
                "A parameter was unfrozen during the run and stepped with the gradient of one process: gradients that "
                "end in backward are averaged for parameters that train from the start. Use "
                '`OptimizerState(gradients="keep")`.'
            )

    @abstractmethod
    def _take(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> None:
        """Use the gradient of `p`, which is freed afterwards."""

    def wait_for_own_backward(self) -> None:
        """Leave gradients as they are from now on, but for those of `own_backward`."""
        self._is_open = False

    @contextlib.contextmanager
    def own_backward(self) -> Iterator[None]:
        """Take the gradients that are made while entered; others may be of a saliency map, or an attack."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Free gradients while entered, and do nothing else."""
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    @contextlib.contextmanager
    def observed(self, observe: Callable[[Tensor], object]) -> Iterator[None]:
        """Call `observe` with each parameter whose gradient is complete while entered, instead of using it."""
        was_rehearsal, self._is_rehearsal, self._observe = self._is_rehearsal, False, observe
        try:
            yield
        finally:
            self._is_rehearsal, self._observe = was_rehearsal, None

    def remove(self) -> None:
        """Let backward only compute gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._exchange = [], None
        self._places.clear()
        for optimizer in filter(None, (reference() for reference in self._optimizers)):
            vars(optimizer).pop(IN_BACKWARD, None)


def _alive(reference: weakref.ref[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = reference()
    assert optimizer is not None, "the caller holds it"
    return optimizer


class GradientRelease(InBackward):
    """Steps in backward.

    Args:
        optimizers: whose parameters.
        before_step: called with each parameter whose gradient is complete, for example to clip it by value.
        exchange: as of `InBackward`.

    Raises:
        ValueError: an optimizer that needs all gradients at once.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        before_step: Callable[[Tensor], object] | None = None,
        exchange: GradientExchange | None = None,
    ) -> None:
        super().__init__(optimizers, exchange)
        self._before_step, self._stepped = before_step, set[Tensor]()
        self._used: dict[int, dict[str, Any]] = {}
        """Learning rates and the like of the groups that have stepped, by the group's `id`."""
        expect_changes(self.parameters())
        for reference in self._optimizers:
            self._hooks.append(register_first(_alive(reference), self._step_is_over))

    def _take(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> None:
        if p in self._stepped:
            raise RuntimeError(
                'A second backward before `optimizer.step()`: with `OptimizerState(gradients="release")` each backward '
                'is a step of its own, so gradients cannot be accumulated. Use `gradients="keep"`.'
            )
        if self._before_step is not None:
            self._before_step(p)
        before_change(p)
        if id(group) not in self._used:
            self._used[id(group)] = _settings_of(group)
        step_one(bare_step(type(optimizer)), optimizer, group, p)
        self._stepped.add(p)

    def _step_is_over(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.clear()
        for group in optimizer.param_groups:
            used, now = self._used.pop(id(group), None), _settings_of(group)
            if used is not None and used != now:
                changed = next((name for name in now if now[name] != used.get(name)), "param_groups")
                raise RuntimeError(
                    f"`{changed}` of the optimizer was changed between backward and `optimizer.step()`: with "
                    '`OptimizerState(gradients="release")` parameters step in backward, with the value before it. '
                    'Change it earlier, or use `gradients="keep"`.'
                )
        # A parameter without a hook stepped as without us. That is fine, unless gradients were to be changed before.
        if self._before_step is not None and any(p.grad is not None for p in self.parameters()):
            raise RuntimeError(
                'A parameter was unfrozen during the run and stepped without clipping: with `gradients="release"` '
                'clipping is for parameters that train from the start. Use `OptimizerState(gradients="keep")`.'
            )

    def remove(self) -> None:
        """Let backward only compute gradients again."""
        super().remove()
        expect_no_changes(self.parameters())
        self._before_step = None
        self._stepped.clear()


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in group.items() if isinstance(value, (int, float, tuple))}
    tensors = {name: (id(t), version_of(t)) for name, t in group.items() if isinstance(t, Tensor)}
    return plain | tensors


class GradientsIntoState(InBackward):
    """Adds gradients to the moments of optimizers that `quantize_state` has changed.

    Raises:
        ValueError: an optimizer whose step needs the gradient itself.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], exchange: GradientExchange | None = None) -> None:
        listed = list(optimizers)
        super().__init__(listed, exchange)
        for optimizer in listed:
            vars(optimizer).setdefault(PENDING, {})
            memory_of(optimizer).takes_gradients = True

    def _take(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> None:
        optimizer_accumulation.add(optimizer, memory_of(optimizer), group, p)

    def remove(self) -> None:
        """Let backward only compute gradients again."""
        super().remove()
        for optimizer in filter(None, (reference() for reference in self._optimizers)):
            if is_quantized(optimizer):
                memory_of(optimizer).takes_gradients = False
