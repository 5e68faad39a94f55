"""What a call was given, taken apart into tensors and the rest, so that it can be given the same again."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_memsave.saved_tensors.object_state import ObjectState, is_object
from lightning_memsave.saved_tensors.randomness import generators_in, is_generator


class _Object(NamedTuple):
    """An argument that is no container of torch's trees: made anew from its state and what it refers to."""

    place: int
    state: ObjectState
    first: int
    """Positions of its references in the leaves."""
    last: int


class Arguments:
    """The arguments of one call.

    Attributes:
        leaves: tensors and other values; behind them, what objects among them refer to. Whoever keeps these in another
            way gives them to `again`.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tree: TreeSpec | None = None
        self._objects: list[_Object] = []
        if not kwargs and all(type(arg) is Tensor for arg in args):  # most calls, and torch's trees are made in Python
            self.leaves: list[Any] = list(args)
            self._num_leaves = len(args)
            return
        self.leaves, self._tree = tree_flatten((args, kwargs))
        self._num_leaves = len(self.leaves)
        for place, leaf in enumerate(self.leaves[:]):
            if not is_object(leaf):
                continue
            try:
                state = ObjectState(leaf)
            except TypeError:  # whether it changes is seen in what the repetition computes
                continue
            self._objects.append(_Object(place, state, len(self.leaves), len(self.leaves) + len(state.references)))
            self.leaves[place] = None
            self.leaves.extend(state.references)

    @property
    def tensors(self) -> list[Tensor]:
        """All that the call was given, those of objects included."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def generators(self) -> list[Any]:
        """Return random generators among them, and in objects."""
        found = [leaf for leaf in self.leaves if is_generator(leaf)]
        opaque = [leaf for leaf in self.leaves[: self._num_leaves] if is_object(leaf)]
        return [*found, *generators_in(*opaque)] if opaque else found

    def release(self) -> None:
        """Forget the leaves, which are kept elsewhere."""
        self.leaves = []
        for each in self._objects:
            each.state.references = []

    def again(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with `leaves` in place of those that there were.

        Objects are new ones, as they were then.
        """
        given = leaves[: self._num_leaves]
        for place, state, first, last in self._objects:
            given[place] = state.copy(leaves[first:last])
        if self._tree is None:
            return tuple(given), {}
        args, kwargs = tree_unflatten(given, self._tree)
        return args, kwargs

    def untouched_in_caches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Return which leaves lie in caches of keys and values, in which the call has left them: those of other layers.

        Args:
            args: as they are after the call.
            kwargs: the same.
        """
        found: list[int] = []
        caches = [each for each in self._objects if _is_cache(each.state)]
        after = tree_flatten((args, kwargs))[0] if caches else []
        for place, state, first, _ in caches:
            still = set(map(id, ObjectState(after[place]).references))
            mine = enumerate(state.references, first)
            found += [n for n, t in mine if isinstance(t, Tensor) and t.grad_fn is not None and id(t) in still]
        return found


def _is_cache(state: ObjectState) -> bool:
    """Return whether an object is one of transformers' caches, which decoders fill layer by layer."""
    kinds = (kind for kind in state.references if isinstance(kind, type))
    return any(kind.__name__.endswith("Cache") and kind.__module__.startswith("transformers.") for kind in kinds)
