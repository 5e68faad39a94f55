"""Cross-entropy on the output of a Linear: computed in chunks, so that no log-probability is kept.

`cross_entropy(linear(h, W, b), target)` keeps one log-probability per class and sample, and its backward makes as many
gradients: for a language model more than all else. torch's `linear_cross_entropy` goes through the logits chunk by
chunk and computes the gradients of h and W at once, in forward. Here a call of `cross_entropy` whose logits come from a
Linear is answered by it: all of them, or those of some positions (`logits[:, :-1]`), as they are or cast to float32.
The logits that the caller computed die with the caller's own reference.

Equal up to rounding, which is that of the Linear's dtype; the loss itself keeps the digits of a cast. Logits of float16
are left alone: gradients are made before a loss scale could reach them. The price: the Linear is computed twice, its
weight's gradient exists from the forward pass on, and a second backward through the loss (`retain_graph`,
`create_graph`) raises an error (a reduction of `"none"` computes its gradients in backward, and allows the first).

Source: `torch.nn.functional.linear_cross_entropy` (torch 2.13); the idea: Wijmans et al., "Cut Your Losses in Large-
Vocabulary Language Models", 2024 (https://arxiv.org/abs/2411.09009).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memsave.numerics.fakes import is_plain, truth
from lightning_memsave.vault.entries import Handle
from lightning_memsave.vault.forms import Rank
from lightning_memsave.vault.graph import ForeignError, Node, has_hooks, inputs_of, output_of, packed, saved, signed
from lightning_memsave.vault.policy import Call


class Head(NamedTuple):
    """A Linear as the graph shows it."""

    input: Tensor  # [N, D]
    weight: Tensor  # [C, D]
    bias: Tensor | None  # [C]


def linear_cross_entropy(call: Call, is_touched: Callable[[Node], bool]) -> Tensor | None:
    """The loss that `call` of `cross_entropy` asks for; `None` where it is better computed as it stands.

    Args:
        call: of `cross_entropy`.
        is_touched: whether somebody has changed or hooked what a node made.
    """
    logits, target, weight = call.argument(0, "input"), call.argument(1, "target"), call.argument(2, "weight")
    reduction, ignore_index = call.argument(6, "reduction", "mean"), call.argument(4, "ignore_index", -100)
    is_plain = (
        isinstance(logits, Tensor)
        and logits.dim() == 2
        and logits.grad_fn is not None
        and torch.is_grad_enabled()
        and logits._version == 0
        and not has_hooks(logits)
        and isinstance(target, Tensor)
        and target.dtype == torch.int64
        and target.shape == logits.shape[:1]
        and (weight is None or (weight.dtype == logits.dtype and weight.shape == logits.shape[1:]))
        and reduction in ("mean", "sum", "none")
        and not call.argument(7, "label_smoothing", 0.0)
        and call.argument(3, "size_average") is None
        and call.argument(5, "reduce") is None
        and not torch.is_autocast_enabled(logits.device.type)
    )
    try:
        head = _head(logits, is_touched) if is_plain else None
    except ForeignError:
        return None
    if head is None:
        return None
    if reduction == "mean" and not truth((target != ignore_index).any(), True):
        return None  # 0 / 0, which the two treat otherwise
    if logits.numel() <= head.input.numel() + head.weight.numel():  # what the chunked one keeps: it would not pay
        return None
    loss = F.linear_cross_entropy(
        head.input,
        head.weight,
        target,
        linear_bias=head.bias,
        weight=weight if weight is None else weight.to(head.input.dtype),
        reduction=reduction,
        ignore_index=ignore_index,
        options=_options(head),
    )
    if loss.dtype == logits.dtype:
        return loss
    num_rows = max(1, head.input.numel() // logits.shape[1])
    with torch.no_grad():  # in the dtype that the caller cast to, as rounding the loss to the Linear's would show
        exact = _in_parts(logits, target, num_rows, weight, reduction, ignore_index)
        correction = torch.where(exact == loss, 0, exact - loss)  # both may be infinite
    return loss + correction


def _options(head: Head) -> nn.LinearCrossEntropyOptions:
    """In bfloat16 at most a few chunks, as the weight's gradient is rounded after each; torch makes more on CUDA."""
    if head.weight.dtype.itemsize >= 4:
        return nn.LinearCrossEntropyOptions()
    (num_rows, width), num_classes = head.input.shape, head.weight.shape[0]
    num_chunks = min(_MAX_HALF_CHUNKS, -(-num_classes // width))
    return nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=max(1, -(-num_rows // num_chunks)))


def _in_parts(
    logits: Tensor, target: Tensor, num_rows: int, weight: Tensor | None, reduction: str, ignore_index: int
) -> Tensor:
    """`F.cross_entropy`, of some rows at a time."""
    losses = torch.cat(
        [
            F.cross_entropy(some, wanted, weight, ignore_index=ignore_index, reduction="none")
            for some, wanted in zip(logits.split(num_rows), target.split(num_rows), strict=True)
        ]
    )
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counts = target != ignore_index
    return losses.sum() / (counts if weight is None else counts * weight[target.where(counts, 0)]).sum()


def _head(logits: Tensor, is_touched: Callable[[Node], bool]) -> Head | None:
    """The Linear of whose output `logits` [N, C] are rows: all, or slices of its positions, in a wider dtype or not."""
    node, views = logits.grad_fn, list[Node]()
    while node is not None and node.name() in _OF_ROWS and not is_touched(node):
        views.append(node)
        node = inputs_of(node)[0][0]
    if node is None or node.name() not in ("AddmmBackward0", "MmBackward0") or is_touched(node):
        return None
    has_bias = node.name() == "AddmmBackward0"
    if has_bias and (saved(node, "alpha"), saved(node, "beta")) != (1, 1):
        return None
    *bias_edge, _, (transposed, _) = inputs_of(node)
    if transposed is None or transposed.name() != "TBackward0":
        return None
    weight = _leaf(inputs_of(transposed)[0][0])
    bias = _leaf(bias_edge[0][0]) if bias_edge else None
    name = "mat1" if has_bias else "self"
    if weight is None or weight.dtype == torch.float16 or not _is_exact(packed(node, name)):
        return None
    if has_bias and (bias is None or bias.shape != weight.shape[:1]):
        return None
    rows: Tensor | None = saved(node, name)
    for view in reversed(views):
        rows = None if rows is None else _viewed(rows, view, num_classes=weight.shape[0])
    if rows is None or (*rows.shape[:-1], weight.shape[0]) != logits.shape or weight.device != logits.device:
        return None
    return Head(rows, weight, bias)


_MAX_HALF_CHUNKS = 4
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
_OF_ROWS = (*_VIEWS, "SliceBackward0", "CloneBackward0", "ToCopyBackward0")


def _viewed(rows: Tensor, node: Node, num_classes: int) -> Tensor | None:
    """What `node` does to logits [..., C], done to the inputs [..., D] of their rows; `None` if it mixes classes."""
    made = output_of(node, 0)
    *positions, last = made.shape or (0,)
    if last != num_classes:
        return None
    if node.name() in _VIEWS:
        return rows.reshape(*positions, rows.shape[-1])
    if node.name() == "SliceBackward0":
        dim, *part = (signed(saved(node, name)) for name in ("dim", "start", "end", "step"))
        assert dim is not None, "every slice has one"
        return rows[(slice(None),) * (dim % rows.dim()) + (slice(*part),)]
    given, given_nr = inputs_of(node)[0]
    assert given is not None, "the Linear is behind it"
    before = output_of(given, given_nr).dtype
    return rows if torch.promote_types(before, made.dtype) == made.dtype else None  # a copy, or a wider one


def _leaf(node: Node | None) -> Tensor | None:
    leaf = getattr(node, "variable", None)
    if leaf is None or not is_plain(leaf, nn.Parameter):  # sharded parameters are of other types
        return None
    return leaf if leaf.untyped_storage().nbytes() >= leaf.nbytes else None  # FSDP2 has taken its memory back


def _is_exact(kept: object) -> bool:
    """Whether the Linear's input can still be had to the bit."""
    return not isinstance(kept, Handle) or kept.entry.form.rank == Rank.EXACT
