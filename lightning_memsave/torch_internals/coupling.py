"""Whether an optimizer steps each parameter by itself, so that it can be called for one at a time.

Private names of torch (seen in 2.13): `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_memsave.core.errors import setting_error
from lightning_memsave.torch_internals.fake_tensors import with_values


def check_steps_parameters_alone(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse optimizers that look at all parameters at once, or step by another one, which has groups of its own.

    So are those that cannot step without a closure.

    Raises:
        ValueError: it is one of those.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise setting_error(
            name, "needs a `torch.optim.Optimizer`", type(optimizer).__name__, "Derive its class from that."
        )
    if held_by(optimizer):
        raise setting_error(
            name,
            "needs an optimizer that steps each parameter by itself, or only calls the steps of those that it holds",
            type(optimizer).__name__,
            "Let its `step` do no more, and its `state` be theirs; or use AdamW or SGD.",
        )
    needs_closure = any(
        each.name == "closure" and each.default is each.empty
        for each in inspect.signature(optimizer.step).parameters.values()
    )
    if needs_closure or isinstance(optimizer, torch.optim.LBFGS) or _couples_parameters(optimizer):
        raise setting_error(
            name,
            "needs an optimizer that steps each parameter by itself",
            type(optimizer).__name__,
            "Use AdamW or SGD.",
        )


def hooks_of_step(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the functions that run before and after each step of an optimizer."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return [hook for kind in kinds for hook in getattr(optimizer, kind, {}).values()]


def register_first(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a function that runs after each step, before those that are there already."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = getattr(optimizer, "_optimizer_step_post_hooks", {})
    if handle.id in hooks:
        hooks.move_to_end(handle.id, last=False)
    return handle


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that one has as attributes, or in lists, tuples and dictionaries that it has."""
    leaves = tree_leaves([value for name, value in vars(optimizer).items() if name not in _OF_STEPS])
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer) and leaf is not optimizer}
    return list(found.values())


_OF_STEPS = ("state", "param_groups", "step")
_KNOWN = ("torch.optim.", "bitsandbytes.", "lightning_memsave.")


def _couples_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether two parameters step differently together than one after the other, tried on small ones of our own.

    So do optimizers that look at all parameters, those that count their steps themselves, and those that step by others
    which are not found, so that these parameters do not move. Classes of torch, bitsandbytes and this package do not.
    One that fails on two matrices, or draws random numbers, cannot be judged, and counts as one that does not.
    """
    if f"{type(optimizer).__module__}.".startswith(_KNOWN):
        return False
    try:  # in a thread, where no mode makes tensors fake
        return with_values(functools.partial(_steps_apart, optimizer))
    except Exception:  # whatever a class does that needs more than a step
        return False


def _steps_apart(optimizer: torch.optim.Optimizer) -> bool:
    values, gradients = two_matrices(seed=0), two_matrices(seed=1)
    gradients[1] *= 30
    lr = optimizer.param_groups[0].get("lr")
    settings = {} if lr or not isinstance(lr, (int, float)) else {"lr": 0.1}  # a warmup begins with none
    before = torch.get_rng_state()
    try:
        make = functools.partial(stepped_twin, optimizer, values, [gradients] * 2, settings=settings)
        twins = [make(in_turn=each) for each in (False, True)]
    finally:
        draws = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
    together, in_turn = ([p.detach() for p in twin.param_groups[0]["params"]] for twin in twins)
    apart = max(float((a - b).abs().max()) for a, b in zip(together, in_turn, strict=True))
    moved = max(float((a - b).abs().max()) for a, b in zip(together, values, strict=True))
    return not draws and (moved == 0 or apart > 1e-6 * moved)  # what moves none has parameters elsewhere


def two_matrices(seed: int) -> list[Tensor]:
    """Return two random float64 matrices, [4, 3], for a trial of an optimizer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64, device="cpu") for _ in range(2)]


def stepped_twin(
    optimizer: torch.optim.Optimizer,
    values: list[Tensor],
    gradients: list[list[Tensor]],
    *,
    group: int = 0,
    in_turn: bool = False,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return a new optimizer of this class that has stepped `values`, once for each of `gradients`.

    Args:
        optimizer: whose class, attributes and settings.
        values: of its parameters.
        gradients: of all parameters, for each step.
        group: whose settings it has.
        in_turn: one parameter steps after the other, each with what the group was before the first.
        settings: of the group, that differ.
    """
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    twin: Any = copy.copy(optimizer)
    kept: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    own = {key: value for key, value in vars(optimizer).items() if not key.startswith("_") and key not in _OF_STEPS}
    vars(twin).update(copy.deepcopy(own, kept), state=defaultdict(dict))
    vars(twin).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    known = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
    now = {**copy.deepcopy(known), **settings}
    step = type(optimizer).step  # of the class: a scheduler has wrapped the instance's
    closure = [lambda: torch.zeros((), device="cpu")] if "closure" in inspect.signature(step).parameters else []
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        for some in [[p] for p in parameters] if in_turn else [parameters]:
            twin.param_groups = [{**now, "params": some}]
            step(twin, *closure)  # type: ignore[arg-type]  # any loss
        now = twin.param_groups[0]
    twin.param_groups = [{**now, "params": parameters}]
    return twin
