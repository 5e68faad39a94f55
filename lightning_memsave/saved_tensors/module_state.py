"""What a call depends on besides its arguments: put back when the call is made again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.saved_tensors.object_state import ObjectState, Stub, have_same_values, is_immutable, state_of
from lightning_memsave.saved_tensors.parameter_edits import ParameterEdits
from lightning_memsave.saved_tensors.randomness import PARTS_OF_TORCH
from lightning_memsave.torch_internals.autograd_graph import (
    check_version,
    compiler_callback,
    compiling,
    function_modes,
    version_of,
)
from lightning_memsave.torch_internals.registered_hooks import number_of_next_hook, remove_hooks_since

HOLDS_IN_BACKWARD = "holds_in_backward"
"""Attribute of a function mode that is entered again when a forward pass is repeated."""


class Surroundings:
    """Autocast, the default device, the kernels allowed, and Dynamo's callback, as they are now; entered, they hold.

    Without the callback, what was compiled in a compiled module's region would be eager in its repetition. Of function
    modes, which torch leaves for backward, those hold that say so (`HOLDS_IN_BACKWARD`).
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._device, self._compiler = torch.get_default_device(), compiler_callback()
        self._allowed = _allowed()
        self._modes = [mode for mode in function_modes() if getattr(mode, HOLDS_IN_BACKWARD, False)]
        kinds = {"cpu", *(device.type for device in devices)}
        self._autocast = [_autocast_of(kind) for kind in kinds if torch.amp.is_autocast_available(kind)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore these surroundings."""
        with contextlib.ExitStack() as stack:
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            for mode in self._modes:
                if mode not in function_modes():
                    stack.enter_context(mode)
            for settings in self._autocast:
                if settings != _autocast_of(settings[0]):
                    stack.enter_context(torch.autocast(*settings))
            if (allowed := _allowed()) != self._allowed:
                _allow(self._allowed)
                stack.callback(_allow, allowed)
            with compiling(self._compiler):
                yield


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_LIBRARIES: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)


def _allowed() -> tuple[bool, ...]:
    """Return which kernels may be used, which keep different tensors.

    Kinds of scaled dot product attention (`torch.nn.attention.sdpa_kernel`), on CPU as well; cuDNN and oneDNN.
    """
    attention = (getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTION)
    return *attention, *(library.enabled for library in _LIBRARIES)


def _allow(allowed: tuple[bool, ...]) -> None:
    for kind, is_allowed in zip(_ATTENTION, allowed, strict=False):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_allowed)
    for library, is_allowed in zip(_LIBRARIES, allowed[len(_ATTENTION) :], strict=True):
        if library.enabled != is_allowed:
            library.enabled = is_allowed


def _autocast_of(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    enabled, caches = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    return kind, torch.get_autocast_dtype(kind), enabled, caches


class CallParameters:
    """The parameters that a call computes with, and the modes that modules are in.

    Autograd notices changes of the parameters that it keeps; a repetition computes with all of them. Others may have
    been lent for one forward (`torch.func.functional_call`). Whether they take gradients, and whether a module trains,
    says what its forward does and keeps.

    Args:
        owners: whose: modules by name, as `named_modules` tells them.
        is_checked: whether it will be asked what was replaced or edited, and reads all values for that.
    """

    def __init__(self, owners: Sequence[tuple[str, nn.Module]], *, is_checked: bool = False) -> None:
        self._owners, self._modes = owners, [(owner, owner.training) for _, owner in owners]
        self._owned = [(owner, key, value) for _, owner in owners for key, value in held(owner)]
        self._need_gradients = [value.requires_grad for _, _, value in self._owned]
        self._versions = [version_of(value) for _, _, value in self._owned]
        self._named = list(named_parameters(owners)) if is_checked else None
        self._edits = ParameterEdits(((name, p) for name, *_, p in self._named or ()), reads=None)

    def __iter__(self) -> Iterator[Tensor]:
        return (value for _, _, value in self._owned)

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the parameters."""
        return {value.device for value in self}

    def replaced(self) -> list[str]:
        """Return the names of those that were replaced since."""
        assert self._named is not None, "it was announced"
        return [name for name, owner, key, p in self._named if is_replaced(owner, key, p)]

    def edited(self) -> dict[str, Tensor]:
        """Return those that were edited in place since, by name: those that versions tell, if it is not checked."""
        if self._named is not None:
            return self._edits.edited()
        owned = zip(self._owned, self._versions, strict=True)
        edited = [(owner, key, p) for (owner, key, p), version in owned if version_of(p) != version]
        return {f"{self._name_of(owner)}.{key}".removeprefix("."): p for owner, key, p in edited}

    def _name_of(self, module: nn.Module) -> str:
        return next(prefix for prefix, owner in self._owners if owner is module)

    def note(self) -> None:
        """Note their versions: they may not be changed in place from now on."""
        self._versions = [version_of(value) for value in self]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Give the module these parameters and its mode.

        Raises:
            RuntimeError: one was changed in place since, as autograd itself would.
        """
        for p, version in zip(self, self._versions, strict=True):
            check_version(p, version)
        others = [(o, key, o._parameters.get(key)) for o, key, p in self._owned if o._parameters.get(key) is not p]
        changed = [p for p, needed in zip(self, self._need_gradients, strict=True) if p.requires_grad != needed]
        flags = [(p, p.requires_grad) for p in dict.fromkeys(changed) if p.is_leaf]
        modes = [(owner, owner.training) for owner, mode in self._modes if owner.training != mode]
        try:
            for owner, key, p in self._owned if others else ():
                owner._parameters[key] = p
            for p, flag in flags:
                p.requires_grad_(not flag)
            for owner, mode in modes:
                owner.training = not mode
            yield
        finally:
            for owner, mode in modes:
                owner.training = mode
            for p, flag in flags:
                p.requires_grad_(flag)
            for owner, key, other in others:
                owner._parameters[key] = other


def held(owner: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a module itself holds, by name."""
    return [(key, value) for key, value in owner._parameters.items() if value is not None and not is_lazy(value)]


def named_parameters(owners: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield the parameters that modules hold: name, module, name in it, and itself; a shared one more than once."""
    for prefix, owner in owners:
        for key, value in held(owner):
            yield f"{prefix}.{key}".removeprefix("."), owner, key, value


def is_replaced(owner: nn.Module, key: str, before: nn.Parameter) -> bool:
    """Return whether a parameter is another object than before; not where FSDP2 has gathered its shards."""
    now = next((p for name, p in owner._parameters.items() if name == key), None)  # TorchScript's has no `get`
    return now is not before and type(now) is type(before) is nn.Parameter


class Attributes:
    """The plain Python attributes of a module as they are now; entered, those that can be put back are.

    Numbers, texts and tensors are put back when a call is made again; of tensors with a graph behind them, outputs of
    earlier calls, only the shape, unless somebody holds them. What else a call changes (a list that grows, an object)
    makes it one that cannot be.

    Args:
        owners: whose: modules by name.
        looks_inside: whether containers and objects are compared by what they hold, as deep as pickling would look.
    """

    def __init__(self, owners: Iterable[tuple[str, nn.Module]], *, looks_inside: bool = True) -> None:
        owners = tuple(owners)
        self._owners = [owner for _, owner in owners]
        self._before = [_Own(prefix, owner) for prefix, owner in owners if not is_of_torch(owner)]
        self._settings = LayerSettings(owners)
        self._inside: dict[int, ObjectState | None] = {}
        for own in self._before if looks_inside else ():
            for value in own.others.values():
                if id(value) not in self._inside:
                    self._inside[id(value)] = state_of(value)

    def changed(self, but_filled: bool) -> str | None:
        """Return the name of an attribute that the call has changed and that cannot be put back. Ends the call.

        Args:
            but_filled: do not count one that was empty before: a cache is filled once. A tensor that was edited in
                place counts, as it may be a sum.
        """
        found = next((own.name(key) for own in self._before for key in own.changed(but_replaced=but_filled)), None)
        for own in self._before:
            for key, value in own.others.items():
                if found is None and self._has_moved(value) and not (but_filled and self._is_empty(value)):
                    found = own.name(key)
        for own in self._before:
            own.end()
        self._inside.clear()
        return found

    def differences(self) -> list[str]:
        """Return the names of all attributes that have other values than before, or hold something else."""
        found = []
        for own in self._before:
            inside = [key for key, value in own.others.items() if self._has_moved(value, but_equal=True)]
            found += [own.name(key) for key in (*own.differences(), *inside)]
        return list(dict.fromkeys([*found, *self._settings.differences()]))

    def _is_empty(self, value: Any) -> bool:
        """Return whether a value was nothing yet, or a container of nothing."""
        before = self._inside.get(id(value)) if isinstance(value, _CONTAINERS) else None
        is_empty = before is not None and before.equals(ObjectState(type(value)()))
        return is_empty or value is None or value is _MISSING

    def _has_moved(self, value: Any, *, but_equal: bool = False) -> bool:
        """Return whether something has another state; `but_equal`: and reads differently."""
        if (before := self._inside.get(id(value))) is None:
            return False
        after = state_of(value)
        return after is None or not (before.reads_as(after) if but_equal else before.equals(after))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Give the modules the attributes that they had."""
        changed = [(own, others) for own in self._before if (others := own.differing())]
        latest = [(own, own.assign(others)) for own, others in changed]
        number = number_of_next_hook()
        try:
            with self._settings.again():
                yield
        finally:
            for own, others in latest:
                own.assign(others)
            remove_hooks_since(number, self._owners)  # which a call registers that finds its mark missing


_WITHOUT_SETTINGS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
"""Layers whose numbers say what shape they have."""


class LayerSettings:
    """Numbers and texts that torch's own layers hold (`Dropout.p`, `BatchNorm.momentum`), as they are now.

    Args:
        owners: modules by name; of users' classes none is read.
    """

    def __init__(self, owners: Sequence[tuple[str, nn.Module]]) -> None:
        first = {type(m): m for _, m in reversed(owners)}  # of a class, of which there are far fewer than modules
        keys = {kind: names for kind, m in first.items() if (names := _settings_of(m))}
        layers = ((name, vars(m), keys[type(m)]) for name, m in owners if type(m) in keys)
        self._before = [(name, held, names, tuple(map(held.get, names))) for name, held, names in layers]

    def _differing(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        for name, now, keys, before in self._before:
            for key, value in zip(keys, before, strict=True):
                if not _is_same(now.get(key), value):
                    yield name, now, key, value

    def differences(self) -> list[str]:
        """Return the names of those that are others now."""
        return [f"{name}.{key}".removeprefix(".") for name, _, key, _ in self._differing()]

    def restore(self) -> None:
        """Put them back."""
        for _, now, key, value in self._differing():
            now[key] = value

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Give layers the settings that they had."""
        changed = [(now, key, now.get(key), value) for _, now, key, value in self._differing()]
        for now, key, _, value in changed:
            now[key] = value
        try:
            yield
        finally:
            for now, key, latest, _ in changed:
                now[key] = latest


_PLAIN_SETTINGS = (bool, int, float, str, tuple, type(None))


def _settings_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of what a layer of torch is set to; none of one that only says what shape it has."""
    if not is_of_torch(module) or isinstance(module, _WITHOUT_SETTINGS):
        return ()
    held = ((key, value) for key, value in vars(module).items() if key[0] != "_" and key != "training")
    return tuple(key for key, value in held if isinstance(value, _PLAIN_SETTINGS) and is_immutable(value))


_MISSING = object()
_CONTAINERS = (list, dict, set)


class _Own:
    """The attributes of one module."""

    def __init__(self, prefix: str, owner: nn.Module) -> None:
        self._prefix, self._owner = prefix, owner
        self._kept: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        """Attributes that cannot be put back; held while the call runs alone."""
        for key, value in vars(owner).items():
            if key not in PARTS_OF_TORCH:
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    self._kept[key] = Stub(value)  # an output of an earlier call, which nobody reads, as a rule
                else:
                    (self._kept if isinstance(value, Tensor) or is_immutable(value) else self.others)[key] = value
        self._versions = [(k, v, version_of(v)) for k, v in self._kept.items() if isinstance(v, Tensor)]

    def name(self, key: str) -> str:
        return f"{self._prefix}.{key}".removeprefix(".")

    def changed(self, *, but_replaced: bool) -> Iterator[str]:
        """Yield attributes that were edited in place or, where that counts, replaced, and that cannot be put back."""
        current, others = vars(self._owner), {} if but_replaced else self.others
        yield from (key for key, value in others.items() if not _is_same(current.get(key, _MISSING), value))
        yield from (key for key, value, version in self._versions if version_of(value) != version)

    def differences(self) -> Iterator[str]:
        """Yield attributes that are others now; equal numbers, texts and small tensors are the same."""
        current, before = vars(self._owner), self._kept | self.others
        pairs = ((key, current.get(key, _MISSING), value) for key, value in before.items())
        yield from (key for key, now, value in pairs if not (_is_same(now, value) or have_same_values(now, value)))
        yield from current.keys() - before.keys() - PARTS_OF_TORCH
        yield from (key for key, value, version in self._versions if version_of(value) != version)

    def end(self) -> None:
        """End the call: what was not there before is taken away in a repetition."""
        for key in vars(self._owner).keys() - self._kept.keys() - self.others.keys() - PARTS_OF_TORCH:
            self._kept[key] = _MISSING
        self.others = {}

    def differing(self) -> dict[str, Any]:
        """Return what was kept of those that are others now."""
        current = vars(self._owner)
        kept = ((key, value, current.get(key, _MISSING)) for key, value in self._kept.items())
        others = {k: v for k, v, now in kept if not (v.stands_for(now) if isinstance(v, Stub) else now is v)}
        return {key: value.get() if isinstance(value, Stub) else value for key, value in others.items()}

    def assign(self, values: dict[str, Any]) -> dict[str, Any]:
        """Give the module these attributes, and return those that it had instead."""
        attributes = vars(self._owner)
        before = {key: attributes.pop(key, _MISSING) for key in values}
        attributes.update((key, value) for key, value in values.items() if value is not _MISSING)
        return before


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(second, Stub):
        return second.stands_for(first)
    if first is second or type(first) is not type(second):
        return first is second
    if isinstance(first, (list, tuple)):  # made anew with what it held, as by `[t.to(device) for t in ...]`
        return len(first) == len(second) and all(map(_is_same, first, second))
    return is_immutable(first) and bool(first == second)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether its class is torch's, where plain attributes are settings."""
    return is_class_of_torch(type(module))


def is_class_of_torch(kind: type[nn.Module]) -> bool:
    """Return whether a class of modules is torch's."""
    return kind.__module__.startswith("torch.")
