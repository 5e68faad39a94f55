"""Codes in compiled code: what `torch.compile` keeps for backward is coded where it is kept.

The compiler's own partitioner decides what is kept and what is computed again. Then each activation among what is kept
is replaced by its code (`compiled_operators`), if everybody who reads it in backward bears the noise
(`compiled_policy`): the forward codes it behind its last use, and the backward decodes it right before its first. In
front of the whole backward, decoded tensors would all be there at once: that is what hooks outside of compiled code
come to, as autograd hands all that was kept to it together.

| what is kept                                                     | becomes                                |
|------------------------------------------------------------------|----------------------------------------|
| floating point, read by functions of the policy's table          | codes of 8, 4 or 2 bits, or bfloat16   |
| the derivative of GELU, SiLU or Mish, in place of its input (`compiled_derivatives`) | codes of 4 or 2 bits |
| several views of one tensor                                      | one code of that tensor, where smaller |
| a boolean mask; a tensor of which backward reads the signs       | one bit per element; exact             |
| inputs and parameters, results, statistics, what is small, integers, what other functions read | as it was |

What one piece of compiled code takes from another (between blocks that are compiled one by one, or around a graph
break) is an input, and kept as it is. Sizes may be dynamic where each row of a tensor has a fixed length.
"""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_memsave.saved_tensors import compiled_derivatives, compiled_policy
from lightning_memsave.saved_tensors import compiled_operators as operators
from lightning_memsave.saved_tensors.code_rows import SMALLEST_ROW
from lightning_memsave.saved_tensors.compiled_derivatives import is_derivative, move_derivatives
from lightning_memsave.saved_tensors.compiled_policy import (
    GraphPolicy,
    Need,
    activations_in,
    function_of,
    images,
    is_backward,
    is_floating,
    is_reshape,
    is_sensitive,
    is_view,
    must_be_kept,
)
from lightning_memsave.saved_tensors.encodings import BITS, Fidelity
from lightning_memsave.torch_internals.partitioning import KeptNodes, Partitioner, min_cut, puts_channels_last


class Settings(NamedTuple):
    """What codes in compiled code follow from."""

    lossy: Fidelity
    """What is enough where noise is allowed."""
    overrides: Mapping[str, Fidelity]
    """Fidelities by the name of a function."""
    modules: Mapping[str, Fidelity]
    """Fidelities by a pattern of modules' names or classes."""
    min_numel: int
    """Tensors with fewer elements are left alone."""


class CodePartitioner(Partitioner):  # type: ignore[misc]  # a base known at run time
    """Divides a joint graph as torch does, and codes what is kept.

    Args:
        settings: what codes follow from.
        within: returns the fidelity that was set for a module of what is being compiled, by its name there; or `None`.
        place: returns the name of what is being compiled.
    """

    def __init__(self, settings: Settings, within: Callable[[str], Fidelity | None], place: Callable[[], str]) -> None:
        self._settings, self._within, self._place = settings, within, place

    def __deepcopy__(self, memo: object) -> CodePartitioner:  # Inductor copies its settings
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # and pickles them, to tell compiled code apart
        return _hash, (repr(self._settings),)

    def uuid(self) -> str:
        """Return what Inductor's caches tell partitioners apart by."""
        return _hash(repr((self._settings, self._place() if self._settings.modules else "")))

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return forward and backward."""
        if any(node.meta.get("recompute") is not None for node in gm.graph.nodes):
            return min_cut(gm, joint_inputs, **options)  # there are checkpoints inside, which say what is kept
        if (static := options.get("static_lifetime_input_indices")) is None:
            return min_cut(gm, joint_inputs, **options)  # nobody says what is a weight
        num_results: int = options["num_fwd_outputs"]
        names = activations_in(gm.graph, num_results, static)
        derivatives = self._move_derivatives(gm.graph, names)
        names |= {node.name for node in derivatives}
        for node in (*must_be_kept(gm.graph), *derivatives):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in gm.graph.nodes:
            if is_backward(node) and is_floating(node):
                node.meta["partitioner_tag"] = "must_be_in_backward"
        forward, backward = min_cut(gm, joint_inputs, derivatives, **options)
        kept = KeptNodes(forward, backward, num_results)
        channels_last = images(forward.graph) if puts_channels_last(gm) else set()
        policy, min_numel = self._policy(backward.graph), self._settings.min_numel
        _Coder(forward.graph, backward.graph, kept, policy, min_numel, channels_last).code(names)
        kept.finish()
        return forward, backward

    def _policy(self, graph: fx.Graph) -> GraphPolicy:
        return GraphPolicy(graph, self._settings.lossy, self._settings.overrides, self._within)

    def _move_derivatives(self, joint: fx.Graph, names: Collection[str]) -> list[fx.Node]:
        """Move derivatives that will be coded: not those of weights alone."""
        policy = self._policy(joint)

        def is_wanted(reader: fx.Node, derivative: Tensor, sources: set[fx.Node]) -> bool:
            if _is_small(derivative, self._settings.min_numel) or not any(node.name in names for node in sources):
                return False
            return policy.need_of(reader, function_of(reader), is_derivative=True) < Fidelity.INT8

        return move_derivatives(joint, policy.gradients, is_wanted)


def _hash(settings: str) -> str:
    files = (operators.__file__, compiled_policy.__file__, compiled_derivatives.__file__, __file__)
    return hashlib.sha256(b"".join([settings.encode(), *(Path(path).read_bytes() for path in files)])).hexdigest()


class _Kept(NamedTuple):
    """A tensor that is to be coded."""

    place: int
    node: fx.Node
    """Its node in the forward."""
    input: fx.Node
    """Its input of the backward."""
    views: tuple[fx.Node, ...]
    """Views of its root that lead to it, in the forward."""
    need: Need


class _Coded(NamedTuple):
    """A tensor that has been coded."""

    kept: tuple[fx.Node, ...]
    """What the forward keeps of it."""
    decoder: Any
    arguments: tuple[Any, ...]
    """Arguments of the decoder, behind what is kept."""


class _Coder:
    """Replaces what is kept by codes.

    Args:
        forward: is changed.
        backward: is changed.
        kept: what lies between the two.
        policy: what backward needs.
        min_numel: tensors with fewer elements are left alone.
        channels_last: nodes of the forward whose channels will lie last in memory.
    """

    def __init__(
        self,
        forward: fx.Graph,
        backward: fx.Graph,
        kept: KeptNodes,
        policy: GraphPolicy,
        min_numel: int,
        channels_last: set[fx.Node],
    ) -> None:
        self._forward, self._backward, self._kept, self._policy = forward, backward, kept, policy
        self._min_numel, self._channels_last, self._num_coded = min_numel, channels_last, 0
        self._order = {node: number for graph in (forward, backward) for number, node in enumerate(graph.nodes)}

    def code(self, names: Collection[str]) -> None:
        """Code what may be coded, of the nodes of these names."""
        by_root: defaultdict[fx.Node, list[_Kept]] = defaultdict(list)
        returned = {_root(node)[0] for node in self._kept.results}
        for place, node, its_input in list(self._kept.pairs()):
            root, views = _root(node)
            if any(map(is_reshape, (*views, *_users_through_views(its_input, with_views=True)))):
                self._channels_last -= {root, node}  # it needs the order that it was traced in
            if root.op == "placeholder" or root in returned:
                continue
            if _value(node).dtype == torch.bool:
                self._pack(place, node, its_input)
            elif root.name in names and self._is_activation(node) and not is_sensitive(root):
                need = self._policy.need(its_input, is_derivative(node))
                if Fidelity.SHAPE < need.fidelity < Fidelity.EXACT:
                    by_root[root].append(_Kept(place, node, its_input, views, need))
        for root, group in by_root.items():
            if not (self._is_less_together(root, group) and self._code_together(root, group)):
                for each in group:
                    self._code_alone(each)

    def _is_activation(self, node: fx.Node) -> bool:
        value = _value(node)
        is_strided = value.layout is torch.strided
        return value.dtype.is_floating_point and is_strided and not _is_small(value, self._min_numel)

    # ------------------------------------------------------------------------------------------ what is kept instead
    def _pack(self, place: int, mask: fx.Node, its_input: fx.Node) -> None:
        layout, layout_behind = self._layouts(mask)
        if layout is not None and layout_behind is not None:
            packed = self._call(operators.pack_mask, (mask, layout[1]), self._behind([mask]))
            (kept,) = self._kept.replace(place, (packed,))
            self._decode(its_input, operators.unpack_mask, (kept, *layout_behind))

    def _code_alone(self, each: _Kept) -> None:
        if (coded := self._coded(each.node, each.need, [each.node])) is not None:
            kept = self._kept.replace(each.place, coded.kept)
            self._decode(each.input, coded.decoder, (*kept, *coded.arguments))

    def _is_less_together(self, root: fx.Node, group: list[_Kept]) -> bool:
        """Return whether all of a tensor has fewer elements than these views of it."""
        sizes = [_value(root).numel(), *(_value(each.node).numel() for each in group)]
        is_fixed = all(isinstance(size, int) for size in sizes)
        takes_root_alone = all(view.all_input_nodes == [view.args[0]] for each in group for view in each.views)
        are_free = not any(each.need.row for each in group)
        return len(group) > 1 and takes_root_alone and are_free and is_fixed and sizes[0] <= sum(sizes[1:])

    def _code_together(self, root: fx.Node, group: list[_Kept]) -> bool:
        need = Need(max(each.need.fidelity for each in group), any(each.need.keeps_sign for each in group))
        coded = self._coded(root, need, [each.node for each in group])
        if coded is None:
            return False
        kept = self._kept.replace(group[0].place, coded.kept)
        for each in group[1:]:
            self._kept.drop(each.place)
        decoded: dict[fx.Node, fx.Node] = {}  # by who reads it first
        for each in group:
            views, reader = self._first_reader(each.input)
            if reader not in decoded:
                decoded[reader] = self._call(coded.decoder, (*kept, *coded.arguments), before=reader)
            result = decoded[reader]
            for view in each.views:
                with self._backward.inserting_before(reader):
                    result = self._backward.node_copy(view, {view.args[0]: result}.__getitem__)
                result.meta = {**view.meta, **_OF_BACKWARD}
            self._swap(each.input, result, views, reader)
        return True

    def _coded(self, node: fx.Node, need: Need, used: Sequence[fx.Node]) -> _Coded | None:
        """Code a node of the forward behind the last use of `used`; `None` where that cannot be done."""
        value, fidelity = _value(node), need.fidelity
        if need.row:  # which lies in the order of a contiguous tensor
            self._channels_last.discard(node)
        layout, layout_behind = self._layouts(node)
        if layout is None or layout_behind is None:
            return None
        if fidelity is Fidelity.MASK:
            signs = self._call(operators.pack_positive, (node, layout[1]), self._behind([node, *used]))
            return _Coded((signs,), operators.unpack_positive, (*layout_behind, value.dtype))
        self._num_coded += 1
        if fidelity is Fidelity.BF16:
            if value.element_size() <= 2:
                return None
            rounded = self._call(
                operators.round_to_bfloat16, (node, self._num_coded, layout[1]), self._behind([node, *used])
            )
            return _Coded((rounded,), torch.ops.prims.convert_element_type.default, (value.dtype,))
        strides = self._strides(node)
        row = need.row if need.row and strides == _contiguous(value.shape) else _row(value.shape, strides)
        if row is None or (need.row and row != need.row):
            return None
        how = BITS[fidelity], need.keeps_sign, row
        both = self._call(operators.encode, (node, self._num_coded, *how, layout[1]), self._behind([node, *used]))
        kept = tuple(self._call(operator.getitem, (both, number), both.next) for number in (1, 0))[::-1]
        return _Coded(kept, operators.decode, (*how, *layout_behind, value.dtype))

    def _behind(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """Return the node of the forward in front of which none of these, or of their views, is used any more."""
        users = [user for node in nodes for user in (node, *_users_through_views(node)) if user.op != "output"]
        return max((user for user in users if user in self._order), key=self._order.__getitem__).next

    # -------------------------------------------------------------------------------------------- and the way back
    def _decode(self, its_input: fx.Node, decoder: Any, arguments: tuple[Any, ...]) -> None:
        views, reader = self._first_reader(its_input)
        self._swap(its_input, self._call(decoder, arguments, before=reader), views, reader)

    def _first_reader(self, its_input: fx.Node) -> tuple[list[fx.Node], fx.Node]:
        """Return the views of an input of the backward, and who is the first to read it or one of them."""
        users = sorted(_users_through_views(its_input, with_views=True), key=self._order.__getitem__)
        return [user for user in users if is_view(user)], next(user for user in users if not is_view(user))

    def _swap(self, its_input: fx.Node, result: fx.Node, views: list[fx.Node], reader: fx.Node) -> None:
        """Let everybody read `result`, which is made in front of the first `reader`."""
        for view in views:
            if self._order[view] < self._order[reader]:
                reader.prepend(view)
        its_input.replace_all_uses_with(result)
        self._backward.erase_node(its_input)

    def _call(self, target: Any, arguments: tuple[Any, ...], before: fx.Node) -> fx.Node:
        with before.graph.inserting_before(before):
            node = before.graph.call_function(target, arguments)
        node.meta["val"] = target(*fx.node.map_arg(arguments, lambda each: each.meta["val"]))
        if before.graph is self._backward:
            node.meta.update(_OF_BACKWARD)
        return node

    def _strides(self, node: fx.Node) -> list[Any]:
        value = _value(node)
        if node in self._channels_last:
            return _strides_in_order(value.shape, [1, *range(value.dim() - 1, 1, -1), 0])
        return _dense_strides(value)

    def _layouts(self, node: fx.Node) -> tuple[tuple[list[Any], list[Any]] | None, tuple[list[Any], list[Any]] | None]:
        """Return sizes and strides of a code's elements, as arguments in the forward and in the backward."""
        size, stride = list(_value(node).shape), self._strides(node)
        found = []
        for graph in (self._forward, self._backward):
            numbers = [_argument(graph, number) for number in (*size, *stride)]
            is_known = None not in numbers
            found.append((numbers[: len(size)], numbers[len(size) :]) if is_known else None)
        return found[0], found[1]


_OF_BACKWARD = {"autograd_backward": True}


def _is_small(value: Tensor, min_numel: int) -> bool:
    return isinstance(value.numel(), int) and value.numel() < min_numel


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _root(node: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Return what a node is a view of, and the views between the two in order."""
    views: list[fx.Node] = []
    while is_view(node):
        views.append(node)
        (node,) = node.args[:1]  # type: ignore[assignment]  # a view's first argument is a node
    return node, tuple(reversed(views))


def _users_through_views(node: fx.Node, with_views: bool = False) -> Iterator[fx.Node]:
    for user in node.users:
        if not is_view(user) or with_views:
            yield user
        if is_view(user):
            yield from _users_through_views(user, with_views)


def _dense_strides(value: Tensor) -> list[Any]:
    """Return the strides of a tensor; contiguous ones where it has gaps, or elements that share memory."""
    order = sorted(range(value.dim()), key=lambda dim: (_hint(value.stride(dim)), _hint(value.shape[dim])))
    dense = _strides_in_order(value.shape, order)
    dims = zip(value.shape, value.stride(), dense, strict=True)
    if all(_is_one(size) or str(stride) == str(other) for size, stride, other in dims):
        return list(value.stride())
    return _contiguous(value.shape)


def _contiguous(shape: Sequence[Any]) -> list[Any]:
    return _strides_in_order(shape, range(len(shape) - 1, -1, -1))


def _hint(number: Any) -> int:
    return number if isinstance(number, int) else int(number.node.hint or 0)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _strides_in_order(shape: Sequence[Any], dims: Iterable[int]) -> list[Any]:
    """Return the strides of a tensor without gaps, whose dimensions lie in this order, the innermost first."""
    strides, run = list(shape), 1
    for dim in dims:
        strides[dim], run = run, run * shape[dim]
    return strides


def _row(shape: Sequence[Any], strides: Sequence[Any]) -> int | None:
    """Return the elements of a row, as `code_rows.rows_in_memory` has it; `None` where it is not fixed.

    A row never spans the outermost dimension, the batch: whatever its size is, noise is the same.
    """
    run, dims = 1, [dim for dim in zip(shape, strides, strict=True) if not _is_one(dim[0])]
    while dims and run < SMALLEST_ROW and (len(dims) > 1 or run == 1):
        inner = next((dim for dim in dims if isinstance(dim[1], int) and dim[1] == run), None)
        if inner is None or not isinstance(inner[0], int):
            return None
        dims.remove(inner)
        run *= inner[0]
    return run


def _argument(graph: fx.Graph, number: Any) -> Any:
    """Return a size as an argument in `graph`: itself, or a node that computes it; `None` where nothing does."""
    if isinstance(number, int):
        return number
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    symbols = {node.meta["val"].node.expr: node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)}
    return _expression(graph, number.node.expr, symbols, inputs[-1].next)


def _expression(graph: fx.Graph, expression: Any, symbols: Mapping[Any, fx.Node], before: fx.Node) -> Any:
    if expression in symbols:
        return symbols[expression]
    if expression.is_Integer:
        return int(expression)
    function = operator.mul if expression.is_Mul else operator.add if expression.is_Add else None
    parts = [_expression(graph, part, symbols, before) for part in expression.args]
    if function is None or None in parts:
        return None
    result = parts[0]
    for part in parts[1:]:
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in (result, part)]
        with graph.inserting_before(before):
            result = graph.call_function(function, (result, part))
        result.meta["val"] = function(*values)
    return result
