"""Logits that exist only once somebody reads them: what a head returns is a tensor without memory until then.

A Linear whose output is much wider than its input, [..., D] to [..., C], is not computed where it is called: the call
returns `DeferredLogits`, which has the output's shape and dtype, and refers to the Linear's input. Views, slices of
positions, casts to a wider dtype, copies, scaling and `log_softmax` of it return `DeferredLogits` as well
(`logits_rules.py`). A loss that the store answers (`linear_cross_entropy`) takes input and weight from it, so that the
logits of a few classes are all that ever exists of them.

Any other function of torch's gets the plain output: it is computed when the first one asks, with the graph that the
plain call would have, and the views before it are done again, so that functions that edit or hook it find what they
would find in plain torch. What goes around torch's functions (`autograd.Function.apply`) gets the same values, and the
gradient that comes back takes the Linear's way.

Limits: the weight must be as it was when the output is computed. Once an optimizer has changed it, nobody can say what
the logits were, and reading them is an error. A write to the weight through `.data` outside of a scope is not seen:
logits that are read after it are those of the new weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.logits_form import Follow, Form, LogitsAskedError, refuse_stale
from lightning_memsave.saved_tensors.logits_rules import FLOATS, Rows, follow_rule, has_rule
from lightning_memsave.torch_internals.autograd_graph import (
    innermost_hooks,
    is_inside_transform,
    storage_key,
    unversioned,
    unwatched,
    version_of,
)
from lightning_memsave.torch_internals.fake_tensors import is_plain

MIN_RATIO = 8
"""Outputs for each input of a Linear above which its output is deferred: a vocabulary; not an MLP's hidden layer."""


_IS_READING: ContextVar[bool] = ContextVar("deferred logits are being computed", default=False)


class HeadCall:
    """One call of a Linear that nobody has computed.

    Args:
        rows: its input, [..., D], in the dtype that it computes in.
        weight: [C, D].
        bias: [C].
        heads: which weights are heads; a weight whose output is read before any loss is none.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, heads: WeakIdKeyDictionary) -> None:
        self.rows, self.weight, self.bias, self._heads = rows, weight, bias, heads
        self._made_of = self._versions()
        self.members: list[weakref.ref[DeferredLogits]] = []
        self.has_graph = torch.is_grad_enabled()
        self.has_loss = self.is_read = False
        self._hooks = innermost_hooks()
        _calls.add(self)

    def _versions(self) -> list[tuple[int, int]]:
        given = (self.rows, self.weight, self.bias)
        return [(storage_key(each), version_of(each)) for each in given if each is not None]

    @property
    def is_unchanged(self) -> bool:
        """Whether input and parameters are what they were."""
        return self._versions() == self._made_of

    def is_made_of(self, key: int) -> bool:
        """Return whether a storage is the input's or a parameter's."""
        return any(key == own for own, _ in self._made_of)

    def note_loss(self) -> None:
        """Note that a loss was computed of it."""
        self.has_loss = True
        self._heads[self.weight] = True

    def begin_to_read(self) -> None:
        """Note that somebody reads it; compute all that is alive, in the order in which it was made.

        Raises:
            RuntimeError: the weight, or the input, was changed since.
        """
        if self.is_read:
            return
        if not self.is_unchanged:
            raise RuntimeError(
                'activations: "linear-cross-entropy" computes logits when they are read, and cannot do so after their '
                f"head, with a weight {list(self.weight.shape)}, or its input has changed. Read logits before the "
                'optimizer\'s step, or leave "linear-cross-entropy" out.'
            )
        self.is_read = True
        if self.has_graph:
            self._heads.setdefault(self.weight, False)
        else:  # whoever evaluates reads the logits of each batch, as for a metric
            self._heads[self.weight] = False
        token = _IS_READING.set(True)
        try:
            device = self.rows.device.type
            with (
                self._as_where_called(),
                torch.inference_mode(False),
                torch.set_grad_enabled(self.has_graph),
                torch.autocast(device, enabled=False),
            ):
                for member in self._alive():
                    member.compute()
            self.follow()
        finally:
            _IS_READING.reset(token)

    @property
    def is_as_where_called(self) -> bool:
        """Whether there are gradients now if there were some where it was called."""
        return torch.is_grad_enabled() == self.has_graph

    @property
    def is_elsewhere(self) -> bool:
        """Whether others' hooks take saved tensors now: a checkpointed region's, which is repeated without it."""
        pack = innermost_hooks()[0]
        return pack is not None and pack != self._hooks[0]

    def _as_where_called(self) -> AbstractContextManager[Any]:
        is_elsewhere = self.is_elsewhere and self._hooks[0] is not None
        return torch.autograd.graph.saved_tensors_hooks(*self._hooks) if is_elsewhere else nullcontext()

    def _alive(self) -> Iterator[DeferredLogits]:
        return (member for reference in self.members if (member := reference()) is not None)

    def follow(self) -> None:
        """Give all that is alive the place in the graph that its plain tensor has after edits."""
        if is_inside_transform():  # which takes no such function; later is soon enough
            return
        with torch.inference_mode(False), torch.enable_grad(), unwatched():
            for member in self._alive():
                if not member.is_followed:
                    with unversioned(member):
                        Follow.apply(member, member._found)  # type: ignore[no-untyped-call]
                    member._followed = None if member._found is None else member._found.grad_fn

    def product(self) -> Tensor:
        """Return the Linear's output."""
        rows, bias = self.rows, self.bias
        return F.linear(rows, self.weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))


class _Stand(torch.autograd.Function):
    """The place of logits in the graph, for a gradient that does not come through one of torch's functions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, form: Form) -> Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.form = form
        return DeferredLogits(rows, len(weight), form)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_stale(ctx)
        given, needs = ctx.saved_tensors, ctx.needs_input_grad[:3]
        is_twice = torch.is_grad_enabled()
        with torch.enable_grad(), torch.autocast(gradient.device.type, enabled=False):
            inputs = [
                each if not need else each.view_as(each) if is_twice else each.detach().requires_grad_()
                for each, need in zip(given, needs, strict=True)
            ]
            asked = [each for each, need in zip(inputs, needs, strict=True) if need]
            found = iter(torch.autograd.grad(ctx.form.of(*inputs), asked, gradient, create_graph=is_twice))
        return *(next(found) if need else None for need in needs), None


class DeferredLogits(Tensor):
    """The output of a Linear, or what follows from it, before anybody has read it.

    Args:
        rows: the Linear's input, with the same views; its features are where the logits' classes are.
        num_classes: C.
        form: of these logits.
    """

    call: HeadCall
    rows: Tensor
    form: Form
    _found: Tensor | None
    _followed: Any
    _recipe: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, rows: Tensor, num_classes: int, form: Form) -> DeferredLogits:
        """Make it with the strides of the plain tensor, and no memory."""
        dim, width = form.class_dim, rows.shape[form.class_dim]
        shape = [num_classes if place == dim else size for place, size in enumerate(rows.shape)]
        strides = [1 if place == dim else step // width * num_classes for place, step in enumerate(rows.stride())]
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=form.dtype, device=rows.device, requires_grad=False
        )
        made._found = made._followed = None
        return made

    def compute(self) -> None:
        """Compute it, when what it follows from has been."""
        if self._found is None:
            self._found = self._recipe()
            self._recipe = _computed  # which held what this follows from

    def read(self) -> Tensor:
        """Return the plain tensor.

        Raises:
            RuntimeError: the weight, or the input, was changed since.
        """
        self.call.begin_to_read()
        assert self._found is not None, "everything that is alive was computed"
        if not self.is_followed:
            if torch.is_grad_enabled():
                self.call.follow()
            else:  # perhaps inside of a function of the user's, which has its place in the graph already
                with unwatched():
                    self.grad_fn.is_stale = True  # type: ignore[union-attr]  # the context of one of ours
        return self._found

    @property
    def is_followed(self) -> bool:
        """Whether its place in the graph is that of its plain tensor."""
        return self._found is None or self._found.grad_fn is self._followed

    @property
    def is_pending(self) -> bool:
        """Whether nobody has read it, or what it is a part of."""
        return not self.call.is_read

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what shape and dtype tell, defer what can be, and run anything else on the plain tensor."""
        kwargs = kwargs or {}
        if is_shown(func, args):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # untyped
        found = deferred(func, args, kwargs)
        if found is None:
            given = calls_in(args, kwargs)
            refuse_gradient(func, given)
            args, kwargs = as_read(args, kwargs)
            found = func(*args, **kwargs)
            for call in given:
                call.follow()
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation that was called below torch's functions, on the plain values."""
        args, kwargs = tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _computed() -> Tensor:
    raise AssertionError("it was computed")


def _values(value: Any) -> Any:
    if type(value) is not DeferredLogits:
        return value
    return value.read().detach()


def _made(call: HeadCall, rows: Tensor, form: Form, recipe: Callable[[], Tensor]) -> DeferredLogits:
    made: DeferredLogits = _Stand.apply(rows, call.weight, call.bias, form)  # type: ignore[no-untyped-call]
    made.call, made.rows, made.form, made._recipe = call, rows, form, recipe
    call.members.append(weakref.ref(made))
    global _num_made
    _num_made += 1
    return made


_num_made = 0


def defer(call: Call, heads: WeakIdKeyDictionary) -> DeferredLogits | None:
    """Return the output of `call`, of `F.linear`, as logits that nobody has computed; `None` where it is computed.

    Args:
        call: of `F.linear`.
        heads: whether weights are heads, as far as that is known.
    """
    rows, weight, bias = call.argument(0, "input"), call.argument(1, "weight"), call.argument(2, "bias")
    if (
        not (isinstance(rows, Tensor) and (is_plain(rows) or _is_plain_inference(rows)))
        or not (rows.dim() > 1 and rows.numel())
        or not is_plain(weight, nn.Parameter)
        or not (bias is None or is_plain(bias, nn.Parameter))
        or weight.dim() != 2
        or weight.shape[1] != rows.shape[-1]
        or weight.shape[1] == 1  # of which views cannot tell whether the classes are left alone
        or len(weight) <= MIN_RATIO * rows.shape[-1]
        or not (bias is None or bias.shape == weight.shape[:1])
        or any(each.device != rows.device for each in (weight, bias) if each is not None)
        or (torch.is_grad_enabled() and not any(p.requires_grad for p in (rows, weight, bias) if p is not None))
        or not heads.get(weight, True)
        or _IS_READING.get()
        or is_inside_transform()
    ):
        return None
    dtype = _computed_in(rows, weight, bias)
    if dtype is None:
        return None
    given = rows if torch.is_grad_enabled() else rows.clone()  # edits in place are usual there
    head = HeadCall(given.to(dtype).contiguous(), weight, bias, heads)
    return _made(head, head.rows, Form(rows.dim() - 1, dtype), head.product)


def _is_plain_inference(rows: Tensor) -> bool:
    return type(rows) is Tensor and rows.is_inference() and not rows.is_nested


def _computed_in(*given: Tensor | None) -> torch.dtype | None:
    """Return the dtype that a Linear computes in; `None` where torch refuses, or autocast leaves it alone."""
    dtypes, device = {each.dtype for each in given if each is not None}, next(g for g in given if g is not None).device
    if not torch.is_autocast_enabled(device.type):
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= FLOATS else None
    return torch.get_autocast_dtype(device.type) if dtypes <= _CAST else None


_CAST = {torch.float32, torch.bfloat16, torch.float16}


# ---------------------------------------------------------------------------------------------------- functions
def holds_pending(args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function is given logits that nobody has computed, alone or in a list."""
    if not _num_made:
        return False
    return any(map(_is_pending, args)) or any(map(_is_pending, kwargs.values()))


def _is_pending(value: Any) -> bool:
    if type(value) is DeferredLogits:
        return value.is_pending
    return isinstance(value, (list, tuple)) and any(map(_is_pending, value))


def calls_in(args: Any, kwargs: Any) -> set[HeadCall]:
    """Return the calls whose logits a function is given."""
    return {value.call for value in tree_leaves((args, kwargs)) if type(value) is DeferredLogits}


def refuse_gradient(func: Any, given: Iterable[HeadCall]) -> None:
    """Raise `LogitsAskedError` where `func` asks for a gradient of logits of which a loss was computed without them."""
    if func is torch.autograd.grad and any(call.has_loss for call in given):
        raise LogitsAskedError


def read_before_change(parameter: Any) -> None:
    """Compute the logits that follow from `parameter`, of which somebody asks for `.data`, where no change shows."""
    for call in list(_calls):
        if not call.is_read and call.is_unchanged and (call.weight is parameter or call.bias is parameter):
            call.begin_to_read()


def read_before_edit(edited: Any) -> None:
    """Compute the logits without a graph that follow from what is about to be edited in place, as in plain torch.

    With a graph, backward would find that the weight has changed, in plain torch as well.
    """
    pending = [call for call in _calls if not (call.has_graph or call.is_read)]
    key = storage_key(edited) if pending and isinstance(edited, Tensor) else None
    for call in pending:
        if key is not None and call.is_made_of(key):
            call.begin_to_read()


_calls: weakref.WeakSet[HeadCall] = weakref.WeakSet()


def as_read(args: Any, kwargs: Any) -> Any:
    """Return arguments with plain tensors instead of deferred ones."""
    return tree_map(lambda value: value.read() if type(value) is DeferredLogits else value, (args, kwargs))


def is_shown(func: Any, args: Any) -> bool:
    """Return whether a function asks for what is known without the values."""
    return func in _SHOWN and bool(args) and type(args[0]) is DeferredLogits and args[0].is_pending


_PROPERTIES = (
    "shape dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_nested is_leaf itemsize nbytes"
)
_SHOWN = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
    *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device),
    *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__),
}


def deferred(func: Any, args: Any, kwargs: Any) -> DeferredLogits | None:
    """Return what a function makes of logits that nobody has computed, as more of these; `None` where it reads them."""
    if not has_rule(func) or not args or type(args[0]) is not DeferredLogits or not args[0].is_pending:
        return None
    logits, *others = args
    if not logits.call.is_as_where_called or logits.call.is_elsewhere or holds_pending(others, kwargs):
        return None
    given = Rows(logits.rows, logits.form, logits.shape[logits.form.class_dim])
    found = follow_rule(func, given, tuple(others), kwargs)
    if found is None or found is given:
        return None if found is None else logits
    others = [each.clone() if isinstance(each, Tensor) else each for each in others]  # a mask, as it is now
    if found.form.is_log and not given.form.is_log:  # it may be computed where autocast does not say so
        kwargs = {**kwargs, "dtype": found.form.dtype}

    def recipe() -> Tensor:
        logits.compute()
        made: Tensor = func(logits._found, *others, **kwargs)
        return made

    return _made(logits.call, found.rows, found.form, recipe)
