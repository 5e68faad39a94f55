"""A parameter whose memory holds int8 codes, and that every function of torch sees as bfloat16.

The parameter stays the object that it was, in its place in the module. Its memory holds codes and scales
(`numerics.row_codes`), under a floating dtype of one byte, because torch gives no gradients to integers. Its gradient
is bfloat16. Where a function gets it, its weights are decoded first: through an autograd node, so that the gradient
finds the parameter. Weights that the function keeps for backward are decoded again there (`rebuilt_weights`). A
function that edits it edits decoded float32 weights, which are then rounded to the nearest codes. `detach()` and `data`
are tensors of the same kind that share its memory.

What torch computes without asking a tensor's class, in its own engine, sees the codes; so does an operator that is
called by its overload (`torch.ops.aten.mm.default`), as dispatch modes do. With `raw` this package does so.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memsave.numerics.kernels import decode_rows, encode_rows
from lightning_memsave.saved_tensors.rebuilt_weights import Made, rebuilding_weights
from lightning_memsave.torch_internals.autograd_graph import DECODE
from lightning_memsave.torch_internals.compact_layers import CompactLayer
from lightning_memsave.torch_internals.compiled_regions import compiled_regions
from lightning_memsave.torch_internals.fake_tensors import is_fake, is_plain
from lightning_memsave.torch_internals.layer_selection import is_conv1d_of_transformers

CODES = torch.float8_e4m3fnuz
"""What codes pass for: a floating dtype in which all of them are numbers, so that equal ones compare as equal."""
_KINDS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)
raw = torch._C.DisableTorchFunctionSubclass
"""A context in which torch computes with the memory itself."""


def _of_memory() -> frozenset[Any]:
    """Return functions that ask about a tensor's memory, or its place in the graph, and not its values."""
    getters = (
        "device grad grad_dtype grad_fn is_cpu is_cuda is_leaf is_meta is_sparse is_quantized is_nested itemsize "
        "layout names nbytes ndim output_nr requires_grad retains_grad shape _backward_hooks _base _grad _grad_fn "
        "_version _post_accumulate_grad_hooks"
    )
    methods = (
        "__len__ data_ptr dim element_size is_contiguous is_floating_point is_complex is_inference is_pinned is_shared "
        "nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size "
        "storage_offset stride untyped_storage"
    )
    descriptors = [getattr(Tensor, name) for name in getters.split() if hasattr(Tensor, name)]
    accessors = (getattr(each, way, None) for each in descriptors for way in ("__get__", "__set__", "__delete__"))
    found = {*accessors, *(getattr(Tensor, name) for name in methods.split())}
    functions = torch.autograd.grad, torch.autograd.backward, torch.is_floating_point, torch.is_complex, torch.numel
    return frozenset({*found, *functions} - {None})


_OF_MEMORY = _of_memory()
_DTYPE, _DATA = cast("Any", Tensor.dtype).__get__, cast("Any", Tensor.data).__get__
_SET_DATA = cast("Any", Tensor.data).__set__


class Int8:
    """What a tensor of codes becomes, together with its own class."""

    scales: Tensor
    """[N], bfloat16: a power of two for each row; in the same storage, before the codes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch on decoded weights."""
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) or func in _OF_MEMORY:  # a dispatch mode passes on what it was given
            with raw():
                return func(*args, **kwargs)
        if func == _DTYPE:
            return torch.bfloat16
        if func in (_DATA, Tensor.detach, torch.detach):
            return _alias(args[0])
        if func == _SET_DATA:
            return _set_data(*args)
        edited = _edited(func, args, kwargs)
        if any(isinstance(each, Int8) for each in tree_leaves(edited)):
            return _edit(func, edited, args, kwargs)
        if func in (F.embedding, F.embedding_bag):
            args, kwargs = _renormalised(func, args, kwargs)
        return _look_up(*args, **kwargs) if func is F.embedding else _on_decoded(func, args, kwargs)

    def decoded(self: Any) -> Tensor:
        """Return the weights in bfloat16; exact."""
        return decode_rows(codes_of(self), self.scales, torch.bfloat16)

    def whole(self, rows: slice = slice(None)) -> Tensor:
        """Return the weights, or some rows of them, in float32; exact."""
        return decode_rows(codes_of(self)[rows], self.scales[rows], torch.float32)

    def write(self, whole: Tensor, seed: int | None, rows: slice = slice(None)) -> None:
        """Round float32 weights into codes; see `encode_rows`."""
        codes, scales = encode_rows(whole, seed)
        codes_of(self)[rows].copy_(codes)
        self.scales[rows].copy_(scales)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy codes and scales, as deep copies of a model do."""
        if id(self) not in memo:
            memo[id(self)] = _rebuilt(*self._parts())
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle codes and scales."""
        return _rebuilt, self._parts()

    def _parts(self) -> tuple[Tensor, Tensor, bool, bool]:
        tensor: Any = self
        return codes_of(self).clone(), self.scales.clone(), isinstance(self, nn.Parameter), tensor.requires_grad


def _class_of(plain: Any) -> Any:
    """Return the class of tensors of codes for a class of torch's: plain, a parameter, or a fake one."""
    if plain not in _CLASSES:
        _CLASSES[plain] = type(f"Int8{plain.__name__}", (Int8, plain), {"__module__": __name__})
    return _CLASSES[plain]


_CLASSES: dict[Any, Any] = {}


def codes_of(tensor: Any) -> Tensor:
    """Return the codes, an int8 tensor that shares the memory."""
    with raw():
        return cast("Tensor", tensor.detach().view(torch.int8))


def _in_one_storage(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, as views of one new storage; codes in their memory format."""
    size = scales.numel() * scales.element_size()
    memory = torch.empty(size + codes.numel(), dtype=torch.int8, device=codes.device)
    places = memory.as_strided(codes.shape, torch.empty_like(codes).stride(), size), memory[:size].view(scales.dtype)
    return places[0].copy_(codes), places[1].copy_(scales)


@torch.no_grad()
def become_int8(parameter: Tensor) -> None:
    """Keep int8 codes of float32 weights, rounded to the nearest; the parameter stays the same object."""
    found = encode_rows(parameter.detach().float(), None)
    codes = torch.empty_like(parameter, dtype=torch.int8).copy_(found[0])  # in its memory format
    _take(parameter, codes, found[1], type(parameter))


def _take(tensor: Any, codes: Tensor, scales: Tensor, plain: type[Tensor]) -> None:
    codes, scales = _in_one_storage(codes, scales)
    tensor.data = codes.view(CODES)
    tensor.__class__ = _class_of(plain)
    tensor.scales = scales
    if tensor.is_leaf:
        tensor.grad_dtype = torch.bfloat16


@torch.no_grad()
def become_whole(parameter: Any) -> None:
    """Undo `become_int8`: the same parameter, with float32 weights."""
    whole = parameter.whole()
    with raw():
        parameter.data = whole
    parameter.__class__ = type(parameter).__mro__[2]  # the class it had
    del parameter.scales
    parameter.grad_dtype = torch.float32


def _rebuilt(codes: Tensor, scales: Tensor, is_parameter: bool, requires_grad: bool) -> Any:
    empty = torch.empty(0, device=codes.device)
    tensor: Any = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    _take(tensor, codes, scales, type(tensor))
    return tensor.requires_grad_(requires_grad)


def _alias(tensor: Any) -> Any:
    with raw():
        alias = tensor.detach()
        alias.grad_dtype = torch.bfloat16
    alias.__class__ = _class_of(type(alias))
    alias.scales = tensor.scales
    return alias


@torch.no_grad()
def _set_data(tensor: Any, value: Any) -> None:
    """Take over other weights: of an edit, a load, or a move to another device or dtype."""
    if not isinstance(value, Int8):
        made = _rebuilt(*encode_rows(value.detach().float(), None), False, False)
        codes = torch.empty_like(value, dtype=torch.int8).copy_(codes_of(made))
        value = _rebuilt(codes, made.scales, False, False)
    with raw():
        tensor.data = value
    tensor.scales = value.scales


# ------------------------------------------------------------------------------- functions that get one
class _DecodeInt8(torch.autograd.Function):
    """The weights of a parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.rebuild = Int8.decoded
        return Int8.decoded(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


assert f"{_DecodeInt8.__name__}Backward" == DECODE


def _read(tensor: Any) -> Tensor:
    """Return the weights, which a caller is not to edit: what comes of that would be lost."""
    if not torch.is_grad_enabled() and not is_fake(tensor):
        with torch.inference_mode():  # torch refuses to edit it, or a view of it
            return Int8.decoded(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            'With `precision="int8-sr"` a function has passed on a weight as its own result. Torch would give the '
            "gradient of that the dtype of codes. Keep the module in float32: `LowPrecision(keep_32bit=...)`."
        )
    with raw():
        return _DecodeInt8.apply(tensor) if tensor.requires_grad else Int8.decoded(tensor)  # type: ignore[no-untyped-call]


def _on_decoded(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with weights in place of parameters, of which it keeps nothing for backward."""
    made: dict[int, Made] = {}

    def decode(tensor: Any) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = Made(_read(tensor), tensor, Int8.decoded)
        return made[id(tensor)].weight

    args, kwargs = tree_map_only(Int8, decode, (args, kwargs))
    with rebuilding_weights(made.values()):
        return func(*args, **kwargs)


def _edited(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function edits: `out`, or its first argument where its name says so."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    edits = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")
    return next(iter((*args, *kwargs.values())), None) if edits else None


def _edit(func: Any, edited: Any, args: Any, kwargs: Any) -> Any:
    """Let a function edit decoded weights in float32, and keep what comes of it."""
    if not isinstance(edited, Int8):
        raise RuntimeError(
            f'`precision="int8-sr"` keeps weights as codes, and `{func.__name__}` would edit several tensors at once. '
            "Edit one at a time, or keep the modules in float32: `LowPrecision(keep_32bit=...)`."
        )
    tensor: Any = edited
    is_differentiated = torch.is_grad_enabled() and getattr(func, "__module__", None) != "torch.nn.init"
    if tensor.requires_grad and tensor.is_leaf and is_differentiated:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    with torch.no_grad():
        whole = edited.whole()
        args, kwargs = tree_map_only(Int8, lambda each: whole if each is edited else each.whole(), (args, kwargs))
        func(*args, **kwargs)
        edited.write(whole, None)
    return edited


@torch.no_grad()
def _renormalised(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Renormalise rows of the table itself, and return the arguments without `max_norm`."""
    call = inspect.signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    given: dict[str, Any] = call.arguments
    if given["max_norm"] is not None and isinstance(given["weight"], Int8):
        torch.embedding_renorm_(_alias(given["weight"]), given["input"], given["max_norm"], given["norm_type"])
        given["max_norm"] = None
    return call.args, call.kwargs


class _LookUp(torch.autograd.Function):
    """Rows of a table: these alone are decoded."""

    @staticmethod
    def forward(ctx: Any, table: Any, index: Tensor, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.settings = len(table), padding_idx, scale_grad_by_freq
        rows = index.reshape(-1)
        found = decode_rows(codes_of(table).index_select(0, rows), table.scales.index_select(0, rows), torch.bfloat16)
        return found.view(*index.shape, table.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradient, index, *ctx.settings), None, None, None


def _look_up(
    index: Tensor,
    table: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Compute as `F.embedding` does."""
    if not isinstance(table, Int8) or max_norm is not None or sparse:
        return _on_decoded(
            F.embedding, (index, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse), {}
        )
    size = len(cast("Tensor", table))
    padding = -1 if padding_idx is None else padding_idx % size
    with raw():
        return _LookUp.apply(table, index, padding, scale_grad_by_freq)  # type: ignore[no-untyped-call]  # untyped in torch


# ------------------------------------------------------------------------------- which
def bytes_of_codes(p: Tensor) -> int:
    """Return bytes of a weight of this shape as codes, with its scales."""
    return p.numel() + len(p) * torch.bfloat16.itemsize


def parameters_for_int8(model: nn.Module) -> set[Tensor]:
    """Return the parameters that can be kept as codes.

    These are the weights of Linear, convolutions, Embedding and transformers' Conv1D: plain ones, with memory, not of
    an embedding that edits its weight or asks for sparse gradients, tied at most to each other, and of no module that
    is compiled, as compiled code asks no tensor's class.
    """
    found, others = set[Tensor](), set[Tensor]()
    for _, region in compiled_regions(model):
        others.update(region.parameters())
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            suits = name == "weight" and _suits(module) and is_plain(p, nn.Parameter) and not p.is_meta and p.numel()
            (found if suits else others).add(p)
    return found - others


def _suits(module: nn.Module) -> bool:
    if getattr(module, "max_norm", None) or getattr(module, "sparse", False) or isinstance(module, CompactLayer):
        return False
    return isinstance(module, _KINDS) or is_conv1d_of_transformers(module)
