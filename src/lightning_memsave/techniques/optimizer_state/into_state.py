"""Gradients that go into the optimizer's state as soon as they are complete: there is no gradient left to keep.

Each backward adds its gradient, of one microbatch or of one batch among several, to the moments and frees it; the step
then only moves the parameters. What that changes, with microbatch gradients g_1 to g_k whose sum is the batch's:

* SGD with momentum: nothing. The momentum is linear in the gradient.
* Adam, AdamW: the second moment v gets g_1**2 + ... + g_k**2 instead of (g_1 + ... + g_k)**2. Where microbatches are
  noise, both are equal on average; where they agree, it is a k-th, and steps would be sqrt(k) times as long. What they
  agree in shows in the first moment m, which is exact: a step divides by the root of v + (1 - 1/k) m**2, both without
  bias, 1/k as an average like v, as k may change. With one microbatch, and where gradients agree with each other and
  from step to step, that is Adam's step; where they are pure noise, it is some 6 % shorter (k = 8, beta_1 = 0.9), as
  the mean of the last gradients is not quite zero; where microbatches agree and steps alternate, it is up to sqrt(k)
  times as long. Microbatches are counted, whatever they weigh.

Low-bit moments are rounded once per microbatch instead of once per step, stochastically.

Source: Zhang et al., "Adam Accumulation to Reduce Memory Footprints of both Activations and Gradients for Large-scale
DNN Training", 2023 (https://arxiv.org/abs/2305.19982). Different: low-bit moments, SGD, and (1 - 1/k) m**2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.optimizers import PENDING, in_parts
from lightning_memsave.techniques.optimizer_state.codecs import Noise, decode, put_back

_MOMENTS = {"SGD": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq")}
SHARE = "share_of_agreement"
"""In a parameter's state: what its second moment has of what microbatches agree in."""
_KEEP = 'Use `OptimizerState(gradients="keep")`'


class Pending(NamedTuple):
    """What has come of a parameter's gradient since its last step."""

    factor: float
    """Of gradients in the momentum: 1 in the first step of all, then 1 - dampening."""
    num_parts: int


class _Memory(Protocol):
    plain_class: type[torch.optim.Optimizer]

    def format_of(self, p: Tensor) -> str: ...

    def noise_of(self, p: Tensor, draw: int = 0) -> Noise: ...


def check_into_state(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse optimizers whose step needs the gradient itself.

    Args:
        optimizer: any.
        name: of its plain class.

    Raises:
        ValueError: it is one of those.
    """
    if name not in _MOMENTS:
        raise setting_error(
            "OptimizerState.gradients",
            f'="into-state" needs one of {", ".join(_MOMENTS)}',
            name,
            f'{_KEEP}, or `gradients="release"`.',
        )
    for group in optimizer.param_groups:
        if any(p.is_complex() for p in group["params"]):
            raise setting_error(
                "OptimizerState.gradients", '="into-state" cannot square complex gradients', "complex", f"{_KEEP}."
            )
        if name == "SGD" and (not group["momentum"] or group["nesterov"]):
            key = "nesterov" if group["momentum"] else "momentum"
            raise setting_error(
                "OptimizerState.gradients",
                '="into-state" needs SGD with momentum that is not Nesterov\'s, whose step needs the gradient itself',
                f"{key}={group[key]}",
                f"Use `nesterov=False` and `momentum=0.9`, or {_KEEP[4:]}.",
            )
        if name == "Adam" and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise setting_error(
                "OptimizerState.gradients",
                '="into-state" cannot keep Adam\'s L2 weight decay, which is squared with the whole gradient',
                group["weight_decay"],
                f"Use AdamW, or {_KEEP[4:]}.",
            )


def add(optimizer: Any, memory: _Memory, group: Mapping[str, Any], p: Tensor) -> None:
    """Put the gradient of `p` into its moments."""
    assert p.grad is not None
    pending: dict[Tensor, Pending] = vars(optimizer)[PENDING]
    known = pending.get(p)
    has_momentum = optimizer.state.get(p, {}).get("momentum_buffer") is not None
    factor = known.factor if known else _factor(group, is_first=not has_momentum)
    now = Pending(factor, known.num_parts + 1 if known else 1)
    for part in in_parts(optimizer, p):
        _add(optimizer, memory, group, part, now)
    pending[p] = now


def _add(optimizer: Any, memory: _Memory, group: Mapping[str, Any], p: Tensor, now: Pending) -> None:
    assert p.grad is not None
    dtype, is_first = torch.promote_types(p.dtype, torch.float32), now.num_parts == 1
    gradient = p.grad.to(dtype)
    if group.get("maximize"):
        gradient = gradient.neg()
    state, before = optimizer.state[p], dict(optimizer.state.get(p, {}))
    moments = {}
    for name in _MOMENTS[memory.plain_class.__name__]:
        stored = before.get(name)
        found = torch.zeros_like(gradient) if stored is None else decode(memory.format_of(p), name, stored, p.shape)
        moments[name] = found.to(dtype)
    if "momentum_buffer" in moments:
        _add_to_momentum(moments["momentum_buffer"], gradient, group, p, now.factor, is_first)
    else:
        first, second = moments.values()
        _add_to_moments(first, second, gradient, group, is_first)
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=p.device if group.get("fused") else "cpu"))
    noise = memory.noise_of(p, now.num_parts)
    for name, moment in moments.items():
        state[name] = put_back(memory.format_of(p), before.get(name), name, moment, p.shape, noise)


def _factor(group: Mapping[str, Any], is_first: bool) -> float:
    return 1.0 if is_first else 1.0 - float(group.get("dampening", 0.0))


def _add_to_momentum(
    momentum: Tensor, gradient: Tensor, group: Mapping[str, Any], p: Tensor, factor: float, is_first: bool
) -> None:
    if is_first:
        momentum.mul_(group["momentum"])
        if group["weight_decay"]:
            gradient = gradient.add(p.detach(), alpha=group["weight_decay"])
    momentum.add_(gradient, alpha=factor)


def _add_to_moments(first: Tensor, second: Tensor, gradient: Tensor, group: Mapping[str, Any], is_first: bool) -> None:
    beta1, beta2 = map(float, group["betas"])
    if is_first:
        first.mul_(beta1)
        second.mul_(beta2)
    first.add_(gradient, alpha=1 - beta1)
    second.addcmul_(gradient, gradient, value=1 - beta2)


def move(optimizer: Any, memory: _Memory, group: Mapping[str, Any], p: Tensor, num_parts: int) -> None:
    """The step of `p`, or of what stands in for it, whose `num_parts` gradients are in its moments."""
    state, lr = optimizer.state[p], float(group["lr"])
    names = _MOMENTS[memory.plain_class.__name__]
    moments = [decode(memory.format_of(p), name, state[name], p.shape) for name in names]
    if names == ("momentum_buffer",):
        p.add_(moments[0], alpha=-lr)
        return
    first, second = moments
    state["step"] += 1
    count, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    start = 1 - beta2**count
    if num_parts > 1 or SHARE in state:
        state[SHARE] = beta2 * state.get(SHARE, 1 - beta2 ** (count - 1)) + (1 - beta2) / num_parts
    size = second.div(start)
    if SHARE in state:
        missing = max(0.0, 1 - state[SHARE] / start)  # of which rounding may leave less than nothing
        size.addcmul_(first, first, value=missing / (1 - beta1**count) ** 2)
    size.sqrt_().add_(group["eps"])
    p.addcdiv_(first, size, value=-lr / (1 - beta1**count))
