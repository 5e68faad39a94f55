"""What compiled code needs of a tensor that it keeps for backward: `policy`'s table, asked with nodes of the graph.

The compiler traces forward and backward together and notes, for each node of the backward, the Python function or the
torch module of the forward whose gradient it computes (`fwd_source_fn_stack`). So the table by function names that
eager code is asked with holds here as well. A node without such a note, and a function that is not in the table, need
every bit.

One thing is new. The compiler may compute a tensor again in backward from others that it keeps, and noise then goes
through what is computed: unharmed through additions, products and normalisations (`_PASSES`), not through an
activation, nor into a sign. The output of an activation is therefore kept itself (`must_be_kept`), as eager code
keeps it, and so is what a ReLU's backward reads the sign of: in one bit, where nobody reads more.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_memsave.saved_tensors import policy
from lightning_memsave.saved_tensors.code_rows import SMALLEST_PIECE
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.torch_internals.autograd_graph import is_operator


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _names("view _unsafe_view permute t transpose squeeze unsqueeze expand alias slice select reshape detach")
"""Operations whose result shares the memory of their first argument, whatever its strides are."""

_PASSES = VIEWS | _names(
    """
    add sub rsub neg mul div clone _to_copy convert_element_type lift_fresh_copy native_dropout
    native_layer_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _batch_norm_with_update native_group_norm _fused_rms_norm rms_norm
    """
)
"""Operations of a forward that are linear in what may be noisy: repeated in backward, they pass its noise on as it is.

Of a quotient that is the numerator alone; normalisations are as `policy.NONLINEAR` has them."""

_ACTIVATIONS = _names("relu leaky_relu gelu silu mish elu softplus hardswish glu")
"""Functions of the policy's table that compute each element by itself."""

_OF_MODULES = _names(
    """
    mm addmm bmm baddbmm convolution_backward native_layer_norm_backward native_batch_norm_backward batch_norm_backward
    cudnn_batch_norm_backward native_group_norm_backward _fused_rms_norm_backward gelu_backward silu_backward
    mish_backward elu_backward softplus_backward hardswish_backward glu_backward threshold_backward leaky_relu_backward
    _prelu_kernel_backward
    """
)
"""Operations of the backward passes of torch's modules, taken apart or not."""

_SIGNS = policy.SIGN_ONLY | policy.KEEPS_SIGN
"""Functions whose backward compares something with zero: with itself or its code, not with what noise has gone into."""

_SENSITIVE = _names(
    """
    _softmax _log_softmax _safe_softmax tanh sigmoid log_sigmoid exp exp2 expm1 sqrt rsqrt reciprocal erf logsumexp log
    log2 log1p pow sin cos cumsum cumprod norm linalg_vector_norm var var_mean std std_mean
    """
)
"""Operations whose results stay exact, as those of `policy.SENSITIVE` do."""

_SPELLINGS = {name.replace("_", ""): name for name in sorted(policy.LOSSY | _ACTIVATIONS, key=len, reverse=True)}


def name_of(function: Any) -> str:
    """Return what the policy calls a function, or a module of torch's.

    >>> [name_of(f) for f in (torch.nn.LayerNorm, torch.nn.Conv2d, torch.nn.GELU, torch.nn.functional.linear)]
    ['layer_norm', 'conv2d', 'gelu', 'linear']
    """
    if is_operator(function):
        return str(function)  # with its library: not torch's of that name
    name: str = getattr(function, "__name__", str(function))
    plain = name.lower().replace("_", "")
    return _SPELLINGS.get(plain) or _SPELLINGS.get(plain.rstrip("123").removesuffix("d").rstrip("123"), name)


def operation_of(node: fx.Node) -> str:
    """Return the name of the ATen operation that a node is a part of; of one that was taken apart, what it was."""
    return _name(node.meta.get("original_aten") or node.target)


def _target_name(node: fx.Node) -> str:
    return _name(node.target)


def _name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result shares the memory of its first argument."""
    is_aten = getattr(node.target, "namespace", "") == "aten" and getattr(node.target, "_overloadname", "") != "dtype"
    return node.op == "call_function" and is_aten and _target_name(node) in VIEWS


def is_reshape(node: fx.Node) -> bool:
    """Return whether a view depends on the order in which the elements lie."""
    return is_view(node) and _target_name(node) in ("view", "_unsafe_view", "reshape")


def is_backward(node: fx.Node) -> bool:
    """Return whether a node computes a gradient; what backward computes again of the forward does not."""
    is_marked = "autograd_backward" in node.meta or "backward" in str(node.meta.get("partitioner_tag"))  # up to 2.10
    return is_marked and "source_fn_stack" not in node.meta


class Need(NamedTuple):
    """What backward needs of a tensor."""

    fidelity: Fidelity
    keeps_sign: bool = False
    """Whether a code must keep signs."""
    row: int = 0
    """Elements, one after the other, that a normalisation treats together, in which a code's rows have to end; or 0."""


_EXACT = Need(Fidelity.EXACT)


class GraphPolicy:
    """What the nodes of one backward graph need.

    Args:
        backward: the graph, which may hold the forward as well.
        lossy: what is enough where noise is allowed.
        overrides: fidelities by the name of a function.
        within: returns the fidelity that was set for a module of the compiled region, by its name there; or `None`.
    """

    def __init__(
        self,
        backward: fx.Graph,
        lossy: Fidelity,
        overrides: Mapping[str, Fidelity],
        within: Callable[[str], Fidelity | None],
    ) -> None:
        self._lossy, self._overrides, self._within = lossy, overrides, within
        self.gradients: set[fx.Node] = set()
        """What depends on gradients of the results."""
        for node in backward.nodes:
            is_given = node.op == "placeholder" and "tangents" in str(node.target)
            if is_given or not self.gradients.isdisjoint(node.all_input_nodes):
                self.gradients.add(node)

    def need(self, node: fx.Node, is_derivative: bool = False) -> Need:
        """Return what backward needs of a tensor.

        Args:
            node: in the backward graph, which stands for what was kept.
            is_derivative: whether it is the derivative of an activation.
        """
        found = Need(Fidelity.SHAPE)
        for reader in self._readers(node):
            name = "square" if _is_of_square(reader.node) else function_of(reader.node)
            is_sign = name in _SIGNS and not reader.reads_it_itself  # it reads something that is made of it
            if reader.through not in ("", name) or is_sign or not self._is_as_it_seems(reader.node, name):
                return _EXACT
            row = _row_of_norm(name, reader)
            if row is None or (row and found.row and row != found.row):
                return _EXACT
            needed = Fidelity.MASK if name in policy.SIGN_ONLY else self.need_of(reader.node, name, is_derivative)
            keeps_sign = found.keeps_sign or name in policy.KEEPS_SIGN
            found = Need(max(found.fidelity, needed), keeps_sign, row or found.row)
        return found

    def _is_as_it_seems(self, reader: fx.Node, name: str) -> bool:
        """Return whether a node is what the derivative of that function is made of.

        A hook on a module, and the backward of a custom Function, compute something else under its name.
        """
        if not is_backward(reader) or (_is_of_module(reader) and operation_of(reader) not in _OF_MODULES):
            return False
        if name not in policy.LINEAR or name in _SIGNS:
            return True
        if name == "square":
            return _is_of_square(reader)
        return not self.gradients.isdisjoint(reader.all_input_nodes)  # a product with a gradient

    def _readers(self, node: fx.Node) -> Iterator[_Reader]:
        """Yield who reads a tensor, or what is made of it again."""
        waiting, made = [_Reader(node, node, "", True, True)], {node}
        seen: set[tuple[fx.Node, str]] = set()
        while waiting:
            source = waiting.pop()
            for user in source.node.users:
                if (user, source.through) in seen:
                    continue
                seen.add((user, source.through))
                name, same = function_of(user), source._replace(node=user, source=source.node)
                if is_view(user):
                    waiting.append(same._replace(is_in_order=source.is_in_order and _keeps_order(user)))
                elif is_backward(user) or user.op == "output":
                    yield same
                elif name in _ACTIVATIONS and source.through in ("", name):
                    waiting.append(same._replace(through=name, reads_it_itself=False))
                elif self._is_linear(user, source.node, made):
                    waiting.append(same._replace(reads_it_itself=False))
                else:
                    yield same  # which is no derivative
                made.add(user)

    def _is_linear(self, user: fx.Node, source: fx.Node, made: set[fx.Node]) -> bool:
        """Return whether a node that is computed again in backward is linear in `source`.

        Args:
            user: reads `source`.
            source: is noisy.
            made: what is made of the same tensor, `source` among it.
        """
        if user.target is operator.getitem:
            return True
        operation = operation_of(user)
        if operation not in _PASSES or not is_floating(user) or _target_name(user) in _SENSITIVE:
            return False
        if operation == "div":
            return user.args[0] is source and len(made & set(user.all_input_nodes)) == 1 and not user.kwargs
        if operation == "mul":
            return user.args.count(source) == 1 and len(made & set(user.all_input_nodes)) == 1
        return True

    def need_of(self, reader: fx.Node, name: str, is_derivative: bool) -> Fidelity:
        """Return what one reader needs, which computes the gradient of the function `name`."""
        if (override := self._overrides.get(name)) is not None:
            return override
        if name not in policy.LOSSY:
            return Fidelity.EXACT
        set_for = (self._within(path) for path in reversed(_modules_of(reader)))
        lossy = next((fidelity for fidelity in set_for if fidelity is not None), self._lossy)
        if name in policy.NEEDS_8_BITS:
            return max(lossy, _least_for_exponents(reader))
        # The derivative is bounded. Of the input, 4 bits would be biased: an outlier in its row makes its noise large.
        return max(lossy, Fidelity.INT8) if name in _ACTIVATIONS - _SIGNS and not is_derivative else lossy


class _Reader(NamedTuple):
    """A node that reads a tensor."""

    node: fx.Node
    source: fx.Node
    """The tensor that it reads: what was kept, a view of it, or what is made of it again."""
    through: str
    """The activation that lies between."""
    reads_it_itself: bool
    is_in_order: bool
    """Whether elements that lie together in `source` do so in the tensor."""


def _row_of_norm(name: str, reader: _Reader) -> int | None:
    """Return the elements that a normalisation treats together, 0 for any other function; `None` if codes do not suit.

    Of the batch's statistics, those of one sample and channel. Rows below 16 elements, and features without a
    dimension besides channels, would share a code's range with others, whose noise may be much larger.
    """
    if name not in policy.NORMALISES:
        return 0
    shape = reader.source.meta["val"].shape
    sizes = shape[-1:] if name in ("layer_norm", "rms_norm") else shape[2:]
    if not reader.is_in_order or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    row = math.prod(sizes)
    return row if row >= SMALLEST_PIECE else None


def _is_of_square(node: fx.Node) -> bool:
    """Return whether a node is x ** 1, of which the derivative of a square is made: of `square`, or of a power of 2."""
    is_power = function_of(node) in policy.POWERS | {"square"} and _target_name(node) == "pow"
    return is_power and is_backward(node) and bool(node.args[1] == 1)


def _keeps_order(view: fx.Node) -> bool:
    return _target_name(view) in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "detach")


def activations_in(joint: fx.Graph, num_results: int, static: Collection[int]) -> set[str]:
    """Return the names of what carries a gradient and is made of more than weights.

    Masks, positions and frozen features carry none; casts and products of weights are the same for all samples.

    Args:
        joint: the graph of forward and backward.
        num_results: how many of its outputs are the forward's.
        static: which of the inputs are parameters and buffers.
    """
    (output,) = (node for node in joint.nodes if node.op == "output")
    inputs = [node for node in joint.nodes if node.op == "placeholder" and "tangents" not in str(node.target)]
    outputs: Any = output.args[0]
    trained = {node for node, gradient in zip(inputs, outputs[num_results:], strict=False) if gradient is not None}
    data = {node for number, node in enumerate(inputs) if number not in static}
    for node in joint.nodes:
        for found in (trained, data):
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
    return {node.name for node in trained & data}


def must_be_kept(joint: fx.Graph) -> set[fx.Node]:
    """Return the nodes that are kept themselves, as no code is enough to compute them again from.

    That is what backward reads of an activation's output, or of what additions, products and normalisations make of
    it; what it reads the signs of; and sums, which would get the noise of all that is added up. (Inductor would also
    hold everything that is added up along a residual stream until its end.)
    """
    kept = {node for node in joint.nodes if _is_read_and_no_code_is_enough(node)}
    signs = (node for node in joint.nodes if is_backward(node) and function_of(node) in _SIGNS and _is_mask(node))
    return kept | {source for node in signs for source in node.all_input_nodes if not is_backward(source)}


def images(graph: fx.Graph) -> set[fx.Node]:
    """Return what convolutions make, and what is computed from it in the same dimensions."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(value := node.meta.get("val"), Tensor) or is_view(node):
            continue
        like = [each for each in node.all_input_nodes if each in found and each.meta["val"].dim() == value.dim()]
        if value.dim() in (4, 5) and (like or _target_name(node) == "convolution"):
            found.add(node)
    return found


def _is_read_and_no_code_is_enough(node: fx.Node) -> bool:
    if node.op != "call_function" or is_backward(node) or is_view(node) or not is_floating(node):
        return False
    if operation_of(node) == "add" and len(node.all_input_nodes) > 1:
        return True
    own = function_of(node)
    readers = {function_of(user) for user in _through_views(node) if is_backward(user)}
    if not readers - ({own} & _ACTIVATIONS):
        return False
    waiting, seen = [node], set()
    while waiting:
        source = waiting.pop()
        if source in seen or source.op != "call_function":
            continue
        seen.add(source)
        if function_of(source) in _ACTIVATIONS:
            return True
        if source.target is operator.getitem or operation_of(source) in _PASSES:
            waiting.extend(source.all_input_nodes)
    return False


def _least_for_exponents(reader: fx.Node) -> Fidelity:
    """Return 16 bits where scores are scaled by more than 1 / sqrt(width), as `policy` has it for eager attention."""
    scale = reader.kwargs.get("scale")
    if scale is None:
        return Fidelity.INT8
    heads = [each.meta["val"] for each in reader.all_input_nodes if each.meta["val"].dim() == 4]
    width = max((value.shape[-1] for value in heads), default=math.inf)
    is_bounded = isinstance(scale, float) and scale * width**0.5 <= policy.SHARPEST_SCALE
    return Fidelity.INT8 if is_bounded else Fidelity.BF16


def is_sensitive(node: fx.Node) -> bool:
    """Return whether a tensor of the forward appears in its own derivative, or is a statistic."""
    if node.target is operator.getitem:
        producer, index = node.args
        assert isinstance(producer, fx.Node)
        is_part = _target_name(producer).startswith(("split", "chunk", "unbind"))
        return is_sensitive(producer) or (not is_part and bool(index != 0))
    return not {operation_of(node), _target_name(node)}.isdisjoint(_SENSITIVE)


def function_of(node: fx.Node) -> str:
    """Return the function of the forward that a node belongs to, or computes the gradient of; `""` if unknown."""
    stack = node.meta.get("fwd_source_fn_stack" if is_backward(node) else "source_fn_stack")
    return name_of(stack[-1][1]) if stack else ""


def _is_of_module(node: fx.Node) -> bool:
    stack = node.meta.get("fwd_source_fn_stack")
    return stack is not None and isinstance(stack[-1][1], type)


def _modules_of(node: fx.Node) -> list[str]:
    """Return the modules in which a node was called, the innermost last, by their names in what is compiled.

    The compiler writes `L['self'].blocks.0.norm`, or `L['self']._modules['blocks']._modules['0'].norm`.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [_ITEM.sub(r".\1", path.partition("]")[2]).lstrip(".") for path, _ in stack.values()]


_ITEM = re.compile(r"(?:\._modules)?\['([^']*)'\]")


def is_floating(node: fx.Node) -> bool:
    """Return whether a node makes a tensor of floating point."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and bool(value.dtype.is_floating_point)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and bool(value.dtype == torch.bool)


def _through_views(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_view(user):
            yield from _through_views(user)
        else:
            yield user
