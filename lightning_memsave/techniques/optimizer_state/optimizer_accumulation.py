"""Gradients that go into the optimizer's state as soon as they are complete: those of matrices need not be kept.

Each backward adds its gradient, of one microbatch or of one batch among several, to the moments and frees it; the step
then only moves the parameters. What that changes, with microbatch gradients g_1 to g_k whose sum is the batch's:

* SGD with momentum: nothing. The momentum is linear in the gradient.
* Adam, AdamW: the first moment is linear as well. The second, v, would get D = g_1**2 + ... + g_k**2 (AdamA) instead
  of G**2, G = g_1 + ... + g_k. Where microbatches are noise, both are equal on average; where they agree, D is a k-th
  of it, and steps are sqrt(k) times as long. What is missing, the products of all pairs, is estimated for each row and
  each column of a matrix: a row's sum G s with random signs s is linear in G, so that microbatches add up in it, and
  its square is on average the sum of squares of the row (Alon, Matias, Szegedy). As that of each g_j is known,

      G**2 - D, summed over a row, is (g_1 s + ... + g_k s)**2 - (g_1 s)**2 - ... - (g_k s)**2 on average,

  which is 0 for one microbatch. The step scales the rows of v, and then its columns, to the sums that they would have
  with G**2 (one round of iterative proportional fitting). Four such sums for each row and column, with other signs in
  each step: v, which is an average over steps, averages them. Within rows and columns v has D's pattern; for it not to
  fade more slowly than v where microbatches agree, the j-th g_j**2 comes in with a weight of 1 + 2 (j - 1) a, a being
  the agreement of the steps before, (|G|**2 - |D|) / ((k - 1) |D|) from 0 to 1.

  Vectors and narrow matrices have rows of 256 and no columns. With up to 65,536 elements, and first moments of 8 bits
  or more, they keep G instead: that is Adam.

Low-bit moments are rounded once per microbatch (and second ones once more) instead of once per step, stochastically.

Sources: Zhang et al., "Adam Accumulation to Reduce Memory Footprints of both Activations and Gradients for
Large-scale DNN Training", 2023 (https://arxiv.org/abs/2305.19982) for moments instead of gradients; Alon, Matias,
Szegedy, "The Space Complexity of Approximating the Frequency Moments", 1996 (https://doi.org/10.1145/237814.237823) for
the signs; Deming, Stephan, 1940 (https://doi.org/10.1214/aoms/1177731829) for the fitting. Ours: signs for the second
moment of a gradient that nobody has; low-bit moments; SGD.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_memsave.core.errors import setting_error
from lightning_memsave.numerics.blockwise import BLOCK_SIZE, num_blocks
from lightning_memsave.numerics.kbit import mix, random_bits
from lightning_memsave.techniques.optimizer_state.moment_codecs import (
    Codec,
    Factored,
    RoundingNoise,
    bound_step,
    decode,
    put_back,
)
from lightning_memsave.techniques.optimizer_state.moment_names import KNOWN
from lightning_memsave.torch_internals.optimizer_class import PENDING, in_parts, local_shard, put, span_of, undivided

_CLASSES = ("SGD", "Adam", "AdamW")
AGREEMENT = "agreement"
"""Averages in a matrix's state, of |G|**2 - |D|, and of what that would be if microbatches were the same."""
_NUM_SIGNED = 4
"""Signed sums of a row or column: their mean square is off by a factor of 1 +- 0.7 in one step."""
_LARGEST_SUM = 2**16
"""Elements of what is no matrix up to which its sum is kept."""
_LARGEST_UNIT = 2**20
_LEAST = 0.25
"""Fraction of a row's or a column's sum with D that is left at least.

Estimates, which divide steps, may be small by chance.
"""
_OF_ALL = (-1, -1)
"""Among sums of parts: what goes into the agreement, of all parts so far."""
_KEEP = 'Use `OptimizerState(gradients="keep")`'

Signed = tuple[Tensor, Tensor]
"""Sums of each row with random signs, [q, N]; the row's sum of v, without squares of these yet, [N]."""


class Pending(NamedTuple):
    """What has come of a parameter's gradient since its last step."""

    factor: float
    """Weight of gradients in the momentum: 1 in the first step of all, then 1 - dampening."""
    num_parts: int
    sums: dict[tuple[int, int], tuple[Any, ...]] = {}  # noqa: RUF012  # never changed
    """Sums for Adam, by part (`_place`).

    G alone; or the totals of D and of the signed sums' mean squares, and a `Signed` for rows and one for columns.
    """


def on_device(saved: Sequence[Any], p: Tensor) -> Pending:
    """Return what a checkpoint has of a `Pending`, where `p` is; tensors of its own, as they are added to."""
    factor, num_parts, *sums = saved
    found = sums[0] if sums and isinstance(sums[0], dict) else {}  # else of an earlier version
    return Pending(factor, num_parts, tree_map_only(Tensor, lambda t: t.to(p.device, copy=True), found))


class _AccumulationState(Protocol):
    plain_class: type[torch.optim.Optimizer]

    def format_of(self, p: Tensor) -> str: ...

    def codec_of(self, p: Tensor, name: str) -> Codec | None: ...

    def noise_of(self, p: Tensor, draw: int = 0) -> RoundingNoise: ...


def check_into_state(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse optimizers whose step needs the gradient itself.

    Args:
        optimizer: any.
        name: of its plain class.

    Raises:
        ValueError: it is one of those.
    """
    if name not in _CLASSES:
        raise setting_error(
            "OptimizerState.gradients",
            f'="into-state" needs one of {", ".join(_CLASSES)}',
            name,
            f'{_KEEP}, or `gradients="release"`.',
        )
    for group in optimizer.param_groups:
        if any(p.is_complex() for p in group["params"]):
            raise setting_error(
                "OptimizerState.gradients", '="into-state" cannot square complex gradients', "complex", f"{_KEEP}."
            )
        if group.get("amsgrad"):
            raise setting_error(
                "OptimizerState.gradients", '="into-state" cannot keep the maximum of amsgrad', True, f"{_KEEP}."
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


def add(optimizer: Any, memory: _AccumulationState, group: Mapping[str, Any], p: Tensor) -> None:
    """Put the gradient of `p` into its moments."""
    assert p.grad is not None
    pending: dict[Tensor, Pending] = vars(optimizer)[PENDING]
    known = pending.get(p)
    has_momentum = optimizer.state.get(p, {}).get("momentum_buffer") is not None
    factor = known.factor if known else _factor(group, is_first=not has_momentum)
    sums = dict(known.sums) if known else {}
    now = Pending(factor, known.num_parts + 1 if known else 1, sums)
    with local_shard(optimizer, p) as local:
        for part in in_parts(optimizer, local):
            _add(optimizer, memory, group, part, now)
    pending[p] = now


def _add(optimizer: Any, memory: _AccumulationState, group: Mapping[str, Any], p: Tensor, now: Pending) -> None:
    """Add the gradient of `p`, or of what stands in for it."""
    assert p.grad is not None
    dtype, is_first = torch.promote_types(p.dtype, torch.float32), now.num_parts == 1
    gradient = p.grad.to(dtype)
    if group.get("maximize"):
        gradient = gradient.neg()
    state, before = optimizer.state[p], dict(optimizer.state.get(p, {}))
    moments = {}
    for name in KNOWN[memory.plain_class.__name__]:
        stored = before.get(name)
        found = torch.zeros_like(gradient) if stored is None else decode(memory.codec_of(p, name), stored, p.shape)
        moments[name] = found.to(dtype)
    if "momentum_buffer" in moments:
        _add_to_momentum(moments["momentum_buffer"], gradient, group, p, now.factor, is_first)
    else:
        _add_to_moments(moments, gradient, group, p, now, memory, state)
        state.setdefault("step", torch.zeros((), dtype=torch.float32, device=p.device if group.get("fused") else "cpu"))
    noise = memory.noise_of(p, now.num_parts)
    for name, moment in moments.items():
        state[name] = put_back(memory.codec_of(p, name), before.get(name), moment, p.shape, noise.of(name))


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
    moments: dict[str, Tensor],
    gradient: Tensor,
    group: Mapping[str, Any],
    p: Tensor,
    now: Pending,
    memory: _AccumulationState,
    state: Mapping[str, Any],
) -> None:
    """Add `gradient` to `moments`; what neither changes nor is new is taken out of them."""
    (beta1, beta2), is_first = map(float, group["betas"]), now.num_parts == 1
    first, second = moments.values()
    if is_first:
        first.mul_(beta1)
    first.add_(gradient, alpha=1 - beta1)
    known = now.sums.get(_place(p))
    if _is_sum(known) if known else _has_sum(undivided(p), memory):
        now.sums[_place(p)] = (gradient.clone() if known is None else known[0].add_(gradient),)
        if "exp_avg_sq" in state:
            del moments["exp_avg_sq"]
        return
    if is_first:
        second.mul_(beta2)
    now.sums[_place(p)] = _with_signed_sums(gradient, second, p, beta2, memory.noise_of(p), known)
    weight = _weight(state, now.num_parts)
    if isinstance(weight, float):
        second.addcmul_(gradient, gradient, value=1 - beta2)
    else:  # nobody waits for what it is; in place, as there is little room
        second.div_(weight).addcmul_(gradient, gradient, value=1 - beta2).mul_(weight)


def _weight(state: Mapping[str, Any], place: int) -> Tensor | float:
    """Return the correction weight for the k-th microbatch's squared gradient.

    It makes up for its products with others.
    """
    if place == 1 or AGREEMENT not in state:
        return 1.0
    products, most = state[AGREEMENT]
    weight: Tensor = 1 + 2 * (place - 1) * (products / most).nan_to_num(0.0).clamp(0, 1)
    return weight


# ------------------------------------------------------------------------------- squares of a sum that nobody has
def _is_matrix(p: Tensor) -> bool:
    """Return whether sums of its rows and columns are few, and parts of whole rows can step."""
    if p.dim() < 2 or not p.numel():
        return False
    length = p[0].numel()
    is_wide = 2 * (_NUM_SIGNED + 1) * (len(p) + length) <= p.numel()
    return is_wide and math.lcm(BLOCK_SIZE, length) <= _LARGEST_UNIT


def _has_sum(p: Tensor, memory: _AccumulationState) -> bool:
    """Return whether G itself is kept.

    Not beside coarser first moments: what these are off by would be divided by roots of far smaller squares.
    """
    is_fine = not memory.format_of(p).startswith(("4bit", "5bit"))
    return is_fine and p.numel() <= _LARGEST_SUM and not _is_matrix(p)


def _is_sum(known: tuple[Any, ...]) -> bool:
    return len(known) == 1


def row_length(p: Tensor) -> int:
    """Return elements of `p`, one after the other, that count as a row; what is large steps in parts of whole rows."""
    return p[0].numel() if _is_matrix(p) else BLOCK_SIZE


def _rows(value: Tensor, p: Tensor) -> Tensor:
    """Return a matrix, [N, M]; a copy where the last row is not full."""
    length, flat = row_length(undivided(p)), value.reshape(-1)
    if rest := -flat.numel() % length:
        flat = nn.functional.pad(flat, (0, rest))
    return flat.view(-1, length)


def _place(p: Tensor) -> tuple[int, int]:
    """Return which part `p` is: where it begins, and its length."""
    return span_of(p).start or 0, p.numel()


def _sides(matrix: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    """Return its rows; of what is a matrix by itself, its columns as well."""
    return (matrix, matrix.T) if _is_matrix(undivided(p)) else (matrix,)


def _signs(num: int, noise: RoundingNoise, axis: int, like: Tensor) -> Tensor:
    """Return -1 and 1, [q, num]; the same in one step, so that nothing need keep them."""
    seed = mix(noise.seed ^ mix(noise.shift ^ axis))
    bits = random_bits(seed, 0, num_blocks(num), like.device).view(1, -1)[:, :num]
    return (bits >> torch.arange(_NUM_SIGNED, device=like.device)[:, None] & 1).mul_(2).sub_(1).to(like.dtype)


def _with_signed_sums(
    gradient: Tensor, second: Tensor, p: Tensor, beta2: float, noise: RoundingNoise, known: tuple[Any, ...] | None
) -> tuple[Any, ...]:
    """Add one microbatch more, of which nothing is in `second` yet."""
    sides = _sides(_rows(gradient, p), p)
    if known is None:
        has = [side.sum(1) for side in _sides(_rows(second, p), p)]
        known = (gradient.new_zeros(2), *((each.new_zeros(_NUM_SIGNED, len(each)), each) for each in has))
    totals, *signed = known
    for axis, (side, (sums, squares)) in enumerate(zip(sides, signed, strict=True)):
        with torch.autocast(side.device.type, enabled=False):  # backward may run inside of one
            found = _signs(side.shape[1], noise, axis, side) @ side.T
        sums.add_(found)
        own, estimated = torch.linalg.vector_norm(side, dim=1).square_(), found.square_().mean(0)
        squares.add_(own - estimated, alpha=1 - beta2)
        if axis == 0:
            totals.add_(torch.stack([own.sum(), estimated.sum()]))
    return known


def _square_sum(second: Tensor, state: dict[str, Any], p: Tensor, pending: Pending, betas: tuple[float, float]) -> None:
    """Let `second`, with D of all microbatches or without, have the sums that it would with G**2."""
    beta1, beta2 = betas
    match pending.sums.get(_place(p)):
        case None:  # a checkpoint from a device where parts have another size, or from before there were sums
            return
        case (gradient,):
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            return
        case (totals, *signed):
            pass
    if pending.num_parts == 1:
        return
    matrix = _rows(second, p)
    least = _LEAST / _weight(state, pending.num_parts)
    estimates = [sums.square().mean(0) for sums, _ in signed]
    has = [side.sum(1) for side in _sides(matrix, p)]
    wanted = [
        (squares + (1 - beta2) * estimate).clamp(min=least * each)
        for (_, squares), estimate, each in zip(signed, estimates, has, strict=True)
    ]
    matrix.mul_((wanted[0] / has[0]).nan_to_num(1.0, 1.0, 1.0)[:, None])
    if len(wanted) == 2:
        total = (wanted[0].sum() / wanted[1].sum() + 1) / 2  # both are estimates of it
        matrix.mul_((wanted[1] * total / matrix.sum(0)).nan_to_num(1.0, 1.0, 1.0))
    put(matrix.view(-1)[: second.numel()].view(second.shape), second)
    most = (pending.num_parts - 1) * totals[0]
    now = torch.stack([(estimates[0].sum() - totals[1]).clamp(min=-totals[0]), most])
    [now] = pending.sums[_OF_ALL] = (now + sum(pending.sums.get(_OF_ALL, ())),)  # each part begins with the same state
    state[AGREEMENT] = torch.lerp(state.get(AGREEMENT, torch.zeros_like(now)), now, 1 - beta1)


def move(optimizer: Any, memory: _AccumulationState, group: Mapping[str, Any], p: Tensor, pending: Pending) -> None:
    """Step `p`, or what stands in for it, whose gradients are in its moments."""
    state, lr = optimizer.state[p], float(group["lr"])
    names = KNOWN[memory.plain_class.__name__]
    moments = [decode(memory.codec_of(p, name), state[name], p.shape) for name in names]
    if names == ("momentum_buffer",):
        p.add_(moments[0], alpha=-lr)
        return
    first, second = moments[0], moments[1].to(moments[0].dtype)  # as wide, also where only the first has changed
    state["step"] += 1
    count, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    _square_sum(second, state, p, pending, (beta1, beta2))
    if pending.num_parts > 1 or _is_sum(pending.sums.get(_place(p), ())):
        noise = memory.noise_of(p, pending.num_parts + 1)
        state[names[1]] = put_back(memory.codec_of(p, names[1]), state[names[1]], second, p.shape, noise.of(names[1]))
    if isinstance(state[names[1]], Factored):
        bound_step(first, second, (beta1, beta2))
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    size = second.div(1 - beta2**count).sqrt_().add_(group["eps"])
    p.addcdiv_(first, size, value=-lr / (1 - beta1**count))
