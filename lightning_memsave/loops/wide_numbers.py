"""Evaluation of a step in float32 whose weights have 16 bits: rounding then hides nothing of how its loss is made.

Every function of torch gets its 16-bit tensors as float32, one weight at a time, and conversions to 16 bits are left
out. What a step edits in place keeps its dtype. A step that insists on 16 bits (kernels that take nothing else) ends
with an error, and is evaluated as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_CONVERSIONS = frozenset(("to", "type", "type_as", "bfloat16", "half"))
_LOOKUPS = frozenset(
    ("embedding", "index_select", "gather", "__getitem__", "__get__", "__set__", "__repr__", "__len__", "__hash__")
)
_OF_SHAPES = frozenset(
    ("view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "flatten", "unflatten", "chunk")
) | frozenset(("split", "unbind", "narrow", "select", "contiguous", "detach", "size", "dim", "numel", "stride"))
_OF_SHAPES |= frozenset(("swapaxes", "swapdims", "movedim", "diagonal", "as_strided", "unfold", "expand_as", "view_as"))
_EDITS = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))
_AS_IT_IS = _LOOKUPS | _OF_SHAPES
"""Functions that compute nothing with values: whatever does gets their results as float32."""


class WideNumbers(TorchFunctionMode):
    """Computes in float32 where a step has 16-bit numbers."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on float32 numbers."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _CONVERSIONS:
            return _converted(args[0], func(*args, **kwargs))
        edits = name in _EDITS or (name.endswith("_") and not name.endswith("__"))
        if (
            edits and isinstance(args[0], Tensor) and args[0].dtype == torch.float32
        ):  # made by a function that was widened
            return func(args[0], *tree_map_only(Tensor, wide, args[1:]), **tree_map_only(Tensor, wide, kwargs))
        if name in _AS_IT_IS or edits or name == "__setitem__" or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return func(*tree_map_only(Tensor, wide, args), **tree_map_only(Tensor, wide, kwargs))


def _converted(tensor: Any, converted: Any) -> Any:
    """Return what a conversion to 16 bits was given, where it is wider."""
    is_short = isinstance(converted, Tensor) and has_16_bits(converted)
    if is_short and isinstance(tensor, Tensor) and tensor.is_floating_point() and not has_16_bits(tensor):
        return tensor.to(converted.device, copy=True)  # another tensor, as the conversion would have given
    return converted


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor as float32 where it has 16 bits."""
    return tensor.float() if has_16_bits(tensor) else tensor


def has_16_bits(tensor: Tensor) -> bool:
    """Return whether a tensor has floats of 16 bits."""
    return tensor.is_floating_point() and tensor.dtype.itemsize == 2
