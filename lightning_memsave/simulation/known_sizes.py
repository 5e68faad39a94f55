"""Operations whose outputs are as large as some values say: where those are known, so are the sizes.

The mask in `logits[labels != -100]`, the lengths of packed sequences: they are made of the batch's integers, which a
step that is run for its shapes knows. What is picked out by them need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memsave.measuring.source_lines import line_text, user_line
from lightning_memsave.torch_internals.fake_tensors import facts_of, is_fake, note, unset_fake_temporarily

ValuesOf = Callable[[Tensor], Tensor | None]
aten = torch.ops.aten


class ReadsValueError(RuntimeError):
    """A step reads a value that is not known; the text tells the line."""


def sized_by_values(func: Any, args: Any, kwargs: Any, values_of: ValuesOf) -> Any:
    """Return the fake outputs of an operation whose sizes depend on values that are known; else `None`.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: those by name.
        values_of: returns the real values of a tensor; `None` where they are not known.

    Raises:
        ReadsValueError: the values are not known.
    """
    if (rule := _RULES.get(func)) is not None:
        found = rule(values_of, *args, **kwargs)
        if found is not None:
            return found
    if torch.Tag.dynamic_output_shape not in func.tags or (func is aten.index.Tensor and not _masks(args[1])):
        return None
    known = [values_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(values is None for values in known):
        try:
            return func(*args, **kwargs)  # it may have been told the size
        except RuntimeError:
            raise ReadsValueError(f"a size depends on values at {line_text(user_line(3))}") from None
    with unset_fake_temporarily(), torch.no_grad():
        real = func(*tree_map(_with(values_of), args), **tree_map(_with(values_of), kwargs))
    fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and is_fake(leaf)]
    device = fakes[0].device if fakes else torch.device("cpu")
    return tree_map(lambda leaf: torch.empty_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf, real)


def _with(values_of: ValuesOf) -> Callable[[Any], Any]:
    return lambda leaf: values_of(leaf) if isinstance(leaf, Tensor) else leaf


def _masks(indices: list[Tensor | None]) -> list[Tensor]:
    return [each for each in indices if each is not None and each.dtype in (torch.bool, torch.uint8)]


def _index(values_of: ValuesOf, tensor: Tensor, indices: list[Tensor | None]) -> Tensor | None:
    """Index with the positions of a mask's true elements instead of the mask."""
    masks = _masks(indices)
    if not masks or any(values_of(mask) is None for mask in masks):
        return None
    positions: list[Tensor | None] = []
    for each in indices:
        if each is None or each.dtype not in (torch.bool, torch.uint8):
            positions.append(each)
            continue
        with unset_fake_temporarily():
            mask = values_of(each)
            assert mask is not None, "asked above"
            positions += mask.nonzero().unbind(1)
    return aten.index.Tensor(tensor, positions)  # type: ignore[no-any-return]  # a tensor


def _masked_select(values_of: ValuesOf, tensor: Tensor, mask: Tensor) -> Tensor | None:
    if (known := values_of(mask)) is None:
        return None
    size = torch.broadcast_shapes(tensor.shape, mask.shape)
    with unset_fake_temporarily():
        num_chosen = int(known.expand(size).sum())
    return tensor.new_empty(num_chosen)


def _packed(values_of: ValuesOf, tensor: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor] | None:
    """Return what `pack_padded_sequence` packs, [N, ...], and how many sequences are as long, [T], by value.

    Recurrent layers read those in C++, where nobody could tell them.
    """
    if (known := values_of(lengths)) is None:
        return None
    with unset_fake_temporarily():
        steps = torch.arange(int(known.max()), device="cpu")
        batch_sizes, total = (known.cpu()[None] > steps[:, None]).sum(1), int(known.sum())
    data = tensor.new_empty((total, *tensor.shape[2:]))
    if is_fake(tensor):
        note(data, facts_of(tensor))
    return data, batch_sizes


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Do what torch's function of this name does, with the operations that it runs, where C++ cannot fill lengths.

    Args:
        data: [N, ...], packed.
        batch_sizes: [T], how many sequences reach each step, by value.
        batch_first: whether sequences come before steps.
        padding_value: where there are none.
        total_length: of the output; 0 or less: as long as the longest sequence.

    Returns:
        The sequences, [B, L, ...] or [L, B, ...], and their lengths, [B].
    """
    sizes = [int(size) for size in batch_sizes.tolist()]
    shape = (max(total_length, len(sizes)), sizes[0], *data.shape[1:])
    padded, first, start = torch.full(shape, padding_value, dtype=data.dtype, device=data.device), 0, 0
    for end, (size, following) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True), 1):
        if size != following:  # steps of as many sequences
            part = data.narrow(0, first, size * (end - start))
            rows = padded.narrow(0, start, end - start).narrow(1, 0, size)
            rows.copy_(part.view(end - start, size, *data.shape[1:]))
            first, start = first + size * (end - start), end
    lengths = torch.tensor([sum(size > place for size in sizes) for place in range(sizes[0])], device="cpu")
    return padded.transpose(0, 1) if batch_first else padded, lengths


_RULES: Mapping[Any, Callable[..., Any]] = {
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten._pack_padded_sequence.default: _packed,
}
