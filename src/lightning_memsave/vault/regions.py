"""Checkpointed regions: forward keeps the inputs of some calls and nothing else; backward makes the calls again.

A region is one run of consecutive calls, of one module or of several that follow each other. What autograd would keep
inside becomes a number; the first number that backward asks for makes all calls of the region again, in order, and
fills the rest. What one call of a region takes from an earlier one is not kept at all. Regions nest: inside a repeated
region, inner ones are regions again, and that is how memory becomes logarithmic.

In the repetition everything is as it was: the generators of torch's devices (kept only where a call drew numbers),
autocast, the default device, and every buffer that the calls change. It stops behind the last tensor that backward
waits for. In the scope of a vault, inputs are kept by the vault, and the repetition runs under it: what it keeps is in
codes and recipes again. A function mode is off while backward runs, so a repetition enters the vault's own again.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016
(https://arxiv.org/abs/1604.06174). The way through saved-tensor hooks is that of `torch.utils.checkpoint`
(non-reentrant), which knows neither buffers, nor regions of several calls, nor a vault.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_memsave.vault.calls import Place
from lightning_memsave.vault.entries import Passed
from lightning_memsave.vault.graph import Kept, SavedInput, innermost_pack_hook, keep
from lightning_memsave.vault.state import Buffers, Randomness, Surroundings
from lightning_memsave.vault.vault import Vault


class RegionError(RuntimeError):
    """A region did not do the same thing twice."""


class EditsInputError(RegionError):
    """A region changed what it was given, so it cannot be run again from it."""


class Group:
    """Calls that are one region when they follow each other: an identity that the modules called have in common.

    Args:
        num_members: how many modules there are.
    """

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members


class Membership(NamedTuple):
    """The place of a module in a group."""

    group: Group
    position: int


class Member:
    """What a module in regions remembers: its groups, the outermost first, and which of its buffers its calls change.

    Args:
        memberships: its groups.
        previous_forward: an instance attribute that somebody else bound, or `None`.
    """

    def __init__(self, memberships: Sequence[Membership], previous_forward: Callable[..., Any] | None) -> None:
        self.memberships, self.previous_forward = tuple(memberships), previous_forward
        self.changing: set[str] | None = None
        self.num_calls = 0

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """The forward that computes."""
        return self.previous_forward or types.MethodType(type(module).forward, module)


def run(memberships: Sequence[Membership], member: Member, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the forward of `module` as a part of `memberships`, which are all or the innermost of its groups.

    Raises:
        EditsInputError: the call edits its input in place.
        RegionError: in backward, when its repetition keeps other tensors.
    """
    function = member.forward_of(module)
    if not memberships:
        return function(*args, **kwargs)
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    versions = [tensor._version for tensor in tensors]
    devices = {tensor.device for tensor in tensors}
    call = _Call(
        *(member, module, tree, Buffers(module, member.changing)),
        *(Surroundings({device.type for device in devices}), Randomness(devices)),
    )
    regions: list[Region] = []
    with contextlib.ExitStack() as hooks:
        for depth, membership in enumerate(memberships):
            region = _region_of(membership)
            region.begin(call, leaves, memberships[depth + 1 :])
            hooks.enter_context(saved_tensors_hooks(region.pack, _unpack))
            regions.append(region)
        output = function(*args, **kwargs)
    if versions != [tensor._version for tensor in tensors]:
        raise EditsInputError(type(module).__name__)
    call.end(output)
    for region in regions:
        region.end()
    return output


# ------------------------------------------------------------------------------- which region
_OPEN: ContextVar[weakref.WeakKeyDictionary[Group, weakref.ref[Region]]] = ContextVar("open regions")
"""Regions whose group goes on; those of a repetition are apart."""


def _region_of(membership: Membership) -> Region:
    """The region that this call continues, else a new one."""
    group, position = membership
    if group.num_members == 1:
        return Region()
    if _OPEN.get(None) is None:
        _OPEN.set(weakref.WeakKeyDictionary())
    reference = _OPEN.get().get(group)
    region = reference() if reference is not None and position > 0 else None
    if region is None or region.next_position != position:
        region = Region()
    region.next_position = position + 1
    _OPEN.get()[group] = weakref.ref(region)
    return region


def _vault_around() -> Vault | None:
    """The vault that keeps what is kept now, or that will keep what the region around keeps when it is repeated."""
    owner = getattr(innermost_pack_hook(), "__self__", None)
    return owner if isinstance(owner, Vault) else getattr(owner, "vault", None)


_INPUTS: ContextVar[Vault | None] = ContextVar("vault of inputs", default=None)


@contextlib.contextmanager
def keeping_inputs_in(vault: Vault) -> Iterator[None]:
    """The inputs of regions that are entered inside are kept in `vault`, whatever keeps the rest."""
    if _INPUTS.get() is not None:
        yield
        return
    token = _INPUTS.set(vault)
    try:
        with vault.opened():
            yield
    finally:
        _INPUTS.reset(token)


def _inputs_kept_in() -> contextlib.AbstractContextManager[None]:
    """Inside another region, or in its repetition, that one keeps them."""
    vault = _INPUTS.get()
    is_inside = isinstance(getattr(innermost_pack_hook(), "__self__", None), (Region, _Collector))
    return contextlib.nullcontext() if vault is None or is_inside else vault.hooks()


# ------------------------------------------------------------------------------- a region
class _Output(NamedTuple):
    """In place of an argument: what an earlier call of the region returned."""

    call: int
    leaf: int


@dataclass(eq=False)
class _Call:
    """One call, as it can be made again."""

    member: Member
    module: nn.Module
    tree: TreeSpec
    buffers: Buffers
    surroundings: Surroundings
    before: Randomness
    after: Randomness | None = None  # the same as before when the call drew nothing
    outputs: list[tuple[int, weakref.ref[Tensor], int]] = field(default_factory=list)  # (leaf, tensor, version)

    def end(self, output: Any) -> None:
        """Note what the call returned, whether it drew random numbers, and which buffers it changed."""
        self.outputs = [
            (number, weakref.ref(leaf), leaf._version)
            for number, leaf in enumerate(tree_flatten(output)[0])
            if isinstance(leaf, Tensor)
        ]
        after = Randomness(self.before.devices)
        self.after = self.before if after.equals(self.before) else after
        if self.member.changing is None:
            self.member.changing = self.buffers.changed()


class _Part(NamedTuple):
    """A call in one region: with what it is repeated there."""

    call: _Call
    inner: Sequence[Membership]
    arguments: list[Any]  # leaves: `SavedInput`, `_Output`, or what needs no keeping
    place: Place | None


class Region:
    """One run of the calls of a group. It lives as long as the graph holds something of it."""

    def __init__(self) -> None:
        self.next_position = 0
        self.vault = _vault_around()
        self._parts: list[_Part] = []
        self._randomness: dict[_Call, Randomness] = {}
        """For calls that drew numbers and did not go on where the one before stopped: where they start."""
        self._drawn: Randomness | None = None
        self._holders: list[weakref.ref[_Holder]] = []

    # --------------------------------------------------------------------------- forward
    def begin(self, call: _Call, leaves: list[Any], inner: Sequence[Membership]) -> None:
        """Keep what the coming call needs to be made again."""
        arguments = [self._kept(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        place = None if self.vault is None else self.vault.place
        self._parts.append(_Part(call, inner, arguments, place))

    def _kept(self, tensor: Tensor) -> SavedInput | _Output | Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        for number, part in enumerate(self._parts):
            for leaf, reference, version in part.call.outputs:
                if reference() is tensor and tensor._version == version:
                    return _Output(number, leaf)
        with _inputs_kept_in():
            return keep(tensor)

    def pack(self, tensor: Tensor) -> _Holder | Passed:
        """Put a number in place of `tensor`; parameters are kept, which costs nothing and notices changes."""
        if tensor.is_leaf and tensor.requires_grad:
            return Passed(tensor)
        holder = _Holder(self, tensor)
        self._holders.append(weakref.ref(holder))
        return holder

    def end(self) -> None:
        """Keep the state of the generators where the call that has just ended needs it."""
        call = self._parts[-1].call
        assert call.after is not None
        if call.after is call.before:
            return
        if self._drawn is None or not self._drawn.equals(call.before):
            self._randomness[call] = call.before
        self._drawn = call.after

    # --------------------------------------------------------------------------- backward
    def repeat(self) -> None:
        """Make the calls again, and give every holder that waits its tensor.

        Raises:
            RegionError: they keep other tensors than before.
        """
        collector = _Collector(self._holders)
        vault = None if self.vault is None else self.vault.branch()
        token = _OPEN.set(weakref.WeakKeyDictionary())
        try:
            # Stopped inside the scope: while an exception is on its way, its traceback keeps tensors alive.
            with torch.enable_grad(), collector.scope(vault), contextlib.suppress(_Stop):
                self._call_again(vault)
        finally:
            _OPEN.reset(token)
        collector.check()

    def _call_again(self, vault: Vault | None) -> None:
        last_use = {a: n for n, part in enumerate(self._parts) for a in part.arguments if isinstance(a, _Output)}
        outputs: dict[_Output, Tensor] = {}  # those that a later call takes, until the last one has
        devices = frozenset[torch.device]().union(*(part.call.before.devices for part in self._parts))
        with Randomness.untouched(devices) if self._randomness else contextlib.nullcontext():
            for number, (call, inner, arguments, place) in enumerate(self._parts):
                leaves = [outputs[a] if isinstance(a, _Output) else _given(a) for a in arguments]
                args, kwargs = tree_unflatten(leaves, call.tree)
                outputs = {key: tensor for key, tensor in outputs.items() if last_use[key] > number}
                del leaves
                if call in self._randomness:
                    self._randomness[call].restore()
                inside = contextlib.nullcontext() if vault is None or place is None else vault.again_at(place)
                with call.surroundings.again(), call.buffers.again(), inside:
                    found = tree_flatten(run(inner, call.member, call.module, args, kwargs))[0]
                outputs |= {key: found[key.leaf] for key in last_use if key.call == number}
                del args, kwargs, found


def _given(argument: Any) -> Any:
    if not isinstance(argument, SavedInput):
        return argument
    tensor = argument.unpack()
    # What lies before a region is nobody's business inside: the vault looks for recipes as far as this node.
    return tensor if tensor.grad_fn is None else _RegionInput.apply(tensor)  # type: ignore[no-untyped-call]  # untyped in torch


class _RegionInput(torch.autograd.Function):
    """A tensor under a node of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """The same tensor."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The same gradient."""
        return gradient


# ------------------------------------------------------------------------------- what the graph holds
class _Stop(BaseException):
    """Nothing that follows in a repetition is wanted."""


class _Holder:
    """What the graph holds in place of a tensor."""

    __slots__ = ("__weakref__", "dtype", "region", "shape", "value")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self.region, self.shape, self.dtype = region, tensor.shape, tensor.dtype
        self.value: Tensor | Kept | None = None


def _unpack(kept: _Holder | Passed) -> Tensor:
    if isinstance(kept, Passed):
        return kept.get()
    if kept.value is None:
        kept.region.repeat()
    value, kept.value = kept.value, None  # whoever asks twice has it computed twice
    assert value is not None
    return value.get() if isinstance(value, Kept) else value


class _Collector:
    """Gives what a repetition keeps to those who wait for it."""

    def __init__(self, holders: list[weakref.ref[_Holder]]) -> None:
        self._holders = holders
        waiting = [number for number, reference in enumerate(holders) if _waits(reference())]
        self._last, self._num_seen = waiting[-1], 0
        self.vault: Vault | None = None

    @contextlib.contextmanager
    def scope(self, vault: Vault | None) -> Iterator[None]:
        """What autograd keeps inside comes here, through `vault` if there is one."""
        self.vault = vault
        if vault is None:
            with saved_tensors_hooks(self.pack, _same):
                yield
        else:
            with vault.scope(self.pack):
                yield

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """Fill one holder, and stop behind the last."""
        kept = tensor.detach() if self.vault is None else self.vault.pack(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            return kept
        number = self._num_seen
        self._num_seen += 1
        if number > self._last:
            return kept
        holder = self._holders[number]()
        if _waits(holder):
            assert holder is not None
            if (holder.shape, holder.dtype) != (tensor.shape, tensor.dtype):
                raise RegionError(
                    f"A checkpointed region kept {list(holder.shape)} {holder.dtype} in forward and "
                    f"{list(tensor.shape)} {tensor.dtype} when it was run again. {_ADVICE}"
                )
            holder.value = kept
        if number == self._last:
            raise _Stop
        return kept

    def check(self) -> None:
        """Raise `RegionError` unless everybody got a tensor."""
        if self._num_seen <= self._last:
            raise RegionError(
                f"A checkpointed region kept {len(self._holders)} tensors in forward and {self._num_seen} when it was "
                f"run again. {_ADVICE}"
            )


_ADVICE = "It must do the same twice: no Python or numpy randomness, no counters. Leave this module out."


def _waits(holder: _Holder | None) -> bool:
    return holder is not None and holder.value is None


def _same(kept: Any) -> Any:
    return kept
