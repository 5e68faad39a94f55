"""Terms that a loss is the sum of, and how many labels its mean is over: noted while a step computes it.

A small term can relate samples and be lost in the rounding of the whole loss, while most of a weight's gradient comes
from it: the load of a mixture's experts is balanced by a thousandth of the loss, and by half of a router's gradient. So
terms are held against their own size. Those that one function has made are one: a loss that is computed in chunks has
as many terms of a kind as its batch has chunks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memsave.torch_internals.autograd_graph import is_inside_transform

_IGNORING = frozenset(("cross_entropy", "nll_loss"))
_REDUCTION = 6  # its place among their arguments
_PLUS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
_MINUS = frozenset(("sub", "sub_", "__sub__", "__isub__"))
_FROM = frozenset(("rsub", "__rsub__"))
_TIMES = frozenset(("mul", "mul_", "__mul__", "__rmul__", "__imul__"))
_OVER = frozenset(("div", "div_", "true_divide", "__truediv__", "__itruediv__"))
_NEGATIVE = frozenset(("neg", "negative", "__neg__"))
_OF_TWO = _PLUS | _MINUS | _FROM | _TIMES | _OVER
_SAME_NUMBER = frozenset(
    ("to", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "clone", "contiguous")  # another tensor
) | frozenset(("squeeze", "view", "reshape", "mean", "sum", "detach"))
"""Functions that return the number that they are given, where that is a tensor of no dimension."""
_MOST_TERMS = 64
_NEAR = 1e-4  # relative: terms that do not add up to the loss are not all of it


@dataclass(frozen=True)
class _Sum:
    """What a number is the sum of: the made tensors by their ids, each with its factor, and a constant."""

    factors: dict[int, float]
    constant: float = 0.0

    def times(self, factor: float) -> _Sum:
        return _Sum({made: factor * f for made, f in self.factors.items()}, factor * self.constant)

    def plus(self, other: _Sum) -> _Sum:
        factors = dict(self.factors)
        for made, factor in other.factors.items():
            factors[made] = factors.get(made, 0.0) + factor
        return _Sum(factors, self.constant + other.constant)


@dataclass(frozen=True)
class Term:
    """What one function has contributed to a loss."""

    function: str
    value: float
    scale: float
    """The largest factor that its results had in the loss."""


class LossTerms(TorchFunctionMode):
    """Follows a loss through the sums that it is made of.

    Loss functions get 16-bit numbers as float32, so that rounding hides less.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ignored: set[int] = set()
        """Labels that loss functions were told to ignore."""
        self.begin()

    def begin(self) -> None:
        """Forget what the evaluation before has computed."""
        self._sums: dict[int, tuple[Tensor, _Sum]] = {}  # with the tensor, so that its id is not given away
        self._made: dict[int, tuple[Tensor, str, float]] = {}  # function and value
        self._counts: dict[int, int | None] = {}  # of labels, by the id of the mean over them

    def of(self, loss: Tensor) -> tuple[Term, ...]:
        """Return the terms of a loss by function; one of all where they are not known."""
        value, total = float(loss.detach()), self._sum_of(loss)
        known = [(made, factor) for made, factor in total.factors.items() if made in self._made]
        found = total.constant + sum(factor * self._made[made][2] for made, factor in known)
        if len(known) < len(total.factors) or not abs(found - value) <= _NEAR * max(abs(value), 1e-30):
            return (Term("", value, 1.0),)
        terms: dict[str, Term] = {}
        for made, factor in known:
            _, name, number = self._made[made]
            before = terms.get(name, Term(name, 0.0, 0.0))
            terms[name] = Term(name, before.value + factor * number, max(before.scale, abs(factor)))
        return tuple(terms[name] for name in sorted(terms))

    def num_labels(self, loss: Tensor) -> int | None:
        """Return the number of labels of which the loss has a mean; `None` where that is not one, or no plain one."""
        counts = [count for made, count in self._counts.items() if made in self._sum_of(loss).factors]
        return counts[0] if len(counts) == 1 else None

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note what its result is the sum of."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if is_inside_transform():
            return func(*args, **kwargs)
        is_loss = getattr(func, "__module__", "") == "torch.nn.functional" and (
            "loss" in name or "cross_entropy" in name
        )
        if is_loss:
            args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
        num_labels = self._labels_of(args, kwargs) if is_loss and name in _IGNORING else None
        total = self._combined(name, args, kwargs)  # before it may edit one
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dim() == 0 and not result.is_complex():
            if total is None:
                self._made[id(result)] = result, name, float(result.detach())
                total = _Sum({id(result): 1.0})
                if name in _IGNORING and is_loss:
                    self._counts[id(result)] = num_labels
            self._sums[id(result)] = result, total
        return result

    def _labels_of(self, args: Any, kwargs: dict[str, Any]) -> int | None:
        """Return how many labels count of (input, target, weight, size_average, ignore_index, reduce, reduction)."""
        ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else None)
        if isinstance(ignored, int):  # one that nobody gave is -100, which is known
            self.ignored.add(ignored)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        reduction = kwargs.get("reduction", args[_REDUCTION] if len(args) > _REDUCTION else "mean")
        if isinstance(target, Tensor) and not target.is_floating_point() and weight is None and reduction == "mean":
            return int(target.ne(-100 if ignored is None else ignored).sum())
        return None

    def _sum_of(self, value: Any) -> _Sum:
        """Return what a number is the sum of."""
        if not isinstance(value, Tensor):
            return _Sum({}, float(value))
        known = self._sums.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        self._made[id(value)] = value, "", float(value.detach())
        return _Sum({id(value): 1.0})

    def _combined(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Sum | None:
        """Return the sum that a function makes of sums; `None` for all else."""
        if name in _SAME_NUMBER or name in _NEGATIVE:
            if not args or not isinstance(args[0], Tensor) or not _is_number(args[0]):
                return None
            return self._sum_of(args[0]).times(-1.0 if name in _NEGATIVE else 1.0)
        if name not in _OF_TWO or len(args) != 2 or not all(map(_is_number, args)) or not kwargs.keys() <= {"alpha"}:
            return None
        first, second = map(self._sum_of, args)
        if name in _PLUS | _MINUS | _FROM:
            alpha = float(kwargs.get("alpha", 1))
            total = second.plus(first.times(-alpha)) if name in _FROM else None
            total = total or first.plus(second.times(alpha if name in _PLUS else -alpha))
        else:
            total = self._scaled(first, second, *args, is_quotient=name in _OVER)
        return None if total is None or len(total.factors) > _MOST_TERMS else total

    def _scaled(self, first: _Sum, second: _Sum, left: Any, right: Any, *, is_quotient: bool) -> _Sum | None:
        """Return a multiple of a sum; `None` where both are made, and which is the factor cannot be told."""
        factor = float(right.detach()) if isinstance(right, Tensor) else float(right)
        if is_quotient:
            is_known = not isinstance(right, Tensor) or len(first.factors) > 1
            return first.times(1 / factor) if is_known and factor and math.isfinite(factor) else None
        if not isinstance(right, Tensor) or (len(first.factors) > 1 and len(second.factors) == 1):
            return first.times(factor)
        if not isinstance(left, Tensor) or (len(second.factors) > 1 and len(first.factors) == 1):
            return second.times(float(left.detach()) if isinstance(left, Tensor) else float(left))
        return None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wide(value: object) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2:
        return value.float()
    return value
