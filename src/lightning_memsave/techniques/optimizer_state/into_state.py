"""Gradients that go into the optimizer's state as soon as they are complete: there is no gradient left to keep.

Each backward adds its gradient, of one microbatch or of one batch among several, to the moments and frees it; the step
then only moves the parameters. What that changes, with microbatch gradients g_1 to g_k whose sum is the batch's:

* SGD with momentum: nothing. The momentum is linear in the gradient.
* Adam, AdamW: the second moment v would get g_1**2 + ... + g_k**2 (AdamA) instead of G**2, G = g_1 + ... + g_k. Where
  microbatches are noise, both are equal on average; where they agree, it is a k-th, and steps are sqrt(k) times as
  long. So the j-th microbatch comes in with a weight of 1 + 2 (j - 1) a, which makes up for its products with those
  before. The agreement a, from 0 to 1, is an average over steps for each tensor, (|G|**2 - D) / ((k - 1) D), with D =
  |g_1|**2 + ... + |g_k|**2 and, m being the first moment before each microbatch comes in,

      |G|**2 = D + 2 / (1 - beta_1) * (m . (g_2 + ... + g_k) - beta_1 * m_0 . (g_2 + ... + g_k)).

  m_0, the first moment before the batch, is gone after g_1: instead of g_2 + ... + g_k the last product takes (k - 1)
  g_1, which is as good on average where microbatches come in random order. So there are three sums over a tensor; with
  one microbatch, and where microbatches agree, that is Adam. Within a tensor v has AdamA's pattern. Microbatches are
  counted, whatever they weigh.

Low-bit moments are rounded once per microbatch instead of once per step, stochastically.

Source: Zhang et al., "Adam Accumulation to Reduce Memory Footprints of both Activations and Gradients for Large-scale
DNN Training", 2023 (https://arxiv.org/abs/2305.19982). Different: low-bit moments, SGD, and the agreement.
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
AGREEMENT = "agreement"
"""In a parameter's state: averages of |G|**2 - D, and of what that would be if microbatches were the same."""
_KEEP = 'Use `OptimizerState(gradients="keep")`'


class Pending(NamedTuple):
    """What has come of a parameter's gradient since its last step."""

    factor: float
    """Of gradients in the momentum: 1 in the first step of all, then 1 - dampening."""
    num_parts: int
    sums: Tensor | None = None
    """Of Adam: |g_1|**2 + ... + |g_k|**2; m . g_j of all but the first, m as it is then; m_0 . g_1."""


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
    now = Pending(factor, known.num_parts + 1 if known else 1, known.sums if known else None)
    sums = [_add(optimizer, memory, group, part, now) for part in in_parts(optimizer, p)]
    if sums[0] is not None:
        before = [] if now.sums is None else [now.sums.to(p.device)]
        now = now._replace(sums=torch.stack([*sums, *before]).sum(0))  # type: ignore[list-item]
    pending[p] = now


def _add(optimizer: Any, memory: _Memory, group: Mapping[str, Any], p: Tensor, now: Pending) -> Tensor | None:
    """For `p`, or for what stands in for it; returns what is new in `Pending.sums`."""
    assert p.grad is not None
    dtype, is_first = torch.promote_types(p.dtype, torch.float32), now.num_parts == 1
    gradient = p.grad.to(dtype)
    if group.get("maximize"):
        gradient = gradient.neg()
    state, before = optimizer.state[p], dict(optimizer.state.get(p, {}))
    moments, sums = {}, None
    for name in _MOMENTS[memory.plain_class.__name__]:
        stored = before.get(name)
        found = torch.zeros_like(gradient) if stored is None else decode(memory.format_of(p), name, stored, p.shape)
        moments[name] = found.to(dtype)
    if "momentum_buffer" in moments:
        _add_to_momentum(moments["momentum_buffer"], gradient, group, p, now.factor, is_first)
    else:
        first, second = moments.values()
        sums = _add_to_moments(first, second, gradient, group, is_first, _weight(state, now.num_parts))
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=p.device if group.get("fused") else "cpu"))
    noise = memory.noise_of(p, now.num_parts)
    for name, moment in moments.items():
        state[name] = put_back(memory.format_of(p), before.get(name), name, moment, p.shape, noise)
    return sums


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


def _add_to_moments(
    first: Tensor, second: Tensor, gradient: Tensor, group: Mapping[str, Any], is_first: bool, weight: Tensor | float
) -> Tensor:
    beta1, beta2 = map(float, group["betas"])
    product, none = _dot(gradient, first), gradient.new_zeros(())
    if is_first:
        first.mul_(beta1)
        second.mul_(beta2)
    first.add_(gradient, alpha=1 - beta1)
    if isinstance(weight, float):
        second.addcmul_(gradient, gradient, value=weight * (1 - beta2))
    else:  # nobody waits for what it is; in place, as there is little room
        second.div_(weight).addcmul_(gradient, gradient, value=1 - beta2).mul_(weight)
    return torch.stack([_dot(gradient, gradient), *((none, product) if is_first else (product, none))])


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _weight(state: Mapping[str, Any], place: int) -> Tensor | float:
    """Of the squares of the microbatch that comes in at this place; as if all agreed where nothing is known."""
    if place == 1:
        return 1.0
    if AGREEMENT not in state:
        return 1.0 if float(state["step"]) == 0 else 2.0 * place - 1  # the first step corrects what it has
    products, most = state[AGREEMENT]
    weight: Tensor = 1 + 2 * (place - 1) * (products / most).nan_to_num(0.0).clamp(0, 1)
    return weight


def _note_agreement(state: dict[str, Any], pending: Pending, beta1: float) -> Tensor:
    """Put that of one batch into its average; returns |G|**2 / D."""
    assert pending.sums is not None
    others, (parts, later, at_first) = pending.num_parts - 1, pending.sums
    products = 2 / (1 - beta1) * (later - beta1 * others * at_first)
    now = torch.stack([torch.minimum(products.clamp(min=-parts), others * parts), others * parts])
    state[AGREEMENT] = torch.lerp(state.get(AGREEMENT, torch.zeros_like(now)), now, 1 - beta1)
    ratio: Tensor = 1 + (now[0] / parts).nan_to_num(0.0).clamp_min(0)
    return ratio


def move(optimizer: Any, memory: _Memory, group: Mapping[str, Any], p: Tensor, pending: Pending) -> None:
    """The step of `p`, or of what stands in for it, whose gradients are in its moments."""
    state, lr = optimizer.state[p], float(group["lr"])
    names = _MOMENTS[memory.plain_class.__name__]
    moments = [decode(memory.format_of(p), name, state[name], p.shape) for name in names]
    if names == ("momentum_buffer",):
        p.add_(moments[0], alpha=-lr)
        return
    first, second = moments
    state["step"] += 1
    count, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    if pending.num_parts > 1:
        ratio = _note_agreement(state, pending, beta1)
        if count == 1:  # there are no other squares in it yet
            second = second * ratio
            noise = memory.noise_of(p, pending.num_parts + 1)
            state[names[1]] = put_back(memory.format_of(p), state[names[1]], names[1], second, p.shape, noise)
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    size = second.div(1 - beta2**count).sqrt_().add_(group["eps"])
    p.addcdiv_(first, size, value=-lr / (1 - beta1**count))
