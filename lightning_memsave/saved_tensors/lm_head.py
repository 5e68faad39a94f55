"""The Linear that made the logits of a loss, read off the graph, with the parameters and the input that it had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_memsave.saved_tensors.encodings import Fidelity, IntCodes, Recompute
from lightning_memsave.saved_tensors.function_mode import CallTracker, seen
from lightning_memsave.saved_tensors.saved_storage import SavedTensor
from lightning_memsave.torch_internals.autograd_graph import (
    Node,
    inputs_of,
    output_of,
    packed,
    saved,
    sequence_nr_of,
    signed,
    storage_key,
)
from lightning_memsave.torch_internals.fake_tensors import is_plain


class Head(NamedTuple):
    """A Linear as the graph shows it."""

    input: Tensor  # [N, D]
    weight: Tensor  # [C, D]; under autocast of another dtype than the input
    bias: Tensor | None  # [C]


def head_of(logits: Tensor, calls: CallTracker) -> Head | None:
    """Return the Linear of whose output `logits` [N, C] are rows.

    All, or slices of its positions, in a wider dtype or not.
    """
    node, views = logits.grad_fn, list[Node]()
    while node is not None and node.name() in _OF_ROWS and not calls.is_touched(node):
        views.append(node)
        node = inputs_of(node)[0][0]
    if node is None or node.name() not in ("AddmmBackward0", "MmBackward0") or calls.is_touched(node):
        return None
    has_bias = node.name() == "AddmmBackward0"
    if has_bias and (saved(node, "alpha"), saved(node, "beta")) != (1, 1):
        return None
    *bias_edge, _, (transposed, _) = inputs_of(node)
    if transposed is None or transposed.name() != "TBackward0":
        return None
    weight = _leaf(inputs_of(transposed)[0][0])
    bias = _leaf(bias_edge[0][0]) if bias_edge else None
    if weight is None or (has_bias and (bias is None or bias.shape != weight.shape[:1])):
        return None
    if not _has_seen(weight, bias, node, views, calls):
        return None
    rows = _rows(node, views, calls)
    for view in reversed(views):
        rows = None if rows is None else _viewed(rows, view, num_classes=weight.shape[0])
    if rows is None or (*rows.shape[:-1], weight.shape[0]) != logits.shape or weight.device != logits.device:
        return None
    return Head(rows, weight, bias)


def _rows(node: Node, views: Sequence[Node], calls: CallTracker) -> Tensor | None:
    """Return what the product `node` was given, [N, D], while it can be had to the bit."""
    name = "self" if node.name() == "MmBackward0" else "mat1"
    if _is_exact(packed(node, name)):
        rows: Tensor | None = saved(node, name)
        return rows
    latest = calls.latest_input
    if latest is None or not latest.is_unchanged or latest.node_nr not in map(sequence_nr_of, (node, *views)):
        return None
    return latest.tensor.flatten(0, -2).to(output_of(node, 0).dtype)


def _has_seen(weight: Tensor, bias: Tensor | None, node: Node, views: Sequence[Node], calls: CallTracker) -> bool:
    """Return whether the logits were made of these parameters as they are now."""
    for made in (node, *views):
        if (known := calls.linears.get(sequence_nr_of(made))) is not None:
            return known == seen(weight, bias)
    if bias is not None:
        return False
    kept = saved(node, "mat2")  # of a product, which checks the version itself
    return kept is not None and storage_key(kept) == storage_key(weight)


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
_OF_ROWS = (*_VIEWS, "SliceBackward0", "CloneBackward0", "ToCopyBackward0")


def _viewed(rows: Tensor, node: Node, num_classes: int) -> Tensor | None:
    """Return what `node` does to logits [..., C], done to the inputs [..., D] of their rows.

    `None` if it mixes classes.
    """
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
    """Return the parameter that `node` is of, or of which it is autocast's copy."""
    if node is not None and node.name() == "ToCopyBackward0":
        node = inputs_of(node)[0][0]
    leaf = getattr(node, "variable", None)
    if leaf is None or not is_plain(leaf, nn.Parameter):  # sharded parameters are of other types
        return None
    return leaf if leaf.untyped_storage().nbytes() >= leaf.nbytes else None  # FSDP2 has taken its memory back


def _is_exact(kept: object) -> bool:
    """Return whether the Linear's input can be had to the bit now, before what it follows from is coded."""
    if isinstance(kept, IntCodes):
        return False
    encoding = kept.entry.encoding if isinstance(kept, SavedTensor) else None
    if isinstance(encoding, Recompute):
        return all(map(_is_exact, encoding.needs))
    return encoding is None or encoding.fidelity == Fidelity.EXACT
