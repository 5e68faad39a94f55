"""A call in tiles: slices of its arguments along one dimension are calls of their own, each a checkpointed region.

Forward keeps the slices, and nothing of what is computed from them; backward makes the call of one slice again at a
time, the last one first. So hidden layers exist for one slice, in forward and in backward. Autograd adds the slices'
gradients of weights up, in the weights' dtype, before any hook sees them.

What a call draws (dropout) is drawn once, for all slices, in the order of the plain call, and kept: masks as bits.
While it is drawn, a mask takes a byte per element of the whole.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_memsave.saved_tensors.checkpoint_regions import run
from lightning_memsave.saved_tensors.kept_noise import Draw, KeptNoise, in_tile
from lightning_memsave.saved_tensors.lent_weights import LentWeights
from lightning_memsave.saved_tensors.region_members import Member


def lengths_of(extent: int, size: int) -> list[int]:
    """Return the lengths of slices of at most `size`, as even as they can be.

    >>> lengths_of(10, 4)
    [4, 3, 3]
    """
    num_tiles = -(-extent // size)
    ends = [-(-extent * number // num_tiles) for number in range(num_tiles + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


def extent_of(leaves: Sequence[Any], dim: int) -> int:
    """Return the size of the first tensor that has such a dimension; 0 without one."""
    return next((leaf.shape[dim] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > dim), 0)


def are_cut(leaves: Sequence[Any], dim: int) -> list[bool]:
    """Return which leaves are cut: tensors whose size there is that of the first."""
    extent = extent_of(leaves, dim)
    return [isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == extent for leaf in leaves]


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor, those with the largest steps in memory first.

    >>> memory_order(torch.zeros(2, 3, 4).transpose(0, 1))
    (1, 0, 2)
    """
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


# ---------------------------------------------------------------------------------------------------- tiles
class Cut(NamedTuple):
    """How calls of a module are cut."""

    dim: int
    draws: tuple[Draw, ...] | None
    """What a call draws; `None`: each tile draws numbers of its own."""
    orders: tuple[tuple[int, ...], ...]
    """Orders of dimensions in memory, one for each tensor that is returned. What follows may depend on them: masks are
    drawn in that order."""


class _Tile:
    """The forward of a module as one of the tiles of a call.

    Args:
        function: the module's own forward.
        weights: what all tiles compute with.
        noise: what all tiles draw from; `None`: each draws its own.
        number: of the tile.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        weights: LentWeights,
        noise: KeptNoise | None,
        number: int,
    ) -> None:
        self._function, self._weights, self._noise, self._number = function, weights, noise, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        noise = nullcontext() if self._noise is None else self._noise.of_tile(self._number)
        with in_tile(), self._weights.lent(), noise:
            return self._function(*args, **kwargs)


def run_in_tiles(
    member: Member,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    cut: Cut,
    size: int,
    around_each: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Call the forward of `module` on slices of its arguments, each call a region, and join what they return.

    Args:
        member: what `module` remembers of its calls.
        module: treats the entries of the dimension that is cut independently of each other.
        args: its arguments; tensors with the extent of the first are cut, the others are given to every tile.
        kwargs: the same.
        cut: how.
        size: entries of a slice, at most.
        around_each: makes a context for the forward of each tile.

    Raises:
        ValueError: an output does not have the entries of its slice.
        EditsInputError: a call edits its input in place.
        ChangesAttributeError: it changes an attribute that cannot be put back.
    """
    leaves, tree = tree_flatten((args, kwargs))
    lengths = lengths_of(extent_of(leaves, cut.dim), size)
    # Split at once: backward then joins the slices' gradients in one tensor, instead of adding up one for each.
    is_cut = are_cut(leaves, cut.dim)
    slices = [
        leaf.split_with_sizes(lengths, cut.dim) if cuts else [leaf] * len(lengths)
        for leaf, cuts in zip(leaves, is_cut, strict=True)
    ]
    noise = KeptNoise(cut.draws, cut.dim, lengths) if cut.draws else None
    function, weights = member.forward_of(module), LentWeights(module)
    found: list[list[Any]] = []
    for number, length in enumerate(lengths):
        parts = [each[number] for each in slices]
        given = [part.contiguous() if cuts else part for part, cuts in zip(parts, is_cut, strict=True)]
        some, named = tree_unflatten(given, tree)
        del parts, given
        member.generators(module)  # looked for where calls are counted
        tile = copy.copy(member)
        tile.previous_forward = _Tile(function, weights, noise, number)
        with around_each():
            outputs, tree_of_outputs = tree_flatten(run(member.memberships, tile, module, some, named))
        member.num_calls += 1
        for output in outputs:
            if isinstance(output, Tensor) and (output.dim() <= cut.dim or output.shape[cut.dim] != length):
                raise ValueError(f"an output {list(output.shape)} does not have the {length} entries of its tile")
        found.append(outputs)
        del some, named, outputs
    orders = iter(cut.orders)
    whole = [
        _joined(each, cut.dim, next(orders)) if isinstance(each[0], Tensor) else each[0]
        for each in zip(*found, strict=True)
    ]
    return tree_unflatten(whole, tree_of_outputs)


def _joined(parts: Sequence[Tensor], dim: int, order: tuple[int, ...]) -> Tensor:
    """Return parts as one tensor, laid out in memory as the plain call's output."""
    joined = torch.cat([part.permute(order) for part in parts], order.index(dim))
    return joined.permute([order.index(place) for place in range(len(order))])
