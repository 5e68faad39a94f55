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
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_memsave.loops.wide_numbers import wide
from lightning_memsave.torch_internals.autograd_graph import is_inside_transform

_IGNORING = frozenset(("cross_entropy", "nll_loss"))
_REDUCTION = 6  # its place among their arguments
_PLUS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
_MINUS = frozenset(("sub", "sub_", "__sub__", "__isub__"))
_FROM = frozenset(("rsub", "__rsub__"))
_TIMES = frozenset(("mul", "mul_", "__mul__", "__rmul__", "__imul__"))
_OVER = frozenset(("div", "div_", "true_divide", "__truediv__", "__itruediv__"))
_NEGATIVE = frozenset(("neg", "negative", "__neg__"))
_PRODUCTS = frozenset(("dot", "matmul", "__matmul__", "inner"))
_OF_TWO = _PLUS | _MINUS | _FROM | _TIMES | _OVER | _PRODUCTS
_SAME_NUMBERS = frozenset(
    ("to", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "clone", "contiguous")  # another tensor
) | frozenset(("squeeze", "unsqueeze", "view", "reshape", "flatten", "ravel", "detach"))
"""Functions that return the numbers that they are given."""
_SUMS, _JOINED = frozenset(("sum", "mean")), frozenset(("stack", "cat", "concat", "concatenate", "hstack"))
_MOST_TERMS = 64
S = TypeVar("S")
T = TypeVar("T")
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
    """Follows a loss through the sums that it is made of, and through lists of numbers that are summed up.

    Loss functions get 16-bit numbers as float32, so that rounding hides less.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ignored: set[int] = set()
        """Labels that loss functions were told to ignore."""
        self.begin()

    def begin(self) -> None:
        """Forget what the evaluation before has computed."""
        self._sums: dict[int, tuple[Tensor, list[_Sum]]] = {}  # with the tensor, so that its id is not given away
        self._made: dict[int, tuple[Tensor, str, float]] = {}  # function and value
        self._counts: dict[int, int | None] = {}  # of labels, by the id of the mean over them

    def of(self, loss: Tensor) -> tuple[Term, ...]:
        """Return the terms of a loss by function; one of all where they are not known."""
        value, (total,) = float(loss.detach()), self._sums_of(loss)
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
        factors = self._sums_of(loss)[0].factors
        counts = [count for made, count in self._counts.items() if made in factors]
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
            args, kwargs = tree_map_only(Tensor, wide, args), tree_map_only(Tensor, wide, kwargs)
        num_labels = self._labels_of(args, kwargs) if is_loss and name in _IGNORING else None
        sums = self._combined(name, args, kwargs)  # before it may edit one
        result = func(*args, **kwargs)
        if _is_followed(result):
            if sums is not None and len(sums) == result.numel():
                self._sums[id(result)] = result, sums
            elif result.numel() == 1:
                self._make(result, name)
                if name in _IGNORING and is_loss:
                    self._counts[id(result)] = num_labels
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

    def _make(self, value: Tensor, name: str) -> list[_Sum]:
        self._made[id(value)] = value, name, float(value.detach())
        self._sums[id(value)] = value, (sums := [_Sum({id(value): 1.0})])
        return sums

    def _sums_of(self, value: Any) -> list[_Sum]:
        """Return what numbers are the sums of; where they are several and not known, nothing."""
        if not isinstance(value, Tensor):
            return [_Sum({}, float(value))]
        known = self._sums.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        return self._make(value, "") if value.numel() == 1 else []

    def _combined(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[_Sum] | None:
        """Return the sums that a function makes of sums; `None` for all else."""
        if name in _JOINED:
            return self._joined(*args[:1])
        if name in _SAME_NUMBERS | _NEGATIVE | _SUMS:
            if not args or not _are_numbers(args[0]) or not isinstance(args[0], Tensor):
                return None
            sums = self._sums_of(args[0])
            if name in _SUMS:
                return _total(sums, 1 / max(1, len(sums)) if name == "mean" else 1.0)
            return [each.times(-1.0) for each in sums] if name in _NEGATIVE else sums
        if name not in _OF_TWO or len(args) != 2 or not all(map(_are_numbers, args)) or not kwargs.keys() <= {"alpha"}:
            return None
        if name in _PLUS | _MINUS | _FROM:
            return self._added(name, args[0], args[1], float(kwargs.get("alpha", 1)))
        scaled = self._scaled(*args, is_quotient=name in _OVER)
        return _total(scaled) if name in _PRODUCTS and scaled is not None else scaled

    def _joined(self, tensors: Any = None) -> list[_Sum] | None:
        """Return the numbers of several tensors one after another."""
        if not isinstance(tensors, (list, tuple)) or not all(map(_are_numbers, tensors)):
            return None
        if sum(tensor.numel() for tensor in tensors) > _MOST_TERMS:
            return None
        return [each for tensor in tensors for each in self._sums_of(tensor)]

    def _added(self, name: str, left: Any, right: Any, alpha: float) -> list[_Sum] | None:
        pairs = _paired(self._sums_of(left), self._sums_of(right))
        if name in _FROM:
            pairs = [(second, first) for first, second in pairs]
        factor = alpha if name in _PLUS else -alpha
        sums = [first.plus(second.times(factor)) for first, second in pairs]
        return sums if all(len(each.factors) <= _MOST_TERMS for each in sums) else None

    def _scaled(self, left: Any, right: Any, *, is_quotient: bool) -> list[_Sum] | None:
        """Return multiples of sums; `None` where both are made, and which is the factor cannot be told."""
        first, second = self._sums_of(left), self._sums_of(right)
        is_first_known = any(len(each.factors) > 1 for each in first) or len(first) > 1
        is_second_known = any(len(each.factors) > 1 for each in second) or len(second) > 1
        if is_quotient:
            is_known = not isinstance(right, Tensor) or is_first_known
            return _times(first, [1 / f if f else math.nan for f in _values(right)]) if is_known else None
        if not isinstance(right, Tensor) or (is_first_known and not is_second_known):
            return _times(first, _values(right))
        if not isinstance(left, Tensor) or (is_second_known and not is_first_known):
            return _times(second, _values(left))
        return None


def _total(sums: list[_Sum], factor: float = 1.0) -> list[_Sum] | None:
    """Return the sum of all, times a factor."""
    total = _Sum({})
    for each in sums:
        total = total.plus(each.times(factor))
    return [total] if sums and len(total.factors) <= _MOST_TERMS else None


def _times(sums: list[_Sum], factors: list[float]) -> list[_Sum] | None:
    if not all(map(math.isfinite, factors)):
        return None
    return [each.times(factor) for each, factor in _paired(sums, factors)] or None


def _paired(first: list[T], second: list[S]) -> list[tuple[T, S]]:
    """Return pairs of as many, or of one with each of the others."""
    if len(first) == len(second):
        return list(zip(first, second, strict=True))
    if 1 in (len(first), len(second)):
        return [(a, b) for a in first for b in second]
    return []


def _values(value: Any) -> list[float]:
    return value.detach().flatten().tolist() if isinstance(value, Tensor) else [float(value)]


def _is_followed(value: Any) -> bool:
    """Return whether it is a tensor of real values that can be read."""
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return is_strided and not value.is_meta and not value.is_complex()


def _are_numbers(value: Any) -> bool:
    """Return whether a value is a number, or a few of them in a row."""
    if isinstance(value, Tensor):
        return _is_followed(value) and 0 < value.numel() <= _MOST_TERMS and value.numel() == max((*value.shape, 1))
    return isinstance(value, (int, float)) and not isinstance(value, bool)
