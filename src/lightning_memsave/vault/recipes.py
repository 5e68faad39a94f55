"""Which tensors can be computed again from what is kept anyway, read off the graph at the moment they are kept.

A convolution keeps y = relu(batch_norm(x)); batch_norm keeps x. So y's bytes may go: when backward asks for it, it is
computed from x. `derive` walks from a tensor up its graph, over operations that cost little, until every path ends in
an entry of the vault or in a parameter. No module is touched and no call is rewritten; and because only entries count
that somebody else keeps, a recipe never costs memory.

Every operation here is computed again by the same kernel on the same numbers, so values are equal to the bit: also
normalisations, whose rounding (fused multiply-adds) no arithmetic outside of torch's kernels repeats.

Source: Chen et al., 2016 (https://arxiv.org/abs/1604.06174), section 4.2, proposes to recompute normalisation and
activation and keep convolutions. Here it is done per tensor instead of per segment, from the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memsave.vault.calls import Calls
from lightning_memsave.vault.entries import Handle, Passed
from lightning_memsave.vault.forms import Rank, Recipe
from lightning_memsave.vault.graph import (
    Edge,
    ForeignError,
    Kept,
    Node,
    Values,
    check_version,
    inputs_of,
    output_of,
    packed,
    saved,
    sequence_nr_of,
)

MAX_DEPTH = 6
"""How many operations a recomputation may chain: bounds its time, as recipes may build on recipes."""


@dataclass(frozen=True, slots=True)
class Source:
    """A way to a value: how to get it, how faithful it is, what it holds on to, how many operations it takes."""

    values: Values
    rank: Rank
    needs: tuple[object, ...] = ()
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """How to repeat an operation: a function of the values behind the inputs that it reads."""

    function: Callable[..., Tensor]
    inputs: Sequence[int] = (0,)
    is_linear: bool = False
    """In each input, given the others: unbiased noise stays unbiased."""
    is_additive: bool = False
    """Linear in all inputs together, so that they may share their noise."""
    exactly: Callable[..., Tensor] | None = None
    """A faster function that is linear only to the eye: used where all inputs are exact."""
    kept: str | None = None
    """The attribute under which the node keeps an input that no gradient flows through."""
    reads: Sequence[Tensor | None] = ()
    """What the function holds besides; a change in place raises."""


class Derivation:
    """Looks for recipes in the graph of one forward pass."""

    def __init__(self, handles: Mapping[Edge, Handle], calls: Calls) -> None:
        self._handles, self._operands, self._calls = handles, calls.operands, calls

    def of(self, tensor: Tensor, wanted: Rank) -> Source | None:
        """How to compute `tensor` again at least as faithfully as `wanted`, from other storages than its own."""
        node = tensor.grad_fn
        if node is None or self._calls.has_changed_itself(tensor):
            return None
        own = tensor.untyped_storage()._cdata
        found = self._repeat(node, tensor.output_nr, own, MAX_DEPTH)
        return found if found is not None and found.rank >= wanted and found.needs else None

    def _behind(self, node: Node | None, output_nr: int, own: int, budget: int) -> Source | None:
        """A source for one output of `node`: kept by somebody, a parameter, or repeatable."""
        if node is None:
            return None
        if (leaf := getattr(node, "variable", None)) is not None:
            return _parameter(leaf)
        handle = self._handles.get(Edge(sequence_nr_of(node), output_nr))
        if handle is not None and handle.producer != node.name():  # the same number in another thread
            handle = None
        return _kept(handle, own, budget) or self._repeat(node, output_nr, own, budget)

    def _repeat(self, node: Node, output_nr: int, own: int, budget: int) -> Source | None:
        make_rule = RULES.get(node.name())
        if make_rule is None or budget <= 0 or self._calls.has_changed(node, output_nr):
            return None
        try:
            rule = make_rule(node, output_nr, self._operands)
            return None if rule is None else self._follow(node, rule, own, budget)
        except ForeignError:
            return None

    def _follow(self, node: Node, rule: Rule, own: int, budget: int) -> Source | None:
        edges = inputs_of(node)
        sources = []
        for index in rule.inputs:
            producer, producer_nr = edges[index]
            if producer is None and rule.kept is not None:
                source = _kept(packed(node, rule.kept), own, budget - 1)
            else:
                source = self._behind(producer, producer_nr, own, budget - 1)
            if source is None or (source.rank < Rank.EXACT and not rule.is_linear):
                return None
            sources.append(source)
        rank = min((s.rank for s in sources), default=Rank.EXACT)
        if rank < Rank.EXACT and not rule.is_additive and _share_noise(sources):
            return None  # the mean of a product of two noisy values is not the product of their means
        function = rule.exactly if rule.exactly is not None and rank == Rank.EXACT else rule.function
        versions = [(tensor, tensor._version) for tensor in rule.reads if tensor is not None]

        def values() -> Tensor:
            for tensor, version in versions:
                check_version(tensor, version, tensor.shape)
            return function(*(source.values() for source in sources))

        return Source(
            values,
            rank,
            tuple(need for source in sources for need in source.needs),
            1 + max((s.depth for s in sources), default=0),
        )


def _share_noise(sources: Sequence[Source]) -> bool:
    """Whether two lossy sources come from the same code."""
    found: set[int] = set()
    for source in sources:
        codes = _codes_behind(source.needs) if source.rank < Rank.EXACT else set()
        if found & codes:
            return True
        found |= codes
    return False


def _codes_behind(needs: Sequence[object]) -> set[int]:
    """What recipes lead back to: entries with bytes or codes of their own, and codes that a chain shares."""
    codes: set[int] = set()
    for need in needs:
        form = need.entry.form if isinstance(need, Handle) else None
        if isinstance(form, Recipe):
            codes |= _codes_behind(form.needs)
        else:
            codes.add(id(need.entry if isinstance(need, Handle) else need))
    return codes


def _kept(handle: Kept | Tensor | None, own: int, budget: int) -> Source | None:
    """A tensor that somebody else keeps."""
    if isinstance(handle, Passed):
        return Source(handle.get, Rank.EXACT)
    if isinstance(handle, Tensor):  # a number, which torch keeps without hooks
        return Source(lambda: handle, Rank.EXACT)
    if not isinstance(handle, Handle) or handle.entry.storage_key == own or not handle.entry.is_unchanged:
        return None
    entry = handle.entry
    depth = getattr(entry.form, "depth", 0)
    if entry.need < Rank.INT2 or depth > budget:  # a mask or a shape alone would have to be kept for us: no gain
        return None
    return Source(handle.get, min(entry.need, entry.form.rank), (handle,), depth)


def _parameter(leaf: Tensor) -> Source:
    version = leaf._version

    def values() -> Tensor:
        check_version(leaf, version, leaf.shape)
        return leaf.detach()

    return Source(values, Rank.EXACT)


# ------------------------------------------------------------------------------- normalisation
def per_channel(values: Tensor, dims: int) -> Tensor:
    """[C] -> [C, 1, ...]: broadcasts over an input [B, C, ...] of `dims` dimensions."""
    return values.view([-1] + [1] * (dims - 2))


_MISSING = object()


def _batch_norm(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    affine = norm_parameters(node, operands)
    if affine is None or output_nr != 0:
        return None
    weight, bias = affine
    if not saved(node, "training"):
        stats = saved(node, "running_mean"), saved(node, "running_var")
        eps = saved(node, "eps")
        reads = (*stats, *affine)
        return Rule(lambda x: F.batch_norm(x, *stats, weight, bias, False, 0.0, eps), is_linear=True, reads=reads)
    mean, rstd = saved(node, "result1"), saved(node, "result2")
    eps = saved(node, "epsilon" if "Cudnn" in node.name() else "eps")
    wide = torch.promote_types(mean.dtype, torch.float32)

    def normalise(x: Tensor) -> Tensor:
        # The kernel of eval mode, whose 1 / sqrt(variance + eps) is 1: torch's own order of rounding, in one pass.
        scale = rstd.to(wide) if weight is None else rstd.to(wide) * weight  # [C]
        shift = None if bias is None else bias.to(wide)
        return F.batch_norm(x, mean.to(wide), torch.ones_like(scale), scale, shift, False, 0.0, 0.0)

    def again(x: Tensor) -> Tensor:  # computes the statistics again; on CUDA the eval kernel rounds otherwise
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)

    return Rule(normalise, is_linear=True, exactly=None if mean.device.type == "cpu" else again, reads=affine)


def fold(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale and shift of a normalisation with its affine part: y = scale * x + shift."""
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return scale, shift


def norm_parameters(node: Node, operands: Mapping[int, Any]) -> tuple[Tensor | None, Tensor | None] | None:
    """Weight and bias of a normalisation; `None` when its bias cannot be told (frozen, and the call was not seen)."""
    weight = saved(node, "weight")
    bias_node = inputs_of(node)[2][0]
    if bias_node is not None:
        bias = getattr(bias_node, "variable", None)
        return None if bias is None else (weight, bias.detach())
    bias = operands.get(sequence_nr_of(node), _MISSING)
    return None if bias is _MISSING else (weight, bias)


def _layer_norm(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    eps = operands.get(sequence_nr_of(node))
    if eps is None or output_nr != 0:
        return None
    shape, weight, bias = (saved(node, name) for name in ("normalized_shape", "weight", "bias"))
    mean, rstd = saved(node, "result1"), saved(node, "result2")
    dtype = output_of(node, 0).dtype

    def normalise(x: Tensor) -> Tensor:
        y = (x.to(mean.dtype) - mean) * rstd  # [..., D], statistics [..., 1]
        if weight is not None:
            y = torch.addcmul(bias.to(y.dtype), y, weight.to(y.dtype)) if bias is not None else y.mul_(weight)
        elif bias is not None:
            y += bias
        out: Tensor = y.to(dtype)
        return out

    def again(x: Tensor) -> Tensor:  # computes the statistics again
        return F.layer_norm(x, shape, weight, bias, eps)

    return Rule(normalise, is_linear=True, exactly=again, reads=(weight, bias))


def _group_norm(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    affine = norm_parameters(node, operands)
    if affine is None or output_nr != 0:
        return None
    weight, bias = affine
    mean, rstd = saved(node, "result1"), saved(node, "result2")  # [B, G]
    groups, eps = saved(node, "group"), saved(node, "eps")

    def normalise(x: Tensor) -> Tensor:
        scale, shift = (
            s.view(*s.shape, *[1] * (x.dim() - 2)) for s in fold_groups(mean, rstd, weight, bias, x.shape[1])
        )
        return torch.addcmul(shift, x, scale).to(x.dtype)  # [B, C, 1, ...]

    def again(x: Tensor) -> Tensor:  # computes the statistics again
        return F.group_norm(x, groups, weight, bias, eps)

    return Rule(normalise, is_linear=True, exactly=again, reads=affine)


def fold_groups(
    mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, channels: int
) -> tuple[Tensor, Tensor]:
    """As `fold`, for statistics [B, G] and parameters [C]; both results are [B, C]."""
    repeat = channels // mean.shape[1]
    return fold(mean.repeat_interleave(repeat, 1), rstd.repeat_interleave(repeat, 1), weight, bias)


# ------------------------------------------------------------------------------- activations, arithmetic, views
def _unary(function: Callable[..., Tensor], *attributes: str, is_linear: bool = False) -> Callable[..., Rule]:
    def rule(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
        values = {name: saved(node, name) for name in attributes}
        return Rule(lambda x: function(x, **values), is_linear=is_linear)

    return rule


def _add(sign: int) -> Callable[..., Rule | None]:
    def rule(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
        alpha = sign * saved(node, "alpha")
        if all(n is not None for n, _ in inputs_of(node)):
            return Rule(lambda a, b: torch.add(a, b, alpha=alpha), (0, 1), is_linear=True, is_additive=True)
        constant = operands.get(sequence_nr_of(node))
        if constant is None or inputs_of(node)[0][0] is None:
            return None
        return Rule(lambda a: torch.add(a, constant, alpha=alpha), is_linear=True)

    return rule


def _mul(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    has_first, has_second = (n is not None for n, _ in inputs_of(node))
    if has_first and has_second:
        return Rule(torch.mul, (0, 1), is_linear=True)
    # The other operand carries no gradient (a scalar, dropout's noise, a frozen scale) and is kept for the first's.
    return Rule(torch.mul, (0, 1), is_linear=True, kept="other" if has_first else "self")


def _native_dropout(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    p, mask = saved(node, "p"), packed(node, "result1")
    if p >= 1 or not isinstance(mask, Kept):
        return None
    return Rule(lambda x: x * mask.get() * (1.0 / (1.0 - p)), is_linear=True)


def _cast(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    like = output_of(node, 0)
    return Rule(lambda x: x.to(device=like.device, dtype=like.dtype, copy=True), is_linear=True)


def _view(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    shape = tuple(output_of(node, 0).shape)
    return Rule(lambda x: x.reshape(shape), is_linear=True)


def _transpose(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    first, second = _signed(saved(node, "dim0")), _signed(saved(node, "dim1"))
    return Rule(lambda x: x.transpose(first, second), is_linear=True)


def _permute(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    dims = tuple(_signed(d) for d in saved(node, "dims"))
    return Rule(lambda x: x.permute(dims), is_linear=True)


def _signed(dim: int) -> int:
    """Nodes show negative dimensions as unsigned 64-bit integers."""
    return dim - 2**64 if dim >= 2**63 else dim


def _clone(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    return Rule(torch.clone, is_linear=True)  # no alias: what is computed again may be cached


RULES: Mapping[str, Callable[[Node, int, Mapping[int, Any]], Rule | None]] = {
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "ReluBackward0": _unary(torch.relu),
    "GeluBackward0": _unary(F.gelu, "approximate"),
    "SiluBackward0": _unary(F.silu),
    "MishBackward0": _unary(F.mish),
    "HardswishBackward0": _unary(F.hardswish),
    "HardsigmoidBackward0": _unary(F.hardsigmoid),
    "LeakyReluBackward0": _unary(F.leaky_relu, "negative_slope"),
    "HardtanhBackward0": _unary(F.hardtanh, "min_val", "max_val"),
    "SoftplusBackward0": _unary(F.softplus, "beta", "threshold"),
    "AddBackward0": _add(1),
    "SubBackward0": _add(-1),
    "MulBackward0": _mul,
    "NegBackward0": _unary(torch.neg, is_linear=True),
    "NativeDropoutBackward0": _native_dropout,
    "ToCopyBackward0": _cast,
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
    "ReshapeAliasBackward0": _view,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "CloneBackward0": _clone,
}
"""By the name of the node. A rule reads small things (statistics, constants) at once, values when they are wanted."""
