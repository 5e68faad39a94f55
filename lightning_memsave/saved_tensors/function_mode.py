"""Function mode that tells the store which function keeps a tensor, and what the graph leaves out."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memsave.saved_tensors.call_site import NO_CALL, Call
from lightning_memsave.saved_tensors.code_rows import covers_its_storage
from lightning_memsave.saved_tensors.deferred_logits import (
    DeferredLogits,
    as_read,
    calls_in,
    deferred,
    holds_pending,
    is_shown,
    read_before_change,
    read_before_edit,
    refuse_gradient,
)
from lightning_memsave.saved_tensors.encodings import Fidelity, WindowIndex
from lightning_memsave.saved_tensors.norm_recompute import Statistics, statistics_of
from lightning_memsave.saved_tensors.recompute_rules import Norm
from lightning_memsave.saved_tensors.tied_embedding import Lookup
from lightning_memsave.torch_internals.autograd_graph import (
    Edge,
    Node,
    edge_of,
    function_modes,
    is_operator,
    is_wrapped,
    sequence_nr_of,
    storage_key,
    version_of,
)
from lightning_memsave.torch_internals.fake_tensors import is_plain


class CallContext(NamedTuple):
    """What the store knows of the modules that are running."""

    within: tuple[Fidelity, ...]
    """Fidelities that their codecs ask for."""
    unseen_as: str | None
    """What their calls are taken for, where they are not looked at."""


Seen = tuple[tuple[int, int] | None, ...]
"""Storage and version of each parameter of a call."""


def seen(*parameters: Tensor | None) -> Seen:
    """Return storage and version of parameters, as they are now."""
    return tuple(None if p is None else (storage_key(p), version_of(p)) for p in parameters)


class LinearInput(NamedTuple):
    """Input of the last `F.linear` call (possible LM head): by the time of the loss a store may have coded it."""

    node_nr: int
    """Number of the result's node."""
    tensor: Tensor
    """[..., D]."""
    version: int
    node: Node | None
    """The node that the input had then; `None` for a leaf."""

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has changed it in place."""
        return version_of(self.tensor) == self.version and self.tensor.grad_fn is self.node


class CallTracker(TorchFunctionMode):
    """Follows the calls of torch's functions inside a scope.

    Args:
        answer: asked before each call of `linear`, `cross_entropy`, `nll_loss` or `dropout`; what it returns, unless
            `None`, is the result.
        before_edit: told of a tensor before a call edits it in place.
        notes_heads: whether linears and embeddings are noted.
    """

    def __init__(
        self,
        answer: Callable[[Call], Tensor | None],
        before_edit: Callable[[Tensor], None],
        notes_heads: bool = False,
    ) -> None:
        super().__init__()
        self._before_edit = weakref.WeakMethod(before_edit)
        self._notes_heads = notes_heads
        self._answer = weakref.WeakMethod(answer)  # whoever answers owns this object
        self.current = NO_CALL
        """The outermost function that is running."""
        self.unseen_as: str | None = None
        """What calls are taken for that are not looked at now."""
        self.edited: set[int] = set()
        """The storages that the running call edits."""
        self.operands: dict[int, Any] = {}
        """What a recomputation needs and no node keeps, by the number of the node."""
        self.linears: dict[int, Seen] = {}
        """Weight and bias of each `F.linear` call as they were, by the number of the result's node."""
        self.latest_input: LinearInput | None = None
        self.statistics: dict[int, Statistics | None] = {}
        """Statistics of normalisations, by the number of the call, when it has returned."""
        self.notes_statistics = False
        """Whether somebody needs those of the call that is running."""
        self._num_calls = 0
        self._lookups: dict[int, Lookup] = {}  # the latest one of each table, by its id
        self._changed: set[Edge] = set()
        self._hooked: set[Edge] = set()
        self._versions: dict[int, int] = {}

    def has_changed(self, node: Node, output_nr: int) -> bool:
        """Return whether what `node` made has been changed since by a call that the graph does not show."""
        return bool(self._changed) and Edge(sequence_nr_of(node), output_nr) in self._changed

    def is_touched(self, node: Node) -> bool:
        """Return whether somebody has changed what `node` made unseen, or hooked its gradient.

        By the tensor, not the node.
        """
        return self.has_changed(node, 0) or Edge(sequence_nr_of(node), 0) in self._hooked

    def lookup_of(self, weight: Tensor) -> Lookup | None:
        """Return the latest embedding whose table is `weight`."""
        found = self._lookups.get(id(weight))
        return found if found is not None and found.is_of(weight) else None

    def has_changed_itself(self, tensor: Tensor) -> bool:
        """Return whether a tensor has been changed in place more often than its own node has."""
        node = tensor.grad_fn
        return node is None or tensor._version != self._versions.get(sequence_nr_of(node), 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, known by its name to whoever keeps tensors meanwhile."""
        kwargs = kwargs or {}
        if holds_pending(args, kwargs):
            return self._with_pending(func, types, args, kwargs)
        before, traits = self.current, _traits_of(func)
        if traits.is_data or (traits.is_in_place and not torch.is_grad_enabled()):
            self._changed.update(_edges(args[:1]))
        if "out" in kwargs and not torch.is_grad_enabled():
            self._changed.update(_edges(kwargs["out"]))
        if traits.is_hooking:
            self._hooked.update(_edges(args[:1]))
        if traits.is_data:
            with self:  # which is off in here
                read_before_change(args[0])
        self._num_calls += 1
        self.notes_statistics = False
        call = self.current = Call(traits.name, args, kwargs, self._num_calls)
        if traits.is_in_place or "out" in kwargs or _is_told_to_edit(call):
            self._note_edits(kwargs["out"] if "out" in kwargs else call.argument(0, "input"))
        try:
            answer = self._ask(call) if traits.name in _ANSWERED else None
            result = func(*args, **kwargs) if answer is None else answer
        finally:
            self.current, self.edited = before, set()
        if type(result) is DeferredLogits:
            return result
        if isinstance(result, Tensor) and torch.is_grad_enabled() and (node := result.grad_fn) is not None:
            self._note(func, traits.note, call, result, node)
        return result

    def _note_edits(self, edited: Any) -> None:
        """Tell of tensors that the call is about to edit."""
        before_edit = self._before_edit()
        for tensor in edited if isinstance(edited, (list, tuple)) else (edited,):
            with self:  # which is off in here
                read_before_edit(tensor)
            if before_edit is not None and isinstance(tensor, Tensor) and _has_storage(tensor):
                self.edited.add(storage_key(tensor))
                before_edit(tensor)

    def _with_pending(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of logits that nobody has computed: deferred, answered, or on the plain tensors."""
        if is_shown(func, args):
            return func(*args, **kwargs)
        if (found := deferred(func, args, kwargs)) is not None:
            return found
        before, name = self.current, _traits_of(func).name
        if name in _ANSWERED:
            self._num_calls += 1
            self.current = Call(name, args, kwargs, self._num_calls)
            try:
                if (answer := self._ask(self.current)) is not None:
                    return answer
            finally:
                self.current = before
        with self:  # which is off in here
            given = calls_in(args, kwargs)
            refuse_gradient(func, given)
            args, kwargs = as_read(args, kwargs)
        found = self.__torch_function__(func, types, args, kwargs)
        for head_call in given:
            head_call.follow()
        return found

    def _note(self, func: Any, note: Callable[[Call], Any] | None, call: Call, result: Tensor, node: Node) -> None:
        """Note what the graph leaves out of a call."""
        number = sequence_nr_of(node)
        if result._version:
            self._versions[number] = result._version
        if note is not None:
            self.operands[number] = note(call)
        if self.notes_statistics:
            self.statistics[call.number] = statistics_of(node)
        if self._notes_heads:
            self._note_head(func, call, node)

    def _note_head(self, func: Any, call: Call, node: Node) -> None:
        if func is F.linear:
            number, given = sequence_nr_of(node), call.argument(0, "input")
            if is_plain(weight := call.argument(1, "weight"), nn.Parameter):
                self.linears[number] = seen(weight, call.argument(2, "bias"))
            self.latest_input = LinearInput(number, given, version_of(given), given.grad_fn)
        elif func is F.embedding and not call.argument(6, "sparse", False):
            self._lookups[id(call.argument(1, "weight"))] = Lookup(node)

    def _ask(self, call: Call) -> Tensor | None:
        answer = self._answer()
        return None if answer is None else answer(call)

    @contextmanager
    def unseen(self, name: str) -> Iterator[None]:
        """Look at no call inside: what they keep is kept for one function of that `name`.

        In a region that is repeated, the tracker of that repetition looks away.
        """
        innermost = next(reversed(function_modes()), None)
        if innermost is not self:
            with innermost.unseen(name) if isinstance(innermost, CallTracker) else nullcontext():
                yield
            return
        before, self.current, self.unseen_as = self.current, Call(name, (), {}), name
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            self.current, self.unseen_as = before, None


class _Traits(NamedTuple):
    """What is known of a function."""

    name: str
    """A custom operator's includes its library, so that it is not taken for torch's."""
    is_in_place: bool
    """Whether it changes its first argument, which the graph does not show where gradients are off."""
    is_data: bool
    """Whether it opens the way to changes that nobody sees."""
    is_hooking: bool
    note: Callable[[Call], Any] | None


_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)


def _traits_of(func: Any) -> _Traits:
    # Others are not remembered: a function of the user's may hold tensors.
    return _known_traits(func) if type(func) in _IN_C else _find_traits(func)


def _find_traits(func: Any) -> _Traits:
    name = str(func) if is_operator(func) else getattr(func, "__name__", "")
    plain = name.split(".")[1] if is_operator(func) and "." in name else name  # of "aten.mul_.Tensor"
    is_in_place = name == "__setitem__" or (plain.endswith("_") and not plain.endswith("__"))
    is_in_place = is_in_place or name in _IN_PLACE_OPERATORS
    return _Traits(name, is_in_place, func in _DATA, func in _HOOKING, _NOTED.get(func))


_known_traits = functools.lru_cache(maxsize=1024)(_find_traits)


def _edges(changed: Any) -> Iterator[Edge]:
    """Return the edges of a tensor, of a list, or of what a slice that was made without gradients is of."""
    if isinstance(changed, (tuple, list)):
        for item in changed:
            yield from _edges(item)
    elif isinstance(changed, Tensor):
        base = changed._base if changed.grad_fn is None and changed._base is not None else changed
        if (edge := edge_of(base)) is not None:
            yield edge


def _has_storage(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.layout is torch.strided and not is_wrapped(tensor)


def _is_told_to_edit(call: Call) -> bool:
    """Return whether an argument says so."""
    place = _INPLACE.get(call.name)
    return place is not None and call.argument(place, "inplace") is True


_INPLACE = {
    **dict.fromkeys(("relu", "relu6", "selu", "silu", "mish", "hardswish", "hardsigmoid"), 1),
    **dict.fromkeys(("elu", "celu", "leaky_relu"), 2),
    **dict.fromkeys(("hardtanh", "threshold", "dropout", "dropout1d", "dropout2d", "dropout3d"), 3),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), 3),
    "rrelu": 4,
}
"""Functions that may edit their input, and the place of the argument that says so."""

_ANSWERED = frozenset(("linear", "cross_entropy", "nll_loss", "dropout"))
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]  # a descriptor
_HOOKING = (Tensor.register_hook, Tensor.retain_grad)
_IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor"))


def _scalar(call: Call) -> Any:
    """Return the number in `tensor + number`, on either side."""
    numbers = [a for a in call.args if isinstance(a, (int, float))]
    return numbers[0] if len(call.args) == 2 and len(numbers) == 1 else None


_NOTED: dict[Any, Callable[[Call], Any]] = {
    F.batch_norm: lambda call: Norm(call.argument(4, "bias"), call.argument(7, "eps", 1e-5)),
    F.group_norm: lambda call: Norm(call.argument(3, "bias"), call.argument(4, "eps", 1e-5)),
    F.layer_norm: lambda call: Norm(call.argument(3, "bias"), call.argument(4, "eps", 1e-5)),
    F.rms_norm: lambda call: Norm(None, call.argument(3, "eps")),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _scalar),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), _scalar),
}
"""What a recomputation needs and no node keeps: a normalisation's bias and epsilon, a number that is added."""

_POOLS = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}


def window_index(index: Tensor, call: Call) -> WindowIndex | None:
    """Return the small encoding of a max-pool's argmax; `None` for any other integers."""
    dims = _POOLS.get(call.name.removesuffix("_with_indices"))
    if dims is None or not covers_its_storage(index) or not index.is_contiguous():
        return None
    source, kernel = call.argument(0, "input"), call.argument(1, "kernel_size")
    settings = (
        kernel,
        call.argument(2, "stride") or kernel,
        call.argument(3, "padding", 0),
        call.argument(4, "dilation", 1),
    )
    window = [[s] * dims if isinstance(s, int) else list(s) * (dims if len(s) == 1 else 1) for s in settings]
    if not WindowIndex.fits(window):
        return None
    return WindowIndex(index, source.shape[-dims:], window)
