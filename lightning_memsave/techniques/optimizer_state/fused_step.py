"""Steps of AdamW, Adam and SGD on coded moments in one kernel: on a CPU for many parameters, on CUDA for each.

The general way (`quantized.py`) decodes a parameter's moments, lets the optimizer's own `step` run and codes them
again: some thirty calls of torch for each parameter, and as many passes over its memory. Here one kernel does all of
it, block by block (`numerics/kernels/coded_step.py`, `triton_coded_step.py`), with the same codes: on a CPU to the bit,
on CUDA but for the rounding of torch's own kernels, which multiply and add at once. What it does not know goes the
general way: another optimizer or format, `maximize`, a learning rate that is a tensor, a gradient of another dtype or
layout, and the first step of a parameter, which makes its state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_memsave.numerics import kernels
from lightning_memsave.numerics.blockwise import num_blocks
from lightning_memsave.numerics.kernels import native
from lightning_memsave.numerics.kernels.coded_step import (
    CORRECTED,
    ROUNDED,
    Moment,
    Part,
    Rule,
    ShortWeights,
    step_parts,
)
from lightning_memsave.techniques.optimizer_state.moment_codecs import (
    CODECS,
    BlockMap,
    QuantizedMoment,
)
from lightning_memsave.techniques.optimizer_state.moment_names import KNOWN
from lightning_memsave.torch_internals.fake_tensors import is_fake
from lightning_memsave.torch_internals.optimizer_class import bare_step

if TYPE_CHECKING:
    from lightning_memsave.techniques.optimizer_state.quantized import QuantizedState

_CLASSES = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_SPECIAL = ("maximize", "amsgrad", "capturable", "differentiable", "fused")


def step_fused(
    optimizer: torch.optim.Optimizer,
    memory: QuantizedState,
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    short: Mapping[Tensor, ShortWeights] = MappingProxyType({}),
) -> list[Tensor]:
    """Step those of `parameters`, which have gradients, that the kernel knows; return the others.

    Args:
        optimizer: whose state has codes.
        memory: of its change of class.
        group: their group, or one that was.
        parameters: float32, or bfloat16 where `short` has them.
        short: how 16-bit weights are written.
    """
    names = KNOWN[memory.plain_class.__name__] if memory.plain_class in _CLASSES else ()
    codecs = CODECS.get(memory.state_format, ())
    maps = [each for each in codecs[: len(names)] if isinstance(each, BlockMap)]
    if len(maps) < len(names) or not names or not _is_known(group) or not _is_torchs(memory.plain_class):
        return list(parameters)
    device = parameters[0].device if parameters else None
    if device is None or not _has_kernel(device) or len(set(parameters)) < len(parameters):
        return list(parameters)
    ready: list[Tensor] = []
    others: list[Tensor] = []
    for p in parameters:
        state, own = optimizer.state.get(p, {}), short.get(p)
        is_ready = (
            p.device == device
            and _is_plain(p, p.grad, own)
            and all(_is_of(state.get(n), m, p) for n, m in zip(names, maps, strict=True))
        )
        (ready if is_ready else others).append(p)
    counts = [optimizer.state[p]["step"] for p in ready] if len(names) == 2 else []
    if len(set(map(id, counts))) < len(counts) or not all(isinstance(each, Tensor) for each in counts):
        return list(parameters)
    if not ready or is_fake(ready[0]):
        return others
    shift = memory.noise_of(ready[0]).shift
    num_steps = [each.item() + 1 for each in counts] or [0.0] * len(ready)
    rules = {each: _rule(group, len(maps), shift, each) for each in set(num_steps)}
    seeds = [[memory.noise_of(p).of(name).seed for name in names] for p in ready]
    moments = [[optimizer.state[p][name] for name in names] for p in ready]
    if counts:
        torch._foreach_add_(counts, 1)
    given = zip([rules[count] for count in num_steps], ready, moments, seeds, strict=True)
    if ready[0].is_cuda:
        _step_on_cuda(given, maps, short)
    else:
        for rule in rules.values():
            rule.first, rule.second = [*map(_address, maps), None][:2]
        parts = [
            _part(rule, p, [_moment(*each) for each in zip(coded, seed, strict=True)], short.get(p))
            for rule, p, coded, seed in given
        ]
        step_parts(parts, sum(p.numel() for p in ready))
    torch.autograd.graph.increment_version(ready)
    return others


def _has_kernel(device: torch.device) -> bool:
    """Return whether a kernel steps parameters on that device."""
    return kernels.implementation(device) != "torch"


def _step_on_cuda(
    given: Iterable[tuple[Rule, Tensor, Sequence[QuantizedMoment], Sequence[int]]],
    maps: Sequence[BlockMap],
    short: Mapping[Tensor, ShortWeights],
) -> None:
    from lightning_memsave.numerics.kernels import triton_coded_step as triton_step

    for rule, p, coded, seeds in given:
        moments = [
            triton_step.CodedMoment(*moment, code.on_device(p.device), code.bits, seed)
            for moment, code, seed in zip(coded, maps, seeds, strict=True)
        ]
        triton_step.step(rule, p, moments, short.get(p))


def _is_torchs(plain_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether the class steps as torch wrote it: not where somebody has put another `step` in its place."""
    return bare_step(plain_class).__module__.startswith("torch.optim.")


def _is_known(group: Mapping[str, Any]) -> bool:
    numbers = (group["lr"], group["weight_decay"], *group.get("betas", ()))
    take = 1 - group["betas"][0] if "betas" in group else 0.0
    return (
        not any(group.get(name) for name in _SPECIAL)
        and all(isinstance(each, (float, int)) for each in numbers)
        and take < 0.5  # beyond, torch's `lerp_` has another formula
        and bool(group.get("momentum", True))  # without, SGD leaves the buffer that it has
    )


def _is_plain(p: Tensor, gradient: Tensor | None, short: ShortWeights | None) -> bool:
    """Return whether a kernel can read and write a parameter and its gradient as they lie in memory."""
    if gradient is None or p.dtype != (torch.float32 if short is None else torch.bfloat16):
        return False
    correction = None if short is None else short.correction
    tensors = [p, gradient] if correction is None else [p, gradient, correction]
    return (
        (type(p) in (Tensor, torch.nn.Parameter) or is_fake(p))
        and gradient.dtype in (torch.float32, p.dtype)
        and gradient.shape == p.shape
        and p.numel() > 0
        and all(_lies_plain(each, p.numel(), p.device) for each in tensors)
    )


def _lies_plain(tensor: Tensor, num_elements: int, device: torch.device) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device == device
        and tensor.is_contiguous()
        and tensor.numel() == num_elements
        and not tensor.is_neg()
    )


def _is_of(moment: Any, code: BlockMap, p: Tensor) -> bool:
    """Return whether `moment` has codes of all elements of `p`, where the kernel can read them."""
    if not isinstance(moment, QuantizedMoment):
        return False
    num_bytes = -(-p.numel() * code.bits // 8)
    return _lies_plain(moment.codes, num_bytes, p.device) and _lies_plain(
        moment.absmax, num_blocks(p.numel()), p.device
    )


def _rule(group: Mapping[str, Any], num_moments: int, shift: int, num_steps: float) -> Rule:
    rule = Rule(shift=shift, shrink=1.0, decay=group["weight_decay"], step=-group["lr"])
    if num_moments == 1:
        rule.keep, rule.take = group["momentum"], 1 - group["dampening"]
        rule.has_nesterov = group["nesterov"]
        return rule
    beta1, beta2 = group["betas"]
    rule.eps = group["eps"]
    rule.take, rule.keep_second, rule.take_second = 1 - beta1, beta2, 1 - beta2
    rule.step = -(group["lr"] / (1 - beta1**num_steps))
    rule.root_correction = (1 - beta2**num_steps) ** 0.5
    if group.get("decoupled_weight_decay"):
        rule.shrink, rule.decay = 1 - group["lr"] * group["weight_decay"], 0.0
    return rule


def _address(code: BlockMap) -> int:
    return native.native_map(code.code_map, code.bits)


def _part(rule: Rule, p: Tensor, moments: Sequence[Moment], short: ShortWeights | None) -> Part:
    assert p.grad is not None
    part = Part(ctypes.addressof(rule), p.data_ptr(), None, p.grad.data_ptr(), *moments, count=p.numel())
    part.has_short_gradient = p.grad.dtype == torch.bfloat16
    if short is not None:
        part.kind, part.seed = ROUNDED if short.correction is None else CORRECTED, short.seed
        part.correction = None if short.correction is None else short.correction.data_ptr()
    return part


def _moment(moment: QuantizedMoment, seed: int) -> Moment:
    return Moment(moment.codes.data_ptr(), moment.absmax.data_ptr(), seed)
