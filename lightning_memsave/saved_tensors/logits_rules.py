"""Functions of logits that nobody has computed, done to the rows of the Linear's input instead.

A rule takes the logits, as `Rows`, and a function's arguments, and returns what the rows are of which the results are
the logits. Views and copies are done to the rows, which have features where the logits have classes. Casts, and
functions of each logit alone (`logits / 30`, `tanh`, `logits + bias` with a constant bias), are noted in the `Form`,
and are done to the logits of a few classes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memsave.saved_tensors.logits_form import Form, Map
from lightning_memsave.torch_internals.fake_tensors import is_plain

FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


class Rows(NamedTuple):
    """Logits that nobody has computed."""

    rows: Tensor
    """The Linear's input, with the same views; its features are where the logits' classes are."""
    form: Form
    num_classes: int

    def with_rows(self, rows: Tensor, class_dim: int) -> Rows:
        """Return the logits of other rows."""
        return Rows(rows, self.form._replace(class_dim=class_dim), self.num_classes)

    def with_form(self, form: Form) -> Rows:
        """Return other logits of these rows."""
        return Rows(self.rows, form, self.num_classes)

    @property
    def has_classes_last(self) -> bool:
        """Whether the classes are the last dimension."""
        return self.form.class_dim == self.rows.dim() - 1


_Found = Rows | None
"""The result, which are the logits themselves where it is the same object; `None`: this is not to be deferred."""


def follow_rule(func: Any, logits: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Found:
    """Return what `func(logits, *args, **kwargs)` is; `logits` where it is what it was given.

    `None` where the logits must be computed.
    """
    rule = _RULES.get(func)
    return None if rule is None else rule(logits, func, args, kwargs)


def has_rule(func: Any) -> bool:
    """Return whether a function may be done to rows."""
    return func in _RULES


def _reshaped(z: Rows, func: Any, args: Any, kwargs: Any) -> _Found:
    """Defer a view in which the classes stay the last dimension."""
    rows, width = z.rows, z.rows.shape[-1]
    if not z.has_classes_last or any(isinstance(each, torch.dtype) for each in args):
        return None
    if func in _OF_SIZES:
        sizes = list(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        if kwargs or not all(isinstance(size, int) for size in sizes) or sizes[-1:] not in ([z.num_classes], [-1]):
            return None
        args = (*sizes[:-1], width if sizes[-1] == z.num_classes else -1)
    try:
        rows = func(rows, *args, **kwargs)
    except (RuntimeError, IndexError):  # torch's to tell, of the logits
        return None
    if rows.dim() == 0 or rows.shape[-1] != width:
        return None
    return z.with_rows(rows, rows.dim() - 1)


def _indexed(z: Rows, func: Any, args: Any, kwargs: Any) -> _Found:
    """Defer slices of positions, and rows that a mask chooses."""
    (index,) = args
    if not z.has_classes_last:
        return None
    if isinstance(index, Tensor):
        is_mask = index.dtype == torch.bool and index.shape == z.rows.shape[:-1]
        return z.with_rows(z.rows[index], 1) if is_mask and is_plain(index) else None
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or isinstance(item, (slice, int)) for item in items):
        return None
    if any(isinstance(item, bool) for item in items):
        return None
    if Ellipsis in items and items[-1] is not Ellipsis:
        reaches_classes = True
    else:
        reaches_classes = len(items) - items.count(Ellipsis) == z.rows.dim()
    if reaches_classes and items[-1] != slice(None):
        return None
    try:
        rows = z.rows[index]
    except (IndexError, ValueError):
        return None
    return z.with_rows(rows, rows.dim() - 1)


def _transposed(z: Rows, func: Any, args: Any, kwargs: Any) -> _Found:
    """Defer another order of dimensions."""
    try:
        rows = func(z.rows, *args, **kwargs)
        places = func(torch.empty(tuple(range(2, 2 + rows.dim())), device="meta"), *args, **kwargs).shape
    except (RuntimeError, IndexError):
        return None
    return z.with_rows(rows, places.index(2 + z.form.class_dim))


def _cast(z: Rows, func: Any, args: Any, kwargs: Any) -> _Found:
    """Defer a cast to a dtype that holds every value."""
    if func in _CASTS:
        dtype = _CASTS[func]
    elif len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
        dtype = args[0]
    else:
        return None
    now = z.form.dtype
    if kwargs or dtype not in FLOATS or torch.promote_types(now, dtype) != dtype or z.form.is_log:
        return None
    return z if dtype == now else z.with_form(z.form.then(Map(Tensor.to, (dtype,)), dtype))


def _copied(z: Rows, func: Any, args: Any, kwargs: Any) -> _Found:
    """Defer a copy."""
    if args or kwargs:
        return None
    if func is Tensor.contiguous and z.rows.is_contiguous():
        return z
    return z.with_rows(z.rows.contiguous(), z.form.class_dim)


def _normalised(z: Rows, func: Any, args: Any, kwargs: Any) -> _Found:
    """Defer log-probabilities."""
    dim = args[0] if args else kwargs.get("dim")
    is_known = len(args) < 2 and kwargs.keys() <= {"dim", "dtype", "_stacklevel"} and isinstance(dim, int)
    if not is_known or dim % z.rows.dim() != z.form.class_dim or z.form.is_log:
        return None
    one = z.rows.new_empty(1, 1, dtype=z.form.dtype)
    dtype = torch.log_softmax(one, 1, dtype=kwargs.get("dtype")).dtype  # which autocast may decide
    if dtype not in FLOATS or torch.promote_types(z.form.dtype, dtype) != dtype:
        return None
    return z.with_form(z.form.then(Map(Tensor.to, (dtype,)), dtype)._replace(is_log=True))


def _mapped(z: Rows, func: Any, args: Any, kwargs: Any) -> _Found:
    """Defer a function of each logit, with a number or a constant of each class."""
    if kwargs or z.form.is_log or len(args) != (func not in _OF_ONE):
        return None
    given = tuple(_constant(z, each) for each in args)
    if any(each is None for each in given):
        return None
    dtype = z.form.dtype
    for each in given:
        dtype = torch.result_type(z.rows.new_empty(1, 1, dtype=dtype), each)
    return None if dtype not in FLOATS else z.with_form(z.form.then(Map(func, given), dtype))


def _constant(z: Rows, value: Any) -> Any:
    """Return a number, or a copy of a constant, [], [1] or [C]; `None` for anything else."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, Tensor) or value.requires_grad or not (is_plain(value) or is_plain(value, nn.Parameter)):
        return None
    of_each_class = z.has_classes_last and value.numel() == z.num_classes and value.shape[-1] == z.num_classes
    if value.dim() > z.rows.dim() or not (value.numel() == 1 or of_each_class):
        return None
    return value.detach().flatten().clone() if value.dim() else value.detach().clone()


_OF_SIZES = (Tensor.view, Tensor.reshape, torch.reshape)
_CASTS = {Tensor.float: torch.float32, Tensor.double: torch.float64}
_OF_ONE = (torch.tanh, Tensor.tanh, torch.neg, Tensor.neg, Tensor.__neg__)
_RULES: dict[Any, Callable[[Rows, Any, Any, Any], _Found]] = {
    **dict.fromkeys((*_OF_SIZES, Tensor.flatten, torch.flatten, Tensor.squeeze, Tensor.unsqueeze), _reshaped),
    Tensor.__getitem__: _indexed,
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.permute, torch.permute), _transposed),
    **dict.fromkeys((Tensor.swapaxes, torch.swapaxes, Tensor.movedim, torch.movedim), _transposed),
    **dict.fromkeys((*_CASTS, Tensor.to, Tensor.type), _cast),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone), _copied),
    **dict.fromkeys((F.log_softmax, Tensor.log_softmax, torch.log_softmax), _normalised),
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__), _mapped),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide, *_OF_ONE), _mapped),
    **dict.fromkeys((Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__), _mapped),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _mapped),
    **dict.fromkeys((torch.sub, torch.subtract, Tensor.sub, Tensor.subtract), _mapped),
    **dict.fromkeys((Tensor.__sub__, Tensor.__rsub__), _mapped),
}
