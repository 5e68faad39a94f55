"""What is known of the values of fake tensors: followed through the operations that move values without changing them.

Some sizes depend on values: integers are kept in the narrowest type that holds their range, dropout's noise as one bit
per element, and a model skips a mask that is all ones. So ranges of integers, and how many values a tensor has, are
noted where they are known (the batch, `arange`, `bernoulli_`) and handed on by casts, copies, choices and comparisons.

Whoever reads a value is answered where facts tell it. Else a library's reading (Lightning logs a number) gets some
value, as none of them decides by it what is kept; a user's reading raises, since the step may depend on it.

Private name of torch (seen in 2.13): `DataDependentOutputException`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.memory.kernel_outputs import KERNELS_WITH_WORKSPACE, with_workspace
from lightning_memsave.numerics.fakes import UNKNOWN, Facts, facts_of, is_fake, note

_LOGGING_LIBRARIES = frozenset(
    {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics", "lightning_memsave"}
)
aten = torch.ops.aten


class FactsMode(TorchDispatchMode):
    """Follows facts while it is entered; above the fake mode, below whoever counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return _read(func, args[0])
        out = func(*args, **kwargs)
        if func in KERNELS_WITH_WORKSPACE:
            return with_workspace(func, args, kwargs, out)
        rule = _RULES.get(func.overloadpacket)
        if isinstance(out, Tensor) and is_fake(out) and (rule is not None or func._schema.is_mutable):
            facts = UNKNOWN if rule is None else rule(args, kwargs)
            is_part = func._schema.is_mutable and out.nbytes < out.untyped_storage().nbytes()
            note(out, _union(facts, facts_of(out)) if is_part else facts)
        return out


def note_values(fake: Tensor, real: Tensor) -> None:
    """Note the range of real integers of which `fake` is the shape."""
    if is_fake(real) or real.device.type == "meta" or real.dtype.is_floating_point or real.dtype.is_complex:
        return
    if real.numel() and real.layout is torch.strided:
        values = real.to(torch.uint8) if real.dtype == torch.bool else real
        low, high = (int(value) for value in torch.aminmax(values))
        note(fake, Facts(low, high, 1 if low == high else None))


def _read(func: Any, tensor: Tensor) -> Any:
    facts = facts_of(tensor)
    if facts.low is not None and facts.low == facts.high:
        return bool(facts.low) if tensor.dtype == torch.bool else facts.low
    try:
        return func(tensor)
    except DataDependentOutputException:
        if not _is_library(sys._getframe(2)):
            raise
    return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _is_library(frame: FrameType | None) -> bool:
    """Whether the innermost code outside of torch belongs to a library that only logs what it reads."""
    while frame is not None:
        room = frame.f_globals.get("__name__", "").partition(".")[0]
        if room != "torch":
            return room in _LOGGING_LIBRARIES
        frame = frame.f_back
    return False


# ------------------------------------------------------------------------------- rules: (args, kwargs) -> facts
_Rule = Callable[[Any, Any], Facts]


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, (int, bool)) else None


def _same(args: Any, kwargs: Any) -> Facts:
    source, target = args[0], kwargs.get("dtype")
    if source.dtype.is_floating_point and target is not None and not target.is_floating_point:
        return UNKNOWN
    return facts_of(source) if is_fake(source) else UNKNOWN


def _constant(value: Any) -> Facts:
    number = _number(value)
    return Facts(number, number, 1)


def _scaled(args: Any, kwargs: Any) -> Facts:
    """Times or over a number: as many values, others."""
    if isinstance(args[1], Tensor) or not isinstance(args[0], Tensor):
        return UNKNOWN
    return Facts(num_values=facts_of(args[0]).num_values)


def _shifted(sign: int) -> _Rule:
    def rule(args: Any, kwargs: Any) -> Facts:
        facts, by = facts_of(args[0]), _number(args[1])
        if by is None or kwargs.get("alpha", 1) != 1 or facts.low is None or facts.high is None:
            return Facts(num_values=facts.num_values if by is not None else None)
        return Facts(facts.low + sign * by, facts.high + sign * by, facts.num_values)

    return rule


def _of(value: Any) -> Facts:
    """Facts of an operand: a number, or a tensor."""
    if isinstance(value, Tensor):
        return facts_of(value) if is_fake(value) else UNKNOWN
    return _constant(value)


def _either(*values: Any) -> Facts:
    """Facts of what is made of the values of several operands."""
    return functools.reduce(_union, map(_of, values)) if values else UNKNOWN


def _union(first: Facts, second: Facts) -> Facts:
    return Facts(
        None if first.low is None or second.low is None else min(first.low, second.low),
        None if first.high is None or second.high is None else max(first.high, second.high),
        None if first.num_values is None or second.num_values is None else first.num_values + second.num_values,
    )


def _randint(args: Any, kwargs: Any) -> Facts:
    low, high = (0, args[0]) if isinstance(args[1], (list, tuple)) else args[:2]
    return Facts(low, high - 1)


def _arange(args: Any, kwargs: Any) -> Facts:
    if not all(isinstance(a, int) for a in args):
        return UNKNOWN
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    return Facts(min(start, end), max(start, end)) if step else UNKNOWN


def _compared(holds: Callable[[int, int, int], bool | None]) -> _Rule:
    """Compared with a number: true, false, or either."""

    def rule(args: Any, kwargs: Any) -> Facts:
        facts, number = _of(args[0]), _number(args[1])
        known = None
        if number is not None and facts.low is not None and facts.high is not None:
            known = holds(facts.low, facts.high, number)
        return Facts(0, 1) if known is None else Facts(int(known), int(known), 1)

    return rule


def _equal(low: int, high: int, number: int) -> bool | None:
    return True if low == high == number else False if number < low or number > high else None


def _negated(args: Any, kwargs: Any) -> Facts:
    facts = facts_of(args[0])
    if args[0].dtype != torch.bool or facts.low is None or facts.high is None:
        return UNKNOWN
    return Facts(1 - facts.high, 1 - facts.low, facts.num_values)


def _reduced(args: Any, kwargs: Any) -> Facts:
    """`all` and `any`: told where all elements agree."""
    facts = facts_of(args[0])
    if facts.low is not None and facts.high is not None:
        if facts.low > 0 or facts.high < 0:
            return Facts(1, 1, 1)
        if facts.low == facts.high == 0:
            return Facts(0, 0, 1)
    return Facts(0, 1)


def _draws(args: Any, kwargs: Any) -> Facts:
    return Facts(0, 1, 2) if not args[0].dtype.is_floating_point else Facts(num_values=2)


_RULES: Mapping[Any, _Rule] = {
    aten.arange: _arange,
    aten.bernoulli: _draws,
    aten.bernoulli_: _draws,
    aten.randint: _randint,
    **dict.fromkeys(
        (aten._to_copy, aten.clone, aten.roll, aten.flip, aten.gather, aten.repeat, aten.lift_fresh_copy), _same
    ),
    **dict.fromkeys((aten.index, aten.index_select, aten.sort, aten.expand_copy), _same),
    aten.copy_: lambda args, kwargs: _of(args[1]),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero_), lambda args, kwargs: _constant(0)),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), lambda args, kwargs: _constant(1)),
    **dict.fromkeys((aten.full, aten.full_like, aten.fill, aten.fill_), lambda args, kwargs: _of(args[1])),
    aten.new_full: lambda args, kwargs: _constant(args[2]),
    aten.scalar_tensor: lambda args, kwargs: _constant(args[0]),
    **dict.fromkeys((aten.mul, aten.mul_, aten.div, aten.div_), _scaled),
    **dict.fromkeys((aten.add, aten.add_), _shifted(1)),
    **dict.fromkeys((aten.sub, aten.sub_), _shifted(-1)),
    aten.where: lambda args, kwargs: _either(*args[1:]),
    **dict.fromkeys((aten.masked_fill, aten.masked_fill_), lambda args, kwargs: _either(args[0], args[2])),
    aten.constant_pad_nd: lambda args, kwargs: _either(args[0], args[2] if len(args) > 2 else 0),
    aten.cat: lambda args, kwargs: _either(*args[0]),
    aten.stack: lambda args, kwargs: _either(*args[0]),
    aten.eq: _compared(_equal),
    aten.ne: _compared(lambda low, high, n: None if (same := _equal(low, high, n)) is None else not same),
    aten.gt: _compared(lambda low, high, n: True if low > n else False if high <= n else None),
    aten.ge: _compared(lambda low, high, n: True if low >= n else False if high < n else None),
    aten.lt: _compared(lambda low, high, n: True if high < n else False if low >= n else None),
    aten.le: _compared(lambda low, high, n: True if high <= n else False if low > n else None),
    **dict.fromkeys((aten.logical_not, aten.bitwise_not), _negated),
    **dict.fromkeys((aten.all, aten.any), _reduced),
}
"""In-place operations without a rule make what was known void."""
