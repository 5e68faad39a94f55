"""Layers whose weight is kept as int8 codes: their own class, with a weight that is made in bfloat16 each time.

The parameter stays the object that it was, under its name. Its memory holds the codes (`numerics.row_codes`), under a
floating dtype of one byte, because torch gives no gradients to integers. Its gradient is bfloat16. The scales are a
buffer that `state_dict` leaves out.

`weight` is a property, so any forward that reads it sees bfloat16 numbers. The layer's own forward keeps none of them
for backward: they are decoded again there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_memsave.numerics.row_codes import decode_rows, encode_rows
from lightning_memsave.saved_tensors.rebuilt_weights import rebuilding_weights
from lightning_memsave.torch_internals.autograd_graph import DECODE
from lightning_memsave.torch_internals.compact_layers import CompactLayer, compact_class
from lightning_memsave.torch_internals.fake_tensors import is_plain
from lightning_memsave.torch_internals.layer_selection import is_conv1d_of_transformers

CODES = torch.float8_e4m3fnuz
"""What codes pass for: a floating dtype in which all of them are numbers, so that equal ones compare as equal."""
_KINDS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)


class Int8Layer(CompactLayer):
    """What a layer becomes, together with its own class. Its weight, which is made anew, cannot be edited."""

    prefix, parameter_name = "Int8", "weight"
    steady_buffers = frozenset(("weight_scales",))
    weight_scales: Tensor

    @property
    def codes(self) -> nn.Parameter:
        """The parameter, [N, ...]: int8 codes that pass for floats."""
        p = self._parameters["weight"]
        assert p is not None
        return p

    @property
    def weight(self) -> Tensor:
        """The weight in bfloat16; its gradient goes to the parameter."""
        codes = self.codes
        if codes.is_leaf and codes.grad_dtype != torch.bfloat16:  # a copy of a module: copies do not take it along
            codes.grad_dtype = torch.bfloat16
        return _Decode.apply(codes, self.weight_scales)  # type: ignore[no-any-return,no-untyped-call]  # untyped in torch

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, of which no bfloat16 weight is kept."""
        with rebuilding_weights():
            return super().forward(*args, **kwargs)

    def whole(self, rows: slice = slice(None)) -> Tensor:
        """Return the weight, or some rows of it, in float32; exact."""
        return decode_rows(self.codes.detach().view(torch.int8)[rows], self.weight_scales[rows], torch.float32)

    def write(self, whole: Tensor, seed: int | None, rows: slice = slice(None)) -> None:
        """Round float32 weights into codes; see `encode_rows`."""
        codes, scales = encode_rows(whole, seed)
        self.codes.detach().view(torch.int8)[rows].copy_(codes)
        self.weight_scales[rows].copy_(scales)

    def become_dense(self) -> None:
        """Undo `become_int8`: the same parameter, with float32 weights."""
        parameter, whole = self.codes, self.whole()
        parameter.data = whole
        parameter.grad_dtype = torch.float32
        self.__class__ = self.dense_class  # type: ignore[assignment]  # the class it had
        del self.dense_shape, self.weight_scales

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Layer:
        """Move as any module does; codes have no other dtype."""

        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if tensor.dtype != CODES or found.dtype == CODES else tensor.to(found.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def _whole(self) -> Tensor:
        return self.codes.detach()

    def _dense_of(self, whole: Tensor) -> Tensor:
        return _decode(whole, self.weight_scales)

    def _taken_from(self, dense: Tensor) -> Tensor:
        """Return the codes of `dense`, which holds them exactly where it was written from some."""
        codes, scales = encode_rows(dense.detach().to(self.codes.device, torch.float32), None)
        self.weight_scales.copy_(scales)
        return codes.view(CODES)


class _Decode(torch.autograd.Function):
    """The weight of codes, which `rebuilt_weights` knows how to make again by this node's name."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.rebuild = functools.partial(_decode, scales=scales)
        return _decode(codes, scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


assert f"{_Decode.__name__}Backward" == DECODE


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    return decode_rows(codes.detach().view(torch.int8), scales, torch.bfloat16)


@torch.no_grad()
def become_int8(module: nn.Module) -> Int8Layer:
    """Keep int8 codes of a layer's float32 weight, rounded to the nearest; the parameter stays the same object."""
    parameter = module.get_parameter("weight")
    codes, scales = encode_rows(parameter.detach().float(), None)
    parameter.data = torch.empty_like(parameter, dtype=torch.int8).copy_(codes).view(CODES)  # its memory format
    parameter.grad_dtype = torch.bfloat16
    module.__class__ = compact_class(Int8Layer, type(module))
    layer = cast("Int8Layer", module)
    layer.register_buffer("weight_scales", scales, persistent=False)
    layer.dense_shape = parameter.shape
    return layer


def bytes_of_codes(p: Tensor) -> int:
    """Return bytes of a weight of this shape as codes, with its scales."""
    return p.numel() + len(p) * torch.bfloat16.itemsize


def layers_for_int8(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose weight can be kept as codes.

    These are Linear, convolutions, Embedding and transformers' Conv1D with a plain weight of their own: not tied, with
    memory, and no embedding that edits its weight or asks for sparse gradients.
    """
    owners: dict[Tensor, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[p] = owners.get(p, 0) + 1
    for module in model.modules():
        if isinstance(module, CompactLayer) or not (isinstance(module, _KINDS) or is_conv1d_of_transformers(module)):
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or not is_plain(weight, nn.Parameter) or weight.is_meta or owners[weight] > 1:
            continue
        if not getattr(module, "max_norm", None) and not getattr(module, "sparse", False):
            yield module
