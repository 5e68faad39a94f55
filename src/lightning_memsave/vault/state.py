"""What a call depends on besides its arguments: put back when the call is made again."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.vault.graph import check_version, compiler_callback, compiling, version_of

_PARTS_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # parameters, buffers, children, hooks


class Randomness:
    """The state of torch's generators: the CPU's, and those of `devices`.

    Python's `random` and numpy's generators are not among them: torch's own checkpoint leaves them alone as well.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = frozenset(device for device in devices if device.type not in ("cpu", "meta"))
        self._cpu = torch.get_rng_state()
        self._others = {d: torch.get_device_module(d).get_rng_state(d) for d in self.devices}

    def equals(self, other: Randomness) -> bool:
        """Whether no number was drawn between the two."""
        is_same = self.devices == other.devices and _bytes(self._cpu) == _bytes(other._cpu)
        return is_same and all(_bytes(state) == _bytes(other._others[d]) for d, state in self._others.items())

    def restore(self) -> None:
        """Let the generators go on from here."""
        torch.set_rng_state(self._cpu)
        for device, state in self._others.items():
            torch.get_device_module(device).set_rng_state(state, device)

    @classmethod
    @contextlib.contextmanager
    def untouched(cls, devices: Iterable[torch.device]) -> Iterator[None]:
        """The generators leave as they came."""
        before = cls(devices)
        try:
            yield
        finally:
            before.restore()


def _bytes(state: Tensor) -> bytes:
    """Of a generator's state, which lies on the CPU; compared without an operation, so among fake tensors as well."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class Surroundings:
    """Autocast, the default device, the kernels allowed, and Dynamo's callback, as they are now; entered, they hold.

    Without the callback, what was compiled in a compiled module's region would be eager in its repetition.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._device, self._compiler = torch.get_default_device(), compiler_callback()
        self._allowed = _allowed()
        kinds = {"cpu", *(device.type for device in devices)}
        self._autocast = [_autocast_of(kind) for kind in kinds if torch.amp.is_autocast_available(kind)]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """These surroundings."""
        with contextlib.ExitStack() as stack:
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
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
    """Which kernels may be used, which keep different tensors.

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


class Weights:
    """The parameters that a call computes with: those of `module`, and the mode that it is in.

    Autograd notices changes of the parameters that it keeps; a repetition computes with all of them. Others may have
    been lent for one forward (`torch.func.functional_call`). Whether they take gradients, and whether a module trains,
    says what its forward does and keeps.

    Args:
        module: whose.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = list(module.modules())
        self._modes = [(owner, owner.training) for owner in owners]
        self._owned = [
            (owner, key, value)
            for owner in owners
            for key, value in owner._parameters.items()
            if value is not None and not is_lazy(value)
        ]
        self._need_gradients = [value.requires_grad for _, _, value in self._owned]
        self._versions: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        return (value for _, _, value in self._owned)

    @property
    def devices(self) -> set[torch.device]:
        """Where they are."""
        return {value.device for value in self}

    def note(self) -> None:
        """They may not be changed in place from now on."""
        self._versions = [version_of(value) for value in self]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The module has these parameters, and is in its mode.

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


class Attributes:
    """The plain Python attributes of a module as they are now.

    Args:
        module: whose.
        recurse: whether those of all modules inside as well.
    """

    def __init__(self, module: nn.Module, *, recurse: bool = True) -> None:
        self._modules = list(module.named_modules()) if recurse else [("", module)]
        self._values = {(prefix, key): _fingerprint(value) for prefix, key, value in self._attributes()}

    def _attributes(self) -> Iterator[tuple[str, str, Any]]:
        for prefix, owner in self._modules:
            for key, value in vars(owner).items():
                if key not in _PARTS_OF_TORCH:
                    yield prefix, key, value

    def changed(self, but_filled: bool) -> str | None:
        """The name of an attribute that has changed since.

        Args:
            but_filled: do not count one that was missing, `None` or empty before: a cache is filled once.
        """
        for prefix, key, value in self._attributes():
            before = self._values.get((prefix, key), _NOTHING)
            if not (but_filled and before in _UNFILLED) and before != _fingerprint(value):
                return f"{prefix}.{key}".removeprefix(".")
        return None


_NOTHING: tuple[Any, ...] = ()


def _fingerprint(value: Any) -> tuple[Any, ...]:
    """Equal for equal numbers and texts, and for containers and tensors that nobody has changed in between."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if isinstance(value, tuple):
        return type(value), *map(_fingerprint, value)
    if isinstance(value, (list, set)):
        return type(value), *map(id, value)
    if isinstance(value, dict):
        return type(value), *((id(k), id(v)) for k, v in value.items())
    return (id(value),)


_UNFILLED = [_NOTHING, *map(_fingerprint, (None, [], set(), {}))]
