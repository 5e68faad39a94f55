"""Gradients that go into the optimizer's state as soon as they are complete: there is no gradient left to keep.

Each backward adds its gradient, of one microbatch or of one batch among several, to the moments and frees it; the step
then only moves the parameters. What that changes, with microbatch gradients g_1 to g_k whose sum is the batch's:

* SGD with momentum: nothing. The momentum is linear in the gradient.
* Adam, AdamW: the first moment is linear as well. The second, v, would get D = g_1**2 + ... + g_k**2 (AdamA) instead
  of G**2, G = g_1 + ... + g_k. Where microbatches are noise, both are equal on average; where they agree, D is a k-th
  of it, and steps are sqrt(k) times as long. What is missing, the products of all pairs, is estimated for each row and
  each column of a matrix: a row's sum G s with random signs s is linear in G, so that microbatches add up in it, and
  its square is on average the sum of squares of the row (Alon, Matias, Szegedy). As that of each g_j is known,

      G**2 - D, summed over a row, is (g_1 s + ... + g_k s)**2 - (g_1 s)**2 - ... - (g_k s)**2 on average,

  which is 0 for one microbatch, and for a row that one microbatch alone has touched. So the step finds v with D in it,
  and scales its rows and then its columns to the sums that they would have with G**2 (one round of iterative
  proportional fitting). Four sums per row and column with other signs in each step, five floats with the last term;
  steps average them, as v is an average. v is right in each of its rows and columns, on average; within them it has D's
  pattern. Parameters with one dimension have one element per row, which is exact: that is Adam.

Low-bit moments are rounded once per microbatch and once per step instead of once per step, stochastically.

Sources: Zhang et al., "Adam Accumulation to Reduce Memory Footprints of both Activations and Gradients for Large-scale
DNN Training", 2023 (https://arxiv.org/abs/2305.19982) for moments instead of gradients; Alon, Matias, Szegedy, "The
Space Complexity of Approximating the Frequency Moments", 1996 (https://doi.org/10.1145/237814.237823) for the signs;
Deming, Stephan, 1940 (https://doi.org/10.1214/aoms/1177731829) for the fitting. Ours: signs for the second moment of a
gradient that nobody has; low-bit moments; SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.optimizers import PENDING, in_parts, original, put, span_of
from lightning_memsave.numerics.blockwise import BLOCK_SIZE, num_blocks
from lightning_memsave.numerics.kbit import mix, random_bits
from lightning_memsave.techniques.optimizer_state.codecs import Noise, decode, put_back

_MOMENTS = {"SGD": ("momentum_buffer",), "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq")}
_NUM_SIGNED = 4
"""Signed sums of a row or column: their mean square is off by a factor of 1 +- 0.7 in one step."""
_LARGEST_EXACT = 2**16
"""Elements of a parameter with one dimension up to which each is a row."""
_LARGEST_UNIT = 2**20
_LEAST, _LEAST_EXACT = 0.25, 2**-20
"""How little of a sum is left at least: what is estimated, or rounded, may be small by chance, and is divided by."""
_KEEP = 'Use `OptimizerState(gradients="keep")`'


class Pending(NamedTuple):
    """What has come of a parameter's gradient since its last step."""

    factor: float
    """Of gradients in the momentum: 1 in the first step of all, then 1 - dampening."""
    num_parts: int
    sums: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # noqa: RUF012  # never changed
    """Of Adam, by part: see `_signed_sums`."""


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
    sums = dict(known.sums) if known else {}
    now = Pending(factor, known.num_parts + 1 if known else 1, sums)
    for part in in_parts(optimizer, p):
        _add(optimizer, memory, group, part, now)
    pending[p] = now


def _add(optimizer: Any, memory: _Memory, group: Mapping[str, Any], p: Tensor, now: Pending) -> None:
    """For `p`, or for what stands in for it."""
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
        found, known = _signed_sums(gradient, p, memory.noise_of(p)), now.sums.get(_place(p))
        now.sums[_place(p)] = found if known is None else tuple(map(torch.add, known, found))
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


# ------------------------------------------------------------------------------- squares of a sum that nobody has
def _is_matrix(p: Tensor) -> bool:
    return p.dim() > 1 and 1 < len(p) < p.numel() and math.lcm(BLOCK_SIZE, p[0].numel()) <= _LARGEST_UNIT


def row_length(p: Tensor) -> int:
    """Elements of `p`, one after the other, that count as a row; what is large steps in parts of whole rows."""
    if _is_matrix(p):
        return p[0].numel()
    return 1 if p.numel() <= _LARGEST_EXACT else BLOCK_SIZE


def _rows(value: Tensor, p: Tensor) -> Tensor:
    """As a matrix, [N, M]; a copy where the last row is not full."""
    length, flat = row_length(original(p)), value.reshape(-1)
    if rest := -flat.numel() % length:
        flat = nn.functional.pad(flat, (0, rest))
    return flat.view(-1, length)


def _place(p: Tensor) -> tuple[int, int]:
    """Which part `p` is: where it begins, and its length."""
    return span_of(p).start or 0, p.numel()


def _signed_sums(gradient: Tensor, p: Tensor, noise: Noise) -> tuple[Tensor, ...]:
    """Of rows, [N, q + 1], and of a matrix's columns, [M, q + 1]; the last are the mean squares of the others."""
    matrix = _rows(gradient, p)
    found: list[Tensor] = []
    for side in (matrix, matrix.T) if _is_matrix(original(p)) else (matrix,):
        num = side.shape[1]
        bits = random_bits(mix(noise.seed ^ noise.shift) ^ len(found), 0, num_blocks(num), side.device).view(-1, 1)
        chosen = bits[:num] >> torch.arange(min(_NUM_SIGNED, num), device=side.device) & 1  # [M, q]
        sums = side @ chosen.to(side.dtype).mul_(2).sub_(1)
        found.append(torch.cat([sums, sums.square().mean(1, keepdim=True)], 1))
    return tuple(found)


def _square_sum(second: Tensor, p: Tensor, pending: Pending, beta2: float, is_coded: bool) -> None:
    """Let the second moment, which got the squares of microbatches, have the sums that it would with their sum's."""
    sums = pending.sums.get(_place(p))
    if pending.num_parts == 1 or sums is None:  # none: a checkpoint from a device where parts have another size
        return
    matrix = _rows(second, p)
    least = _LEAST if is_coded or matrix.shape[1] > 1 else _LEAST_EXACT
    has, wanted = [], []
    for axis, signed in enumerate(sums):
        has.append(matrix.sum(1 - axis))
        missing = (1 - beta2) * (signed[:, :-1].square().mean(1) - signed[:, -1])
        ratio = (1 + missing / has[axis]).nan_to_num(1.0).clamp(least, pending.num_parts)
        wanted.append(has[axis] * ratio)
    matrix.mul_((wanted[0] / has[0]).nan_to_num(1.0)[:, None])
    if len(sums) == 2:
        total = (wanted[0].sum() / wanted[1].sum() + 1) / 2  # both are estimates of it
        matrix.mul_((wanted[1] * total / matrix.sum(0)).nan_to_num(1.0))
    put(matrix.view(-1)[: second.numel()].view(second.shape), second)


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
        _square_sum(second, p, pending, beta2, memory.format_of(p) not in ("32bit", "offload"))
        noise = memory.noise_of(p, pending.num_parts + 1)
        state[names[1]] = put_back(memory.format_of(p), state[names[1]], names[1], second, p.shape, noise)
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    size = second.div(1 - beta2**count).sqrt_().add_(group["eps"])
    p.addcdiv_(first, size, value=-lr / (1 - beta1**count))
