"""Cut a batch of (almost) any structure into microbatches; refuse, never guess, when it is ambiguous."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class UnsplittableBatchError(ValueError):
    """The batch dimension cannot be told from the batch."""


def _is_dataclass(node: object) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _is_plain_list(node: object) -> bool:
    """Return whether it is a list or tuple of strings, numbers or other leaves: one value per sample, by its length."""
    return isinstance(node, (list, tuple)) and not any(
        isinstance(child, (Tensor, Mapping, list, tuple)) or _is_dataclass(child) for child in node
    )


def _children(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return node.values()
    if _is_dataclass(node):
        return (getattr(node, f.name) for f in dataclasses.fields(node))
    if isinstance(node, (list, tuple)) and not _is_plain_list(node):
        return node
    return ()


def _is_array(node: object) -> bool:
    """Return whether it is a tensor or a numpy array (told without importing numpy)."""
    return isinstance(node, Tensor) or (hasattr(node, "__array__") and hasattr(node, "shape"))


def _first_dimensions(node: Any) -> set[int]:
    if isinstance(node, Tensor) and (node.layout is not torch.strided or node.is_nested):
        raise UnsplittableBatchError(
            f"a tensor of layout {node.layout} cannot be cut by samples. Pass `Microbatching(split_fn=...)`."
        )
    if _is_array(node):
        return {node.shape[0]} if len(node.shape) else set()
    return set().union(*(_first_dimensions(child) for child in _children(node)))


def batch_size(batch: Any) -> int:
    """Return the number of samples.

    The first dimension that all tensors of the batch share, or the length of its lists.

    A list whose items are alike (dictionaries with the same keys, tensors of one rank and dtype) and whose tensors
    disagree about a first dimension has one sample in each item, as `collate_fn=list` makes them.

    Raises:
        UnsplittableBatchError: tensors disagree, or there is none with a dimension.

    >>> batch_size([{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(1, 4)}])
    2
    """
    sizes = _first_dimensions(batch)
    if len(sizes) == 1 and _is_list_of_one_shape(batch):
        raise UnsplittableBatchError(
            f"a list of {len(batch)} tensors of one shape has samples as its items, or as their rows. {_SPLIT_FN}"
        )
    if len(sizes) != 1:
        listed = _list_sizes(batch)
        if len(listed) == 1:
            return listed.pop()
        raise UnsplittableBatchError(f"cannot tell the batch dimension: the batch has {_described(batch)}. {_SPLIT_FN}")
    return sizes.pop()


_SPLIT_FN = "Pass `Microbatching(split_fn=...)`, a function of (batch, size) that returns the microbatches as a list."


def _described(batch: Any) -> str:
    """Return which entries of a batch have which first dimension."""
    named: dict[int, list[str]] = {}
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(_children(batch))
    for key, value in pairs:
        for size in _first_dimensions(value):
            named.setdefault(size, []).append(f"`{key}`")
    if not named:
        return "no tensor with a dimension"
    listed = (f"{size} in {', '.join(names[:3])}" for size, names in sorted(named.items())[:4])
    return f"first dimensions {sorted(named)} ({'; '.join(listed)})"


def _is_list_of_one_shape(node: Any) -> bool:
    is_list = type(node) is list and len(node) > 2 and all(isinstance(item, Tensor) for item in node)
    return is_list and len({(item.shape, item.dtype) for item in node}) == 1 and node[0].dim() > 1


def refuse_list_of_alike(batch: Any) -> None:
    """Raise `UnsplittableBatchError` for a list whose rows or items may be the samples, where no losses tell which."""
    if type(batch) is list and len(batch) > 2 and _are_alike(batch) and len(_first_dimensions(batch)) == 1:
        raise UnsplittableBatchError(
            f"a list of {len(batch)} items of one kind has samples as its items, or as their rows. Pass `tuple(batch)` "
            "where rows are samples, or cut a list of samples yourself: `batch[i : i + size]`, of weight "
            "`len(part) / len(batch)`."
        )


def _are_alike(items: Any) -> bool:
    """Return whether the items of a list look like samples of one kind."""
    if type(items) not in (list, tuple) or not items:
        return False
    if all(isinstance(item, Tensor) for item in items):
        return len({(item.dim(), item.dtype) for item in items}) == 1 and items[0].dim() > 0
    if all(isinstance(item, Mapping) for item in items):
        return len({frozenset(item) for item in items}) == 1
    if all(_is_dataclass(item) for item in items):
        return len(set(map(type, items))) == 1
    are_tuples = type(items) is list and all(type(item) is tuple for item in items)
    return are_tuples and len(set(map(len, items))) == 1


def _list_sizes(node: Any) -> set[int]:
    """Return the lengths of lists of samples, and the first dimensions of tensors beside them."""
    if _is_array(node):
        return {node.shape[0]} if len(node.shape) else set()
    if _are_alike(node):
        return {len(node)}
    return set().union(*(_list_sizes(child) for child in _children(node)))


def take(node: Any, start: int, stop: int, num_samples: int) -> Any:
    """Return samples `start` to `stop` of a batch of `num_samples`.

    Tensors become views, containers keep their type.
    """
    return _with_samples(node, num_samples, lambda samples: samples[start:stop])


def pick(node: Any, rows: Sequence[int], num_samples: int) -> Any:
    """Return some samples of a batch of `num_samples`, in copies.

    >>> pick({"x": torch.arange(4), "name": ["a", "b", "c", "d"]}, [0, 3], 4)
    {'x': tensor([0, 3]), 'name': ['a', 'd']}
    """

    def picked(samples: Any) -> Any:
        is_array = _is_array(samples)
        return samples[list(rows)] if is_array else type(samples)(samples[row] for row in rows)

    return _with_samples(node, num_samples, picked)


def are_equal(node: Any, num_samples: int) -> bool:
    """Return whether all samples of a batch are the same, as in one of zeros.

    >>> are_equal((torch.zeros(3, 2), torch.ones(3)), 3), are_equal(torch.arange(3), 3)
    (True, False)
    """
    found: list[bool] = []

    def compared(samples: Any) -> Any:
        found.append(bool((samples == samples[:1]).all()) if _is_array(samples) else _is_plain_list(samples))
        return samples

    _with_samples(node, num_samples, compared)
    return all(found)


def resized(node: Any, num_samples: int, wanted: int) -> Any:
    """Return a batch of `wanted` samples, all of them the first one of a batch of `num_samples`."""

    def repeated(samples: Any) -> Any:
        if isinstance(samples, Tensor):
            return samples[:1].expand(wanted, *samples.shape[1:]).clone(memory_format=torch.contiguous_format)
        return samples[:1].repeat(wanted, 0) if _is_array(samples) else samples[:1] * wanted

    return _with_samples(node, num_samples, repeated)


def cloned(node: Any) -> Any:
    """Return the same batch in tensors, arrays and containers of its own, which a step may change.

    Other objects are shared.

    >>> import torch
    >>> batch = {"x": torch.zeros(2), "y": (torch.ones(2), "name")}
    >>> mine = cloned(batch)
    >>> mine["x"].add_(1), batch["x"]
    (tensor([1., 1.]), tensor([0., 0.]))
    """
    made: dict[int, tuple[Any, Any]] = {}  # one that is there twice stays one; kept, as its number is its own only then

    def own(leaf: Any) -> Any:
        if id(leaf) not in made:
            made[id(leaf)] = leaf, leaf.clone() if isinstance(leaf, Tensor) else copy.copy(leaf)
        return made[id(leaf)][1]

    return tree_map(lambda leaf: _mapped(leaf, own), node)


def _with_samples(node: Any, num_samples: int, change: Callable[[Any], Any]) -> Any:
    """Return the same batch with other samples: `change` gets each tensor, array or list of them."""

    def changed(leaf: Any) -> Any:
        has_samples = len(leaf.shape) > 0 if _is_array(leaf) else len(leaf) == num_samples
        return change(leaf) if has_samples else leaf

    if len(_first_dimensions(node)) > 1:  # then lists tell
        return _mapped(node, changed, lambda child: _are_alike(child) and len(child) == num_samples)
    return _mapped(node, changed, lambda child: _has_one_each(child, num_samples))


def _has_one_each(node: Any, num_samples: int) -> bool:
    """Return whether a list has one value for each sample that is a container itself.

    Dictionaries of names, for example.
    """
    if type(node) not in (list, tuple) or len(node) != num_samples or _is_plain_list(node) or _first_dimensions(node):
        return False
    if all(_lists_samples(child, num_samples) for child in node):
        raise UnsplittableBatchError(
            f"a list of {num_samples} containers with lists of {num_samples} values, in a batch of {num_samples} "
            "samples, has samples in the one or in the others. Pass `Microbatching(split_fn=...)`."
        )
    return True


def _lists_samples(node: Any, num_samples: int) -> bool:
    """Whether all plain lists in it, and there are some, have one value for each sample, as `default_collate` makes."""
    if _is_plain_list(node):
        return len(node) == num_samples
    children = [child for child in _children(node) if isinstance(child, (list, tuple, Mapping)) or _is_dataclass(child)]
    return bool(children) and all(_lists_samples(child, num_samples) for child in children)


def _mapped(node: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = _is_array) -> Any:
    """The same containers around what `change` makes of each tensor, array, list of other leaves, and `is_leaf`."""
    if _is_array(node) or is_leaf(node):
        return change(node)
    if isinstance(node, Mapping):
        return _rebuilt(node, {key: _mapped(value, change, is_leaf) for key, value in node.items()})
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_mapped(child, change, is_leaf) for child in node))
    if _is_dataclass(node):
        rebuilt = copy.copy(node)
        for f in dataclasses.fields(node):
            object.__setattr__(rebuilt, f.name, _mapped(getattr(node, f.name), change, is_leaf))
        return rebuilt
    if isinstance(node, (list, tuple)):
        return change(node) if _is_plain_list(node) else type(node)(_mapped(child, change, is_leaf) for child in node)
    return node


def _rebuilt(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other items."""
    kind: Any = type(mapping)
    if _is_dataclass(mapping):  # transformers' ModelOutput, whose items may not be updated
        return kind(**items)
    copied: Any = copy.copy(mapping)  # keeps what a subclass holds beside its items (BatchEncoding)
    if isinstance(getattr(copied, "data", None), dict):
        copied.data = items
        return copied
    if isinstance(copied, dict):
        copied.update(items)
        return copied
    return kind(items)


def split(batch: Any, size: int) -> list[tuple[Any, int]]:
    """Return microbatches of at most `size` samples, each with its number of samples.

    Sizes differ by at most one, so that no microbatch of a single sample appears by accident, unless `size` is 2.

    >>> import torch
    >>> [n for _, n in split({"x": torch.zeros(10, 3)}, 4)]
    [4, 3, 3]
    """
    num_samples = batch_size(batch)
    if num_samples == 0:
        return [(batch, 0)]
    sizes = even_sizes(num_samples, size)
    if len(sizes) == 1:
        return [(batch, num_samples)]
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [(take(batch, start, start + n, num_samples), n) for start, n in zip(starts, sizes, strict=True)]


def even_sizes(num_samples: int, size: int) -> list[int]:
    """Return the sizes of as few microbatches of at most `size` samples as possible, the larger ones first.

    >>> even_sizes(10, 4)
    [4, 3, 3]
    """
    num_parts = -(-num_samples // size)
    smallest, larger = divmod(num_samples, num_parts)
    return [smallest + (part < larger) for part in range(num_parts)]
