"""Weights that are made from a parameter for one use: they are made again while backward waits.

What an operation keeps of such a weight, or of a view or a cast of it, is replaced by how to make it again from the
parameter, which lives anyway. Dense weights are made from smaller parameters: in a store's scope, and inside
`rebuilding_weights`, which hands all other tensors to the hooks around it. The node of the function that made them, one
of `autograd_graph.REBUILT`, says how in its attribute `rebuild`. Under autocast, 16-bit copies are made of parameters:
a store that may compute tensors again keeps none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.recompute_rules import RULES, Rule
from lightning_memsave.saved_tensors.saved_storage import Passed
from lightning_memsave.torch_internals.autograd_graph import (
    REBUILT,
    Kept,
    Node,
    check_version,
    innermost_hooks,
    inputs_of,
    is_inside_transform,
)
from lightning_memsave.torch_internals.fake_tensors import is_plain


class Made(NamedTuple):
    """A weight that a caller made for one function."""

    weight: Tensor
    parameter: Tensor
    rebuild: Callable[[Tensor], Tensor]
    """Makes it again from the parameter."""


class MadeAgain(Kept):
    """What is kept of a weight that a caller made, or of a view of it: nothing of its own."""

    __slots__ = ("_made_from", "_offset", "_rebuild", "_size", "_stride", "_version")

    def __init__(self, tensor: Tensor, made: Made) -> None:
        self._made_from, self._rebuild, self._version = made.parameter, made.rebuild, made.parameter._version
        self._size, self._stride, self._offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def get(self) -> Tensor:
        """Return the tensor, made again.

        Raises:
            RuntimeError: the parameter was changed in place since, as autograd itself would.
        """
        check_version(self._made_from, self._version, self._made_from.shape)
        with torch.no_grad():
            return self._rebuild(self._made_from.detach()).as_strided(self._size, self._stride, self._offset)


class Rebuilt(Kept):
    """What is kept of such a weight: nothing of its own.

    Args:
        tensor: a view or a cast of the weight.
        values: the parameter that the weight was made from.
        rebuild: makes it again.
        rules: the way from the weight to `tensor`.
    """

    __slots__ = ("_rebuild", "_rules", "_size", "_stride", "_values", "_version")

    def __init__(self, tensor: Tensor, values: Tensor, rebuild: Callable[[Tensor], Tensor], rules: list[Rule]) -> None:
        self._values, self._version, self._rebuild = values, values._version, rebuild
        self._size, self._stride, self._rules = tensor.shape, tensor.stride(), rules

    def get(self) -> Tensor:
        """Return the tensor, made again.

        Raises:
            RuntimeError: the values were changed in place since, as autograd itself would.
        """
        check_version(self._values, self._version, self._values.shape)
        with torch.no_grad():
            tensor = self._rebuild(self._values.detach())
            for rule in self._rules:
                tensor = rule.function(tensor)
            if tensor.stride() == self._stride:
                return tensor
            return tensor.new_empty_strided(self._size, self._stride).copy_(tensor)


_TRANSPARENT: Mapping[str, Callable[..., Rule | None]] = {
    **{name: RULES[f"{name}Backward0"] for name in ("View", "UnsafeView", "Transpose", "Permute", "ToCopy", "Clone")},
    "T": lambda node, output_nr, operands: Rule(torch.t),
}


def rebuilt(tensor: Tensor, casts: bool = False) -> Rebuilt | None:
    """Return `tensor` as something that is made again; `None` when it is no view or cast of such a weight.

    Args:
        tensor: what is kept.
        casts: whether casts of a plain parameter are made again as well.
    """
    path: list[Node] = []
    node = tensor.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _TRANSPARENT:
        path.append(node)
        node = inputs_of(node)[0][0]
    if node is None:
        return None
    is_made = node.name() in REBUILT
    values = getattr(inputs_of(node)[0][0] if is_made else node, "variable", None)
    if values is None:  # computed (`torch.func.functional_call`)
        return None
    is_cast = casts and is_plain(values, nn.Parameter) and any(step.name() == "ToCopyBackward0" for step in path)
    if not is_made and not is_cast:
        return None
    rules = [_TRANSPARENT[step.name().removesuffix("Backward0")](step, 0, {}) for step in reversed(path)]
    rebuild: Callable[[Tensor], Tensor] = node.rebuild if is_made else torch.detach  # type: ignore[attr-defined]
    return Rebuilt(tensor, values, rebuild, [rule for rule in rules if rule is not None])


def left_alone(tensor: Tensor, casts: bool = False) -> Kept:
    """Return what a store keeps of a weight: a recomputation of one that is made, else the tensor itself.

    Args:
        tensor: what is kept.
        casts: as for `rebuilt`.
    """
    return (None if tensor.is_leaf else rebuilt(tensor, casts)) or Passed(tensor)


def cast_of_frozen(tensor: Tensor, call: Call) -> MadeAgain | None:
    """Return autocast's copy of a frozen weight as something that is made again; `None` for any other tensor.

    A Linear whose weight is frozen keeps nothing but that weight.

    Args:
        tensor: what is kept; it requires no gradient.
        call: that keeps it.
    """
    weight = call.argument(1, "weight") if call.name == "linear" else None
    if weight is None or not is_plain(weight, nn.Parameter) or weight.requires_grad or weight.dtype == tensor.dtype:
        return None
    num_bytes, dtype = weight.numel() * tensor.element_size(), tensor.dtype
    is_whole = tensor.shape in (weight.shape, weight.shape[::-1]) and tensor.untyped_storage().nbytes() == num_bytes
    if not (is_whole and weight.is_contiguous()):
        return None
    return MadeAgain(tensor, Made(tensor, weight, lambda values: values.to(dtype)))


class _Foreign:
    """A tensor that hooks around ours keep."""

    __slots__ = ("_kept", "_unpack")

    def __init__(self, kept: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._kept, self._unpack = kept, unpack

    def get(self) -> Tensor:
        return self._unpack(self._kept)


@contextmanager
def rebuilding_weights(made: Iterable[Made] = ()) -> Iterator[None]:
    """Keep no dense weight for backward while entered; what else is kept goes where it would have gone.

    Transforms of torch.func bear no hooks, and keep it.

    Args:
        made: weights that are known by their memory, also where no gradient flows to their parameter.
    """
    if not torch.is_grad_enabled() or is_inside_transform():
        yield
        return
    around, unpack_around = innermost_hooks()
    by_memory = {each.weight.untyped_storage()._cdata: each for each in made}

    def pack(tensor: Tensor) -> Kept | _Foreign:
        if by_memory and (found := by_memory.get(tensor.untyped_storage()._cdata)) is not None:
            return MadeAgain(tensor, found)
        if around is None:
            return left_alone(tensor)
        kept = rebuilt(tensor) or around(tensor)
        return kept if isinstance(kept, Kept) else _Foreign(kept, unpack_around)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.get()):
            yield
    finally:
        by_memory.clear()  # the hook lives as long as what it has packed
