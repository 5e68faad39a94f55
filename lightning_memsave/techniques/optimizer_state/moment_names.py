"""What optimizers keep for each parameter in its shape, by name: what can be coded.

Moments of torch's optimizers are known. Those of any other class are found by a trial: a new optimizer of the class
steps two small matrices, and what it then keeps in their shape is a moment. One that is never negative is coded without
a zero, by which others would divide. A copy of the weights, as schedule-free optimizers keep, is no moment: it needs
the precision of weights, and stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.coupling import check_steps_parameters_alone, random_matrices, stepped_twin
from lightning_memsave.core.errors import setting_error
from lightning_memsave.techniques.optimizer_state import projection
from lightning_memsave.techniques.optimizer_state.moment_codecs import POSITIVE, SIGNED
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


def find_moments(optimizer: torch.optim.Optimizer) -> Mapping[str, bool]:
    """Return the names of what an optimizer keeps in the shape of a parameter, and whether it is never negative.

    Empty where that cannot be found out, or there is nothing.
    """
    known = KNOWN.get(type(optimizer).__name__)
    if known is None:
        return with_values(functools.partial(_tried, optimizer))
    groups = optimizer.param_groups
    more = {"momentum_buffer": any(group.get("momentum") for group in groups) and known == KNOWN["RMSprop"]}
    more["max_exp_avg_sq"] = any(group.get("amsgrad") for group in groups)
    return {name: name in POSITIVE for name in (*known, *(name for name, is_kept in more.items() if is_kept))}


def in_group(moments: Mapping[str, bool], group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return those of `moments` that an optimizer keeps for the parameters of `group`."""
    is_off = {
        "momentum_buffer": "square_avg" in moments and not group.get("momentum"),
        "max_exp_avg_sq": not group.get("amsgrad"),
    }
    return tuple(name for name in moments if not is_off.get(name))


def _tried(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    steps = [[g * 0.01 for g in random_matrices(2, seed)] for seed in (1, 2, 3)]  # the weights move by little
    before = torch.get_rng_state()
    try:
        twin = stepped_twin(optimizer, random_matrices(2, seed=0), steps)
    except Exception:  # whatever a class does that needs more than a step
        return {}
    finally:
        torch.set_rng_state(before)
    found: dict[str, list[Tensor]] = {}
    for p, state in twin.state.items():
        weights = p.detach()
        for name, value in state.items():
            is_of_elements = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
            if is_of_elements and (value - weights).norm() >= 0.5 * weights.norm():
                found.setdefault(name, []).append(value)
    return {
        name: name in POSITIVE or (name not in SIGNED and all(bool((value >= 0).all()) for value in values))
        for name, values in found.items()
    }


def check_signs(moments: Mapping[str, bool], state: Mapping[str, Any], name: str) -> None:
    """Refuse a moment of an optimizer that is not known, `name`, that is negative after all.

    Raises:
        ValueError: with its name.
    """
    for moment, is_positive in moments.items():
        value = state.get(moment)
        if not is_positive or moment in POSITIVE or not isinstance(value, Tensor):
            continue
        if truth((value < 0).any(), False):
            rule = "found no sign in three steps of a trial, and its codes have no place for one, but there is one now"
            remedy = "Use `optimizer_state=False`."
            raise setting_error("optimizer_state", rule, f"{moment} of {name}", remedy)


def check_quantizable(optimizer: torch.optim.Optimizer, state_format: str) -> None:
    """Refuse what cannot have such state.

    Raises:
        ValueError: an optimizer without moments, or whose moments the format does not suit, or a setting that subtracts
            a moment from another.
    """
    name, moments = name_of(type(optimizer)), find_moments(optimizer)
    check_steps_parameters_alone(optimizer, "optimizer_state")
    if isinstance(type(optimizer), MadeClass):
        rule = "must change an optimizer before anything else does"
        raise setting_error("optimizer_state", rule, name, "Apply it first.")
    is_of_gradients = state_format in projection.METHODS
    if not moments:
        has_none = "needs an optimizer that keeps something for each parameter in its shape, such as moments"
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
    for group in optimizer.param_groups:
        for key in _MUST_BE_OFF:
            if group.get(key):
                raise setting_error(
                    "optimizer_state", f"in {state_format!r} cannot keep {name}'s `{key}`", True, f"Use `{key}=False`."
                )
        if name == "SGD" and not group["momentum"]:
            raise setting_error(
                "optimizer_state",
                "needs SGD with momentum; without, there is no state",
                0,
                "Use `optimizer_state=False`.",
            )


_ELEMENTWISE = ("AdamW", "Adam", "NAdam", "RAdam", "SGD", "Lion", "RMSprop", "Adagrad")
