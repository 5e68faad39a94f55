"""Mixed precision as CUDA computes it, for a step that is predicted on tensors of the CPU.

Under autocast CUDA computes more functions in float32 than the CPU does, among them powers, layer norms and softmax:
what these keep for backward is twice as large.

Source: torch's lists, https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HALVES = (torch.bfloat16, torch.float16)
_IN_FLOAT32 = (
    *("__pow__", "__rpow__", "pow", "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
    *("reciprocal", "rsqrt", "sinh", "tan", "softplus", "layer_norm", "native_layer_norm", "group_norm", "norm"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "hinge_embedding_loss", "kl_div"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist"),
    *("pdist", "cdist", "renorm", "logsumexp", "cross_entropy"),
)
_TO_FLOAT32 = ("softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum")
"""Functions whose result is float32, unless a dtype is given."""


def _functions(names: Sequence[str]) -> frozenset[Any]:
    found = (getattr(owner, name, None) for owner in (torch, Tensor, F, torch.linalg, torch.special) for name in names)
    return frozenset(each for each in found if each is not None)


class CudaAutocast(TorchFunctionMode):
    """While entered, autocast on the CPU computes in float32 what autocast on CUDA does.

    Example:
        >>> x = torch.ones(2, dtype=torch.bfloat16)
        >>> with torch.autocast("cpu", torch.bfloat16), CudaAutocast():
        ...     (x**3).dtype, torch.relu(x).dtype
        (torch.float32, torch.bfloat16)
    """

    holds_in_backward = True  # for regions that are run again
    _inputs, _results = _functions(_IN_FLOAT32), _functions(_TO_FLOAT32)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        if func in self._inputs:
            return func(*map(_long, args), **{name: _long(value) for name, value in kwargs.items()})
        if func in self._results and not any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
            is_half = any(each.dtype in _HALVES for each in _tensors(args, kwargs))
            return func(*args, **{**kwargs, "dtype": torch.float32} if is_half else kwargs)
        return func(*args, **kwargs)


def _long(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    return (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
