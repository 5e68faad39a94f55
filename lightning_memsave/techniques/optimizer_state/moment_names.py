"""What optimizers keep for each parameter in its shape, by name: what can be coded.

Moments of torch's optimizers are known. Those of any other class are found by a trial: a new optimizer of the class
steps two small matrices, and what it then keeps in their shape is a moment. One that is never negative is coded without
a zero, by which others would divide. What is near the weights, as the copies of schedule-free optimizers are, needs the
precision of weights, and stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.techniques.optimizer_state import projection
from lightning_memsave.techniques.optimizer_state.moment_codecs import POSITIVE
from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone, stepped_twin, two_matrices
from lightning_memsave.torch_internals.fake_tensors import truth, with_values
from lightning_memsave.torch_internals.optimizer_class import MadeClass, name_of

KNOWN: Mapping[str, tuple[str, ...]] = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
    "Muon": ("momentum_buffer",),
    "RMSprop": ("square_avg",),
    "Adagrad": ("sum",),
    "Adadelta": ("square_avg", "acc_delta"),
    "Rprop": ("prev", "step_size"),
}
"""The optimizers that are known, by the name of their class, and their moments."""
_OF_SECOND_MOMENTS = ("factored", "4bit-factored", "5bit-factored", "apollo")
_MUST_BE_OFF = ("centered", "capturable", "differentiable")


class Moments(NamedTuple):
    """What an optimizer keeps in the shape of a parameter."""

    is_positive: Mapping[str, bool]
    """Whether it is never negative, by name."""
    by_group: tuple[tuple[str, ...], ...]
    """Names, for each parameter group."""
    is_tried: bool
    """Whether a trial has found this."""

    def in_group(self, number: int, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names for a parameter group; for one that came later, all."""
        if not self.is_tried:
            return tuple(name for name in self.is_positive if _is_kept(name, self.is_positive, group))
        return self.by_group[number] if number < len(self.by_group) else tuple(self.is_positive)


def find_moments(optimizer: torch.optim.Optimizer) -> Moments:
    """Return what an optimizer keeps; nothing where that cannot be found out, or there is nothing."""
    known = KNOWN.get(type(optimizer).__name__)
    tried = None if type(optimizer).__module__.startswith("torch.optim.") and known else _tried_groups(optimizer)
    if tried is not None:
        names = {name for each in tried for name in each}
        signs = {name: all(each.get(name, True) for each in tried) for name in sorted(names)}
        return Moments(signs, tuple(map(tuple, tried)), is_tried=True)
    groups = optimizer.param_groups
    flags = ["momentum_buffer"] if known == KNOWN["RMSprop"] and any(g.get("momentum") for g in groups) else []
    flags += ["max_exp_avg_sq"] if any(g.get("amsgrad") for g in groups) else []
    return Moments({name: name in POSITIVE for name in (*(known or ()), *flags)}, (), is_tried=False)


def _is_kept(name: str, moments: Collection[str], group: Mapping[str, Any]) -> bool:
    if name == "momentum_buffer" and "square_avg" in moments:
        return bool(group.get("momentum"))
    return name != "max_exp_avg_sq" or bool(group.get("amsgrad"))


def _tried_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, bool]] | None:
    """Return the names of each group and their signs, from trials; `None` where a trial fails."""
    before = torch.get_rng_state()
    try:  # in a thread, where no mode makes tensors fake
        return [with_values(functools.partial(_tried, optimizer, n)) for n in range(len(optimizer.param_groups))]
    except Exception:  # whatever a class does that needs more than a step
        return None
    finally:
        torch.set_rng_state(before)


def _tried(optimizer: torch.optim.Optimizer, group: int) -> dict[str, bool]:
    gradients = [[g * 0.01 for g in two_matrices(seed)] for seed in (1, 2, 3)]
    lr = optimizer.param_groups[group].get("lr")
    settings = {"lr": 1e-3} if isinstance(lr, (int, float)) else {}  # the weights, and copies of them, move by little
    twin = stepped_twin(optimizer, two_matrices(seed=0), gradients, group=group, settings=settings)
    found: dict[str, list[Tensor]] = {}
    for p, state in twin.state.items():
        weights = p.detach()
        for name, value in state.items():
            is_of_elements = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
            if is_of_elements and (value - weights).norm() >= 0.5 * weights.norm():
                found.setdefault(name, []).append(value)
    return {name: _never_negative(torch.stack(values)) for name, values in found.items()}


def _never_negative(values: Tensor) -> bool:
    """Return whether values have no sign; zeros alone say nothing."""
    return bool((values >= 0).all() and (values > 0).any())


def check_signs(moments: Moments, state: Mapping[str, Any], name: str) -> None:
    """Refuse a moment that a trial of the optimizer, `name`, has found without a sign and that is negative after all.

    Raises:
        ValueError: with its name.
    """
    for moment, is_positive in moments.is_positive.items() if moments.is_tried else ():
        value = state.get(moment)
        if not is_positive or not isinstance(value, Tensor):
            continue
        if truth((value < 0).any(), False):
            rule = "was never negative in a trial of three steps, so it is coded without a sign; now it is negative"
            remedy = "Use `optimizer_state=False`."
            raise setting_error("optimizer_state", rule, f"{moment} of {name}", remedy)


def check_quantizable(optimizer: torch.optim.Optimizer, state_format: str) -> None:
    """Refuse what cannot have such state.

    Raises:
        ValueError: an optimizer without moments, or whose moments the format does not suit, or a setting that subtracts
            a moment from another.
    """
    check_steps_parameters_alone(optimizer, "optimizer_state")
    name, moments = name_of(type(optimizer)), find_moments(optimizer).is_positive
    if isinstance(type(optimizer), MadeClass):
        rule = "must change an optimizer before anything else does"
        raise setting_error("optimizer_state", rule, name, "Apply it first.")
    is_of_gradients = state_format in projection.METHODS
    if not moments:
        has_none = "needs an optimizer that keeps something for each parameter in its shape, in a trial of three steps"
        raise setting_error("optimizer_state", has_none, name, "Use AdamW, or `optimizer_state=False`.")
    known = [n for n in KNOWN if n in _ELEMENTWISE and n != "Adagrad"]  # which makes its state at once
    if is_of_gradients and name not in known:
        rule = f"in {state_format!r} needs one of {', '.join(known)}"
        raise setting_error("optimizer_state", rule, name, 'Use `optimizer_state="8bit"`.')
    is_known = name in KNOWN and "exp_avg_sq" in moments and "max_exp_avg_sq" not in moments
    if state_format in _OF_SECOND_MOMENTS and not is_known:
        raise setting_error(
            "optimizer_state",
            f"in {state_format!r} needs an optimizer with first and second moments, without `amsgrad`",
            name,
            'Use AdamW, or `optimizer_state="8bit"`.',
        )
    if state_format == "4bit" and name == "Rprop":
        rule = "in '4bit' cannot keep the step sizes of Rprop, which range too far"
        raise setting_error("optimizer_state", rule, name, 'Use `optimizer_state="8bit"`.')
    for group in optimizer.param_groups:
        for key in _MUST_BE_OFF:
            if group.get(key):
                raise setting_error(
                    "optimizer_state", f"in {state_format!r} cannot keep {name}'s `{key}`", True, f"Use `{key}=False`."
                )
        if name == "SGD" and not group["momentum"]:
            raise setting_error(
                "optimizer_state",
                "needs SGD with momentum, as SGD without has no state",
                "momentum=0",
                "Use `optimizer_state=False`.",
            )


_ELEMENTWISE = ("AdamW", "Adam", "NAdam", "RAdam", "SGD", "Lion", "RMSprop", "Adagrad")
