"""Terms that a loss is the sum of, and how many labels its mean is over: noted while a step computes it.

A small term can relate samples and be lost in the rounding of the whole loss, while most of a weight's gradient comes
from it: the load of a mixture's experts is balanced by a thousandth of the loss, and by half of a router's gradient. So
each term is held against its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
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
_OVER = frozenset(("div", "div_", "true_divide", "__truediv__", "__itruediv__", "__div__"))
_ARITHMETIC = _PLUS | _MINUS | _FROM | _TIMES | _OVER
_SAME = frozenset(
    ("to", "float", "double", "clone", "contiguous", "squeeze", "type_as", "mean", "sum", "view", "reshape")
)


class LossTerms(TorchFunctionMode):
    """Follows a loss through the sums that it is made of. Loss functions get 16-bit numbers as float32.

    So rounding hides less.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ignored: set[int] = set()
        """Labels that loss functions were told to ignore."""
        self.begin()

    def begin(self) -> None:
        """Forget the terms and labels of the evaluation before."""
        self._terms: dict[int, tuple[Tensor, list[float]]] = {}  # with the tensor, so that its id is not given away
        self._counts: list[int | None] = []

    @property
    def num_labels(self) -> int | None:
        """Number of labels of which the step has taken a mean; `None` where that was not once, or not a plain one."""
        return self._counts[0] if len(self._counts) == 1 else None

    def of(self, loss: Tensor) -> tuple[float, ...]:
        """Return the terms of a loss, which is one number."""
        return tuple(self._of(loss) or ())

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note what its result is the sum of."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if is_inside_transform():
            return func(*args, **kwargs)
        if getattr(func, "__module__", "") == "torch.nn.functional" and ("loss" in name or "cross_entropy" in name):
            args, kwargs = tuple(map(_wide, args)), {key: _wide(value) for key, value in kwargs.items()}
            if name in _IGNORING:
                self._note_labels(args, kwargs)
        terms = None if kwargs else self._combined(name, args)  # before it may edit one
        result = func(*args, **kwargs)
        if terms is not None and isinstance(result, Tensor) and result.dim() == 0:
            self._terms[id(result)] = result, terms
        return result

    def _note_labels(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Note labels of (input, target, weight, size_average, ignore_index, reduce, reduction)."""
        ignored = kwargs.get("ignore_index", args[4] if len(args) > 4 else None)
        if isinstance(ignored, int):  # one that nobody gave is -100, which is known
            self.ignored.add(ignored)
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        reduction = kwargs.get("reduction", args[_REDUCTION] if len(args) > _REDUCTION else "mean")
        if isinstance(target, Tensor) and not target.is_floating_point() and weight is None and reduction == "mean":
            self._counts.append(int(target.ne(-100 if ignored is None else ignored).sum()))
        else:
            self._counts.append(None)

    def _of(self, value: Any) -> list[float] | None:
        """Return the terms of a number; `None` for all else."""
        if isinstance(value, (int, float)):
            return [float(value)]
        if not isinstance(value, Tensor) or value.dim() or value.is_complex():
            return None
        known = self._terms.get(id(value))
        return known[1] if known is not None and known[0] is value else [float(value.detach())]

    def _combined(self, name: str, args: Sequence[Any]) -> list[float] | None:
        """Return the terms of a sum, a difference, a multiple or the same of what has terms; `None` for all else."""
        if name in _SAME:
            return self._of(args[0]) if args and isinstance(args[0], Tensor) else None
        if name not in _ARITHMETIC or len(args) != 2:
            return None
        first, second = map(self._of, args)
        if first is None or second is None:
            return None
        if name in _PLUS:
            return first + second
        if name in _MINUS:
            return first + [-term for term in second]
        if name in _FROM:
            return second + [-term for term in first]
        if name in _TIMES:
            factor, terms = (args[0], second) if not isinstance(args[0], Tensor) else (args[1], first)
            return None if isinstance(factor, Tensor) else [factor * term for term in terms]
        return None if isinstance(args[1], Tensor) or not args[1] else [term / args[1] for term in first]


def _wide(value: object) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2:
        return value.float()
    return value
