"""Checkpointed regions: forward keeps the inputs of some calls and nothing else; backward makes the calls again.

A region is one run of consecutive calls, of one module or of several that follow each other. What autograd would keep
inside becomes a holder; the first holder that backward asks for makes all calls of the region again, in order, and
fills the rest. What one call of a region takes from an earlier one is not kept at all. Regions nest: inside a repeated
region, inner ones are regions again, and that is how memory becomes logarithmic.

In the repetition everything is as it was: random generators (torch's, Python's, numpy's, those that the module holds;
kept only where a call drew numbers), autocast, the default device, the kernels allowed, the parameters, the module's
mode, plain attributes, objects among the arguments, and the buffers. Of these, each call clones those that the first
call in training, or the first in evaluation, has edited; of others that are small, one clone serves all calls until
somebody edits them; where a call edits a large one later on, backward raises. What a call reads besides that (a global
variable) nobody knows, so the first repetitions, and some later ones, are compared with the forward pass: one that
computes other values raises. A repetition stops behind the last tensor that backward waits for.

In the scope of a store, inputs are kept by the store, and the repetition runs under it: what it keeps is in codes and
recomputations again. A function mode is off while backward runs, so a repetition enters the store's own again.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016
(https://arxiv.org/abs/1604.06174). The way through saved-tensor hooks is that of `torch.utils.checkpoint`
(non-reentrant), which knows neither buffers, nor regions of several calls, nor a store.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memsave.saved_tensors.arguments import Arguments
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.function_mode import CallContext
from lightning_memsave.saved_tensors.object_state import Stub
from lightning_memsave.saved_tensors.placeholders import Collector, Fingerprints, Holder, Stop, unpack
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.saved_tensors.region_call import RegionCall, leaves_of
from lightning_memsave.saved_tensors.region_inputs import Keeper, RegionInput, keep, store_around
from lightning_memsave.saved_tensors.region_members import Group, Member, Membership
from lightning_memsave.saved_tensors.saved_storage import Passed
from lightning_memsave.saved_tensors.store import SavedTensorStore
from lightning_memsave.torch_internals.autograd_graph import unwatched, version_of
from lightning_memsave.torch_internals.compiled_regions import call_at_end


def run(memberships: Sequence[Membership], member: Member, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the forward of `module` as a part of `memberships`, which are all or the innermost of its groups.

    Raises:
        EditsInputError: the call edits its input in place.
        ChangesAttributeError: it changes an attribute that cannot be put back.
        RegionError: in backward, when its repetition keeps other tensors, or would read a buffer that has changed.
    """
    function = member.forward_of(module)
    if not memberships:
        return function(*args, **kwargs)
    with unwatched():
        call = RegionCall(member, module, Arguments(args, kwargs))
    regions: list[Region] = []
    with contextlib.ExitStack() as hooks:
        for depth, membership in enumerate(memberships):
            region = _region_of(membership, regions[-1] if regions else None)
            region.begin(call, memberships[depth + 1 :])
            hooks.enter_context(saved_tensors_hooks(region.pack, unpack))
            regions.append(region)
        output = function(*args, **kwargs)
    with unwatched():
        unused, drawn = call.end(args, kwargs, output)
    if any(membership.group.num_members > 1 for membership in memberships):
        _live_with(output, regions)
    for region in regions:
        region.end(call, unused, drawn)
    call.given.release()
    return output


# ------------------------------------------------------------------------------- which region
_OPEN: ContextVar[weakref.WeakKeyDictionary[Group, weakref.ref[Region]]] = ContextVar("open regions")
"""Regions whose group goes on; those of a repetition are apart."""


def _region_of(membership: Membership, around: Region | None) -> Region:
    """Return the region that this call continues, else a new one."""
    group, position = membership
    if group.num_members == 1:
        return Region(around)
    if _OPEN.get(None) is None:
        _OPEN.set(weakref.WeakKeyDictionary())
    reference = _OPEN.get().get(group)
    region = reference() if reference is not None and position > 0 else None
    if region is None or region.next_position != position:
        region = Region(around)
    region.next_position = position + 1
    _OPEN.get()[group] = weakref.ref(region)
    return region


def _live_with(output: Any, regions: list[Region]) -> None:
    """Keep regions alive as long as what a call of theirs returned, for the later call that may be given it.

    In forward the graph mostly holds a region. In a repetition the graph behind an output dies with it, and calls such
    as dropout of 0 keep nothing at all. A region that ended in one of the two only would keep other inputs than before.
    """
    for leaf in leaves_of(output):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:  # else it may be a buffer, which lives for ever
            call_at_end(leaf, _let_go, regions)


def _let_go(regions: list[Region]) -> None:
    """Let go of what was held for a graph that is gone."""


# ------------------------------------------------------------------------------- parameters that change in backward
_USERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters that are stepped inside of backward, and the regions that compute with them."""


def expect_changes(parameters: Iterable[Tensor]) -> None:
    """Expect a call of `before_change` whenever one of these parameters is about to change inside of backward."""
    for parameter in parameters:
        _USERS.setdefault(parameter, weakref.WeakSet())


def expect_no_changes(parameters: Iterable[Tensor]) -> None:
    """Undo `expect_changes`."""
    for parameter in parameters:
        _USERS.pop(parameter, None)


def before_change(parameter: Tensor) -> None:
    """Repeat, while it is still as it was, what computes with `parameter` and waits.

    A gradient may be complete before its region had to be repeated: of a bias that is added last, for example.
    """
    for region in list(_USERS.get(parameter, ())):
        region.repeat_if_never()


# ------------------------------------------------------------------------------- a region
class _Output(NamedTuple):
    """Stand-in for an argument: what an earlier call of the region returned."""

    call: int
    leaf: int


class _Part(NamedTuple):
    """A call in one region: with what it is repeated there."""

    call: RegionCall
    inner: Sequence[Membership]
    arguments: list[Any]  # leaves: `RegionInput`, `_Output`, `Stub`, or what needs no keeping
    place: CallContext | None


class Region(Keeper):
    """One run of the calls of a group. It lives as long as the graph holds something of it.

    Args:
        around: the region that this one is inside of, which lives as long.
    """

    def __init__(self, around: Region | None = None) -> None:
        self.next_position, self._around = 0, around
        self.store = store_around()
        self._parts: list[_Part] = []
        self._randomness: dict[RegionCall, Randomness] = {}
        """Start of calls that drew numbers and did not go on where the one before stopped."""
        self._drawn: Randomness | None = None
        self._holders: list[weakref.ref[Holder]] = []
        self._was_repeated = False
        self._fingerprints: Fingerprints | None = None
        """Fingerprints of the latest call, if its repetition is compared with it."""

    # --------------------------------------------------------------------------- forward
    def begin(self, call: RegionCall, inner: Sequence[Membership]) -> None:
        """Keep what the coming call needs to be made again."""
        is_equal = self.store is None or self.store.lossy is Fidelity.EXACT  # codes are not
        self._fingerprints = call.fingerprints if is_equal else None
        given = {id(tensor): tensor for tensor in call.given.tensors}  # one may be given several times
        kept = {key: self._kept(tensor) for key, tensor in given.items()}
        arguments = [kept[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in call.given.leaves]
        place = None if self.store is None else self.store.place
        self._parts.append(_Part(call, inner, arguments, place))
        for parameter in call.weights if _USERS else ():
            if (users := _USERS.get(parameter)) is not None:
                users.add(self)

    def _kept(self, tensor: Tensor) -> RegionInput | _Output:
        for number in range(len(self._parts) - 1, -1, -1):  # mostly the latest
            for leaf, reference, version in self._parts[number].call.outputs:
                if reference() is tensor and version_of(tensor) == version:
                    return _Output(number, leaf)
        return keep(tensor)

    def pack(self, tensor: Tensor) -> Holder | Passed:
        """Put a holder in place of `tensor`; parameters are kept, which costs nothing and notices changes."""
        if tensor.is_leaf and tensor.requires_grad:
            return Passed(tensor)
        holder = Holder(self, tensor)
        self._holders.append(weakref.ref(holder))
        if self._fingerprints is not None:
            self._fingerprints.take(holder, tensor)
        return holder

    def end(self, call: RegionCall, unused: list[int], drawn: tuple[Randomness, Randomness] | None) -> None:
        """End the call.

        Args:
            call: the latest.
            unused: leaves of its arguments of which no values are kept.
            drawn: generators before and after it, if it drew numbers; kept where it needs them.
        """
        for leaf in unused:
            self._parts[-1].arguments[leaf] = Stub(call.given.leaves[leaf])
        if drawn is not None:
            before, after = drawn
            if self._drawn is None or not self._drawn.equals(before):
                self._randomness[call] = before
            self._drawn = after

    # --------------------------------------------------------------------------- backward
    def repeat(self) -> None:
        """Make the calls again, and give every holder that waits its tensor.

        Raises:
            RegionError: they keep other tensors than before.
        """
        self._was_repeated = True
        edited = [name for part in self._parts for name in part.call.edited]
        collector = Collector(self._holders, self._modules(), edited)
        store = None if self.store is None else self.store.branch()
        token = _OPEN.set(weakref.WeakKeyDictionary())
        try:
            # Stopped inside the scope: while an exception is on its way, its traceback keeps tensors alive.
            with torch.enable_grad(), collector.scope(store), contextlib.suppress(Stop):
                self._call_again(store)
        except RuntimeError:
            if not collector.is_complete:  # TorchScript raises one of its own for `Stop`
                raise
        finally:
            _OPEN.reset(token)
        collector.check()

    def repeat_if_never(self) -> None:
        """Repeat, if that has not been done and somebody waits."""
        if not self._was_repeated and any(reference() is not None for reference in self._holders):
            self.repeat()

    def _modules(self) -> str:
        calls = [part.call for part in self._parts]
        named = [f"`{call.member.name}` ({type(call.module).__name__})" for call in calls[:3]]
        return ", ".join(named) + (f" and {len(calls) - 3} more" if len(calls) > 3 else "")

    def _call_again(self, store: SavedTensorStore | None) -> None:
        last_use = {a: n for n, part in enumerate(self._parts) for a in part.arguments if isinstance(a, _Output)}
        outputs: dict[_Output, Tensor] = {}  # those that a later call takes, until the last one has
        devices = frozenset[torch.device]().union(*(part.call.devices for part in self._parts))
        private = {id(g): g for part in self._parts for g in part.call.private}
        is_random = bool(self._randomness)
        with Randomness.untouched(devices, private.values()) if is_random else contextlib.nullcontext():
            for number, (call, inner, arguments, place) in enumerate(self._parts):
                leaves = _all_given(arguments, outputs)
                args, kwargs = call.given.again(leaves)
                outputs = {key: tensor for key, tensor in outputs.items() if last_use[key] > number}
                del leaves
                if call in self._randomness:
                    self._randomness[call].restore()
                inside = contextlib.nullcontext() if store is None or place is None else store.again_at(place)
                with call.again(), inside:
                    found = leaves_of(run(inner, call.member, call.module, args, kwargs))
                outputs |= {key: found[key.leaf] for key in last_use if key.call == number}
                del args, kwargs, found


def _all_given(arguments: Sequence[Any], outputs: dict[_Output, Tensor]) -> list[Any]:
    """Return the leaves of a call; what was one object is one again, as attention asks whether query and key are."""
    found: dict[int, Any] = {}
    for argument in arguments:
        if id(argument) not in found:
            found[id(argument)] = _given(argument, outputs)
    return [found[id(argument)] for argument in arguments]


def _given(argument: Any, outputs: dict[_Output, Tensor]) -> Any:
    if isinstance(argument, RegionInput | Stub):
        return argument.get()
    return outputs[argument] if isinstance(argument, _Output) else argument
