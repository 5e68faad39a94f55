"""What the store reads of torch: the autograd graph behind a tensor, and storages that it must not keep alive.

The names that are private in torch are listed in `torch_internals/private_names.py`. Where one is missing, no store is
opened, and only what answers below without it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, overload

import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memsave.torch_internals.private_names import find, missing

StorageWeakRef = find("torch.multiprocessing.reductions.StorageWeakRef")
_IS_KNOWN = not missing("autograd")

# Dynamo runs these rooms' functions as they are: the store's hooks are called in the middle of compiled code as well.
for _room in ("saved_tensors", "numerics", "torch_internals") if _IS_KNOWN else ():
    find("torch._dynamo.trace_rules.add")(f"lightning_memsave.{_room}")

Node = torch.autograd.graph.Node


class Edge(NamedTuple):
    """One output of one node: what a tensor is called in the graph."""

    sequence_nr: int
    output_nr: int


def edge_of(tensor: Tensor) -> Edge | None:
    """Return the edge that `tensor` leaves its node by; `None` for a leaf."""
    node = tensor.grad_fn
    return None if node is None else Edge(node._sequence_nr(), tensor.output_nr)


def inputs_of(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """Return the node and output number behind each differentiable input; `(None, 0)` where no gradient flows."""
    return node.next_functions


def output_of(node: Node, output_nr: int) -> Any:
    """Return the shape, dtype and device of an output of `node`."""
    return node._input_metadata[output_nr]  # the inputs of a node's backward are the outputs of its forward


def sequence_nr_of(node: Node) -> int:
    """Return the number of a node: unique among those that one thread made."""
    return node._sequence_nr()


def autograd_is_running() -> bool:
    """Return whether this thread executes a backward pass; never, where torch does not tell."""
    return _IS_KNOWN and torch._C._current_graph_task_id() != -1


def running_node() -> int:
    """Return which node of the graph this thread evaluates; -1 outside of backward."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def running_pass() -> int:
    """Return the number of the backward pass that this thread executes."""
    return torch._C._current_graph_task_id()


def will_run(node: Node) -> bool:
    """Return whether the backward pass that this thread executes has `node` among what it runs, now or before."""
    return torch._C._will_engine_execute_node(node)


def is_asked_for(leaf: Tensor) -> bool:
    """Return whether the backward pass that this thread executes wants the gradient of `leaf`."""
    try:
        return will_run(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:  # torch's answer for leaves whose gradients are returned (`torch.autograd.grad`)
        return True


@overload
def signed(number: int) -> int: ...
@overload
def signed(number: None) -> None: ...
def signed(number: int | None) -> int | None:
    """Return the dimension or index, negative if it counts from the end, that a node shows as an unsigned number."""
    return number - 2**64 if number is not None and number >= 2**63 else number


class Kept:
    """What the store's own pack hook returns."""

    __slots__ = ()

    def get(self) -> Tensor:
        """Return the tensor."""
        raise NotImplementedError


class UnreadableError(Exception):
    """What a node keeps is not to be read: others' hooks keep it (a region), or torch has moved it."""


def saved(node: Node, name: str) -> Any:
    """Return an attribute that a node keeps for its backward.

    Raises:
        UnreadableError: others' hooks keep it, and reading it could run a region's forward again; or this version of
            torch keeps no such attribute.
    """
    packed(node, name)
    try:
        return getattr(node, f"_saved_{name}")
    except AttributeError as error:
        raise UnreadableError(node.name(), name) from error


def saved_values(node: Node, name: str) -> Any:
    """Return the same, tensors without their place in the graph.

    Raises:
        UnreadableError: as `saved`.
    """
    kept = packed(node, name)
    return kept.get() if isinstance(kept, Kept) else saved(node, name)


def packed(node: Node, name: str) -> Kept | Tensor | None:
    """Return what is kept of an attribute: by the store, or by torch itself; `None` where it keeps none.

    Raises:
        UnreadableError: others' hooks keep it, or this version of torch does not tell.
    """
    keeper = getattr(node, f"_raw_saved_{name}", None)
    if isinstance(keeper, (list, tuple)):  # a custom Function's
        (keeper,) = keeper
    if keeper is None:
        return None
    try:
        kept, hook = keeper.data, keeper.unpack_hook
    except AttributeError as error:
        raise UnreadableError(node.name(), name) from error
    if hook is not None and not isinstance(kept, Kept):
        raise UnreadableError(node.name(), name)
    return kept  # type: ignore[no-any-return]  # untyped in torch


def kept_by(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that a node keeps for its backward, as they are kept: nothing is unpacked, no hook runs."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                keepers = getattr(node, name)
                for keeper in keepers if isinstance(keepers, (list, tuple)) else [keepers]:
                    if isinstance(keeper.data, Tensor):
                        yield keeper.data
            except RuntimeError:  # freed by a backward, or nothing was saved
                continue


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


class WeakStorage:
    """A reference to a storage that does not keep it alive."""

    __slots__ = ("_reference",)

    def __init__(self, held: Tensor | torch.UntypedStorage) -> None:
        storage = held.untyped_storage() if isinstance(held, Tensor) else held
        self._reference = StorageWeakRef(storage)

    def __deepcopy__(self, memo: Any) -> WeakStorage:
        return self  # a copy of torch's reference would be freed twice

    def __reduce__(self) -> tuple[Any, ...]:
        """Return nothing held: in another process nobody holds the storage."""
        return _reference_to_nothing, ()

    @property
    def is_alive(self) -> bool:
        """Whether anybody still holds the storage. Its address may be given to another one afterwards."""
        return not self._reference.expired()

    def get(self) -> torch.UntypedStorage | None:
        """Return the storage, or `None` when nobody holds it any more."""
        return torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)


def _reference_to_nothing() -> WeakStorage:
    return WeakStorage(torch.UntypedStorage(0))


def is_held_elsewhere(watched: Tensor) -> bool:
    """Return whether a storage has other owners than the tensor `watched`."""
    storage = watched.untyped_storage()  # an owner as well
    return torch._C._storage_Use_Count(storage._cdata) > 2


# ------------------------------------------------------------------------------- weights
# Nodes that make of weights what is still a weight: views, casts, and the arithmetic of reparametrisations.
def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{overload}" for name in names.split() for overload in (0, 1))


LENT, WIDENED = "_LentBackward", "_WidenedBackward"
"""The nodes of a weight that is lent to a call, and of its stand-in (`lent_weights`)."""
_OF_ONE_WEIGHT = {LENT, WIDENED} | _nodes(
    "T View UnsafeView ReshapeAlias Transpose Permute Expand Alias AsStrided Slice Select Split SplitWithSizes "
    "Squeeze Unsqueeze Unbind Detach Clone ToCopy"
)
_OF_WEIGHTS = _nodes(
    "WeightNormInterface Add Sub Mul Div Cat Stack NativeBatchNorm CudnnBatchNorm NativeLayerNorm "
    "Mean Var VarMean Std Norm LinalgVectorNorm Sqrt Rsqrt Pow"  # weight standardisation and normalisation
)
_PRODUCTS = _nodes("Mm Bmm")  # of weights with each other
DENSIFY = "_DensifyBackward"
"""The node of a sparse weight's dense form (`sparse_weights`)."""
DECODE = "_DecodeInt8Backward"
"""The node of a weight that is kept as int8 codes (`techniques.low_precision`)."""
REBUILT = (DENSIFY, DECODE)
"""Nodes of weights that are made again instead of being kept (`rebuilt_weights`)."""
_MADE_WHOLE = (*REBUILT, "_WeightProductBackward")
"""Nodes of weights that take more bytes than their parameter; the last one's is two factors (`techniques.low_rank`)."""


_MOST_LEVELS = 8  # of nodes between a tensor and the weights that it is made of


def is_made_of_weights(tensor: Tensor) -> bool:
    """Return whether `tensor` is a leaf that requires a gradient, or computed from such leaves alone.

    Casts of autocast, transposes, weight norm, LoRA's merge. An embedding's output depends on parameters only as well,
    but brings in data, so the nodes that may lie between are listed.
    """
    if tensor.is_leaf:
        return tensor.requires_grad
    largest, level = 0, [tensor.grad_fn]
    for _ in range(_MOST_LEVELS):  # level by level: most tensors are found to be data on the first two
        behind: list[Node | None] = []
        for node in level:
            if node is None:
                return False
            if (leaf := getattr(node, "variable", None)) is not None:
                largest = max(largest, leaf.numel())
                continue
            name, inputs = node.name(), inputs_of(node)
            if name in _MADE_WHOLE:
                largest = max(largest, torch.Size(output_of(node, 0).shape).numel())
            elif name in _OF_ONE_WEIGHT:
                behind.append(inputs[0][0])
            else:
                # A missing edge may be a constant; then the result is no larger than the weight, which data would make.
                flowing = [n for n, _ in inputs if n is not None]
                is_known = name in _OF_WEIGHTS or (name in _PRODUCTS and len(flowing) == len(inputs))
                if not (is_known and flowing):
                    return False
                behind += flowing
        if not behind:
            return tensor.numel() <= largest
        level = behind
    return False


def is_operator(function: Any) -> bool:
    """Return whether a function is one of `torch.ops`, whose name alone does not tell its library."""
    return isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def has_hooks(tensor: Tensor) -> bool:
    """Return whether somebody hooked the gradient of a tensor, or asked for it to be retained."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def innermost_hooks() -> tuple[Any, Any]:
    """Return the pack hook that the next saved tensor goes to, and its unpack hook; `None` without any."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (None, None) if hooks is None else (hooks[0], hooks[1])


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transform of torch.func has wrapped a tensor, which then does not say what needs a gradient."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_inside_transform() -> bool:
    """Return whether this thread is inside of a transform of torch.func, or computes forward-mode derivatives."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def refuses_hooks(error: RuntimeError) -> bool:
    """Return whether this is what torch.func's transforms raise inside a scope."""
    return "saved tensor hooks" in str(error) and "torch.func" in str(error)


def compiler_callback() -> Any:
    """Return what Dynamo does with the frames that this thread enters now; `None`: nothing."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback()


@contextmanager
def compiling(callback: Any) -> Iterator[None]:
    """Let Dynamo do what `callback` says with the frames that are entered inside."""
    before = torch._C._dynamo.eval_frame.set_eval_frame(callback)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


def function_modes() -> list[TorchFunctionMode]:
    """Return the function modes that are entered, the outermost first."""
    return [torch._C._get_function_stack_at(depth) for depth in range(torch._C._len_torch_function_stack())]


# ------------------------------------------------------------------------------- in-place changes
def watch(tensor: Tensor) -> Tensor:
    """Return another tensor of the same storage that counts in-place changes together with `tensor`."""
    return tensor.detach()  # is not a view: views hold on to their base


def let_go(watched: Tensor) -> None:
    """Make it drop its bytes; it goes on counting."""
    nothing = _NOTHING.get(watched.dtype) if type(watched) is Tensor and watched.is_cpu else None
    watched.data = watched.new_empty(0) if nothing is None else nothing


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
_NOTHING = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in _DTYPES}
"""Tensors without elements, for the dtypes that are kept most often."""


def watch_again(watched: Tensor, storage: torch.UntypedStorage) -> None:
    """Give it the bytes of a storage back, all of them, flat."""
    size = storage.nbytes() // watched.element_size()
    watched.data = watched.new_empty(0).set_(storage, 0, (size,), (1,))


def unversioned(tensor: Tensor) -> AbstractContextManager[None]:
    """Count no change of `tensor` inside."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]


def unwatched() -> AbstractContextManager[None]:
    """Hide from function modes what is read of tensors inside: for each of them that would take time."""
    return torch._C.DisableTorchFunction()


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was edited in place; 0 for what was made in inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def check_version(watched: Tensor, version: int, shape: tuple[int, ...] | None = None) -> None:
    """Raise what autograd raises for a saved tensor that was changed in place; hooks switch its own check off.

    Args:
        watched: the tensor, or another one of its storage.
        version: the one that it had.
        shape: of the tensor, if `watched` is another one.

    Raises:
        RuntimeError: it has another one now.
    """
    if (now := version_of(watched)) != version:
        shape = shape or (() if watched.is_nested else watched.shape)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{watched.type()} {list(shape)}] is at version {now}; expected version {version} instead."
        )


Values = Callable[[], Tensor]
