"""The random numbers of a call in tiles: drawn once, for all slices, in the order of the plain call, and kept.

Masks are kept as bits. Regions inside of a tile, which are repeated later, draw the same numbers again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memsave.numerics import bits
from lightning_memsave.saved_tensors.dropout import DROPOUT, native_dropout
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode


class Draw(NamedTuple):
    """Random numbers that a call draws in one operation."""

    times: int
    """Entries of the dimension that is cut for each entry of the input; 0: all slices have the same numbers."""
    order: tuple[int, ...]
    """The order of dimensions in memory, in which numbers are drawn."""


class NoiseError(RuntimeError):
    """A call draws numbers in a way that cannot be cut."""


def is_draw(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws random numbers; attention does so if it has dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if func is DROPOUT:
        return named.get("train") is not False
    return "scaled_dot_product" not in func._schema.name or named.get("dropout_p", 0.0) > 0


def shape_drawn(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of what an operation draws.

    Raises:
        NoiseError: the operation is not known, or its distribution is in a tensor.
    """
    first, *others = args
    if func._schema.name not in _KNOWN or any(isinstance(value, Tensor) for value in others):
        raise NoiseError(f"it draws numbers by `{func._schema.name}`")
    return tuple(first.shape) if isinstance(first, Tensor) else tuple(first)


_KNOWN = frozenset(f"aten::{n}" for n in ("bernoulli_", "uniform_", "normal_", "rand", "randn", "native_dropout"))
_MASKS = frozenset({"aten::bernoulli_", "aten::native_dropout"})


class KeptNoise:
    """The numbers that a call in tiles draws: whole and in the order of the plain call, by the first tile that asks.

    Args:
        draws: of the call, in order.
        dim: the dimension that is cut.
        lengths: of the slices.
    """

    def __init__(self, draws: Sequence[Draw], dim: int, lengths: Sequence[int]) -> None:
        self._draws, self._dim, self._lengths = draws, dim, lengths
        self._kept: list[list[Tensor]] = []
        """Numbers of each tile, one list for each draw, masks as bits; one tensor where all tiles have the same."""

    def of_tile(self, number: int) -> DispatchMode:
        """Return a mode in which draws give the numbers of a tile."""
        return _NoiseOfTile(functools.partial(self._numbers, number))

    def _numbers(self, tile: int, draw: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if draw >= len(self._draws):
            raise NoiseError("a module in tiles draws more numbers than when it was tested")
        if draw == len(self._kept):
            self._kept.append(self._drawn(draw, func, args, kwargs))
        kept, shape = self._kept[draw], shape_drawn(func, args)
        numbers = kept[tile] if self._draws[draw].times else kept[0]
        if func._schema.name in _MASKS:
            numbers = bits.unpack_mask(numbers, args[0].numel())
        numbers = numbers.view(shape)
        if func is DROPOUT:
            return native_dropout(args[0], numbers, args[1]), numbers
        return args[0].copy_(numbers) if func._schema.is_mutable else numbers.clone()

    def _drawn(self, draw: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Draw for the whole; return the slices."""
        first, *others = args
        shape, (times, order), dim = list(shape_drawn(func, args)), self._draws[draw], self._dim
        lengths = [times * length for length in self._lengths]
        if times:
            shape[dim] = sum(lengths)
        is_mask = func._schema.name in _MASKS
        if func is DROPOUT:
            whole = func(torch.empty_permuted(shape, order, dtype=first.dtype, device=first.device), *others)[1]
        elif func._schema.is_mutable:
            dtype = torch.bool if is_mask else first.dtype
            whole = func(torch.empty_permuted(shape, order, dtype=dtype, device=first.device), *others, **kwargs)
        else:
            whole = func(shape, *others, **kwargs)
        parts = whole.split_with_sizes(lengths, dim) if times else [whole]
        return [bits.pack(part.flatten(), 1) if is_mask else part.contiguous() for part in parts]


class _NoiseOfTile(DispatchMode):
    """Answers draws by `numbers(number of the draw, operation, args, kwargs)`."""

    supports_higher_order_operators = True

    def __init__(self, numbers: Callable[..., Any], num_draws: int = 0) -> None:
        super().__init__()
        self._numbers, self._num_draws = numbers, num_draws
        self._tokens: list[Token[_NoiseOfTile | None]] = []

    def __enter__(self) -> _NoiseOfTile:
        self._tokens.append(_ACTIVE.set(self))
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        _ACTIVE.reset(self._tokens.pop())

    def from_here(self) -> _NoiseOfTile:
        """Return a mode that goes on with the next draw."""
        return _NoiseOfTile(self._numbers, self._num_draws)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        self._num_draws += 1
        return self._numbers(self._num_draws - 1, func, args, kwargs)


_ACTIVE: ContextVar[_NoiseOfTile | None] = ContextVar("noise of a tile", default=None)


# ---------------------------------------------------------------------------------------------------- in a tile
_IS_IN_TILE: ContextVar[bool] = ContextVar("is in a tile", default=False)


def is_in_tile() -> bool:
    """Return whether a tile runs, or is made again: modules inside are not cut once more."""
    return _IS_IN_TILE.get()


@contextlib.contextmanager
def in_tile() -> Iterator[None]:
    """Run as a tile does: uncut inside, and with a copy of each weight of its own under autocast.

    A copy in 16 bits that tiles shared would add up their gradients in 16 bits.
    """
    token, caches = _IS_IN_TILE.set(True), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        _IS_IN_TILE.reset(token)


def tile_around() -> Callable[[], AbstractContextManager[None]]:
    """Return what leads back to the tile that runs now, if one does, from its next draw on: for a region inside."""
    noise = _ACTIVE.get()
    here = None if noise is None else noise.from_here()
    return functools.partial(_again, here) if is_in_tile() else contextlib.nullcontext


@contextlib.contextmanager
def _again(noise: _NoiseOfTile | None) -> Iterator[None]:
    with in_tile(), contextlib.nullcontext() if noise is None else noise.from_here():
        yield
