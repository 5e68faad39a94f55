"""What is known of the values of fake tensors, so that a step that is run for its shapes goes the way of the real one.

Small tensors that are made of known values alone (constants, the batch's integers: masks, positions) are computed
beside their fakes, and their values are the real ones. Of others some facts are followed: ranges of integers, which are
kept in the narrowest type that holds them, and how many values there are: dropout's noise is kept as one bit per
element. Both are handed on by casts, copies, choices and comparisons.

Whoever reads a value that is known is answered. Else a library's reading (Lightning logs a number) gets some value, as
none of them decides by it what is kept; a user's reading raises, since the step may depend on it.

Private names of torch (seen in 2.13): `DataDependentOutputException`, `unset_fake_temporarily`, `FakeTensor.fake_mode`
and its `cache_enabled`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memsave.measuring.source_lines import line_text, user_line
from lightning_memsave.simulation.kernel_outputs import CORRECTIONS
from lightning_memsave.simulation.known_sizes import ReadsValueError, sized_by_values
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode
from lightning_memsave.torch_internals.fake_tensors import (
    ASKS_DEVICE,
    UNKNOWN,
    DataDependentOutputException,
    Facts,
    device_of,
    facts_of,
    is_fake,
    note,
    unset_fake_temporarily,
)

_LOGGING_LIBRARIES = frozenset(
    {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics", "lightning_memsave"}
)
_MOST_VALUES = 2**20  # in a tensor whose values are followed
aten = torch.ops.aten
_WITHOUT_VALUES = frozenset({aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default})
_WITHOUT_VALUES |= {aten.new_empty.default, aten.new_empty_strided.default}
_values = WeakIdKeyDictionary()
_lost: dict[int, weakref.ref[torch.UntypedStorage]] = {}
"""Storages of values that are no longer those of the fake tensors."""


_MODES = ("lightning_memsave.measuring.", "lightning_memsave.simulation.")


class FactsMode(DispatchMode):
    """Follows facts while it is entered; above the fake mode, below whoever counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (answer := _ANSWERS.get(func)) is not None:
            return answer(func, args, kwargs)
        if func is aten.detach.default and not is_fake(args[0]):  # what is read in C++ stays real
            with unset_fake_temporarily():
                return func(*args)
        out = sized_by_values(func, args, kwargs, _values_of)
        if out is None:
            out = func(*args, **kwargs)
        if (correct := CORRECTIONS.get(func)) is not None:
            return correct(func, args, kwargs, out)
        if _follow(func, args, kwargs, out):
            return out
        rule = _RULES.get(func.overloadpacket)
        if func._schema.is_mutable and not isinstance(out, Tensor):  # of lists, for example
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and is_fake(leaf):
                    note(leaf, UNKNOWN)
        if isinstance(out, Tensor) and is_fake(out) and (rule is not None or func._schema.is_mutable):
            facts = UNKNOWN if rule is None else rule(args, kwargs)
            _note(func, out, facts)
        return out


def _note(func: Any, out: Tensor, facts: Facts) -> None:
    """Note facts of an output; an edit of a part leaves the rest of its storage as it was."""
    is_part = func._schema.is_mutable and out.nbytes < out.untyped_storage().nbytes()
    note(out, _union(facts, facts_of(out)) if is_part else facts)


def _uncached(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation uncached: the cache of the fake mode would keep the storage among the arguments alive."""
    mode = getattr(args[0], "fake_mode", None)
    if mode is None:
        return func(*args, **kwargs)
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        return func(*args, **kwargs)
    finally:
        mode.cache_enabled = before


def note_values(fake: Tensor, real: Tensor) -> None:
    """Note the range of real integers of which `fake` is the shape."""
    if is_fake(real):
        note(fake, facts_of(real))
        if (values := _values_of(real)) is not None:
            with unset_fake_temporarily():
                _values[fake] = values.clone()
        return
    if real.device.type == "meta" or real.dtype.is_floating_point or real.dtype.is_complex:
        return
    with unset_fake_temporarily():
        if real.numel() and real.layout is torch.strided:
            if real.numel() <= _MOST_VALUES:
                _values[fake] = real.detach().cpu().clone()
            values = real.to(torch.uint8) if real.dtype == torch.bool else real
            low, high = (int(value) for value in torch.aminmax(values))
            note(fake, Facts(low, high, 1 if low == high else None))


def _follow(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Compute the values of `out` where those of all that it is made of are known; whether they are."""
    first = args[0] if args else None
    if isinstance(first, Tensor) and is_fake(first) and first not in _values and not func._schema.is_mutable:
        return False  # nearly all end here
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if func._schema.is_mutable and not any(map(is_fake, inputs)):  # done already: not twice
        return False
    is_known = (
        all(_values_of(leaf) is not None for leaf in inputs) and torch.Tag.nondeterministic_seeded not in func.tags
    )
    if not is_known or not all(is_fake(leaf) and leaf.numel() <= _MOST_VALUES for leaf in outputs):
        if func._schema.is_mutable:
            for leaf in inputs:
                _forget(leaf)
        return False
    if func in _WITHOUT_VALUES:
        return False
    with unset_fake_temporarily(), torch.no_grad():
        real = func(*tree_map(_known, args), **tree_map(_known, kwargs))
        for fake, values in zip(outputs, (v for v in tree_leaves(real) if isinstance(v, Tensor)), strict=True):
            _values[fake] = values
            if not func.is_view:
                _note(func, fake, _facts_in(values))
    return True


def _known(leaf: Any) -> Any:
    return _values_of(leaf) if isinstance(leaf, Tensor) else leaf


def _values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor, as far as they have been followed."""
    if not is_fake(tensor):
        return tensor if tensor.numel() <= _MOST_VALUES and tensor.device.type == "cpu" else None
    values: Tensor | None = _values.get(tensor)
    is_lost = values is None or values.shape != tensor.shape or values.untyped_storage()._cdata in _lost
    return None if is_lost else values


def forget_values(tensor: Tensor) -> None:
    """Forget the values of a fake tensor, and the weak reference by which they are kept."""
    _values.pop(tensor, None)


def _forget(tensor: Tensor) -> None:
    """Forget the values of a tensor that was changed in an unknown way, and of all that share its memory."""
    values = _values.get(tensor) if is_fake(tensor) else None
    if values is not None:
        storage = values.untyped_storage()
        address = storage._cdata
        _lost[address] = weakref.ref(storage, lambda _: _lost.pop(address, None))


def _facts_in(values: Tensor) -> Facts:
    if not values.numel() or values.dtype.is_complex:
        return UNKNOWN
    if values.dtype.is_floating_point:
        return Facts(num_values=values.unique().numel())
    low, high = (int(end) for end in values.aminmax()) if values.dtype != torch.bool else (0, 1)
    if values.dtype == torch.bool:
        low, high = int(values.all()), int(values.any())
    return Facts(low, high, 1 if low == high else None)


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    tensor: Tensor = args[0]
    if (values := _values_of(tensor)) is not None:
        with unset_fake_temporarily():
            return values.item()
    facts = facts_of(tensor)
    if facts.low is not None and facts.low == facts.high:
        kind = bool if tensor.dtype == torch.bool else float if tensor.dtype.is_floating_point else int
        return kind(facts.low)
    try:
        return func(tensor)
    except DataDependentOutputException:
        if not _is_library(sys._getframe(2)):
            raise ReadsValueError(f"read at {line_text(user_line(2))}") from None
    return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _is_library(frame: FrameType | None) -> bool:
    """Return whether the innermost code outside of torch belongs to a library that only logs what it reads."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        library = module.partition(".")[0]
        if library != "torch" and not module.startswith(_MODES):  # modes lie between torch and whoever reads
            return library in _LOGGING_LIBRARIES
        frame = frame.f_back
    return False


def _equals(func: Any, args: Any, kwargs: Any) -> bool:
    first, second = args
    one, other = _values_of(first), _values_of(second)
    if one is not None and other is not None:
        with unset_fake_temporarily():
            return bool(func(one, other))
    if _is_library(sys._getframe(2)):
        return False
    raise ReadsValueError(f"read at {line_text(user_line(2))}")


_ANSWERS: Mapping[Any, Callable[[Any, Any, Any], Any]] = {
    ASKS_DEVICE: lambda func, args, kwargs: device_of(args[0]),
    aten._local_scalar_dense.default: _read,
    aten.equal.default: _equals,
    aten.set_.source_Storage_storage_offset: _uncached,
}


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
    """Return the facts of a product with, or a quotient by, a number: as many values, others."""
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
    """Return facts of an operand: a number, or a tensor."""
    if isinstance(value, Tensor):
        return facts_of(value) if is_fake(value) else UNKNOWN
    return _constant(value)


def _either(*values: Any) -> Facts:
    """Return facts of what is made of the values of several operands."""
    return functools.reduce(_union, map(_of, values)) if values else UNKNOWN


def _union(first: Facts, second: Facts) -> Facts:
    return Facts(
        None if first.low is None or second.low is None else min(first.low, second.low),
        None if first.high is None or second.high is None else max(first.high, second.high),
        None if first.num_values is None or second.num_values is None else first.num_values + second.num_values,
    )


def _padded(args: Any, kwargs: Any) -> Facts:
    value = args[2] if len(args) > 2 else 0
    return _either(args[0], value if args[0].dtype.is_floating_point else int(value))  # it comes as a float


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
    """Return the facts of `all` and `any`: told where all elements agree."""
    facts = facts_of(args[0])
    if facts.low is not None and facts.high is not None and args[0].numel():
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
    aten.constant_pad_nd: _padded,
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
"""Rules by operation. An in-place operation that has none makes what was known void."""
