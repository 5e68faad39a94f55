"""What a call depends on besides its arguments: put back when the call is made again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.vault.graph import compiler_callback, compiling

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
        return torch.equal(self._cpu, other._cpu) and all(
            torch.equal(state, other._others[d]) for d, state in self._others.items()
        )

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


class Surroundings:
    """Autocast, the default device and Dynamo's callback, as they are now; entered, they hold again.

    Without the callback, what was compiled in a compiled module's region would be eager in its repetition.
    """

    def __init__(self, device_types: Iterable[str]) -> None:
        self._device, self._compiler = torch.get_default_device(), compiler_callback()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in sorted({"cpu", *device_types})
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """These surroundings."""
        with contextlib.ExitStack() as stack:
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            for settings in self._autocast:
                stack.enter_context(torch.autocast(*settings))
            with compiling(self._compiler):
                yield


_Buffer = tuple[nn.Module, str, Tensor]


class Buffers:
    """Clones of the buffers of a module that a call may change; while they are entered, the module has these.

    A second run of a call then reads the buffers that the first one read, and changes none twice: BatchNorm's running
    statistics are updated once (https://github.com/pytorch/pytorch/issues/96136), spectral norm iterates once.

    Args:
        module: whose buffers.
        changing: names of those that change, which the first call finds out; normalisation layers' always do.
    """

    def __init__(self, module: nn.Module, changing: set[str] | None) -> None:
        self._before: dict[str, _Buffer] = {}
        for prefix, owner in module.named_modules():
            always = isinstance(owner, nn.modules.batchnorm._NormBase) and owner.training
            for key, value in owner._buffers.items():
                name = f"{prefix}.{key}"
                if value is not None and (always or changing is None or name in changing):
                    self._before[name] = owner, key, value.detach().clone()

    def changed(self) -> set[str]:
        """The names of those that have changed since; the others are forgotten."""
        found = {name for name, (owner, key, before) in self._before.items() if not _equal(owner._buffers[key], before)}
        for name in self._before.keys() - found:
            del self._before[name]
        return found

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The module has (clones of) these buffers; a double backward comes here twice."""
        after = [(owner, key, owner._buffers[key]) for owner, key, _ in self._before.values()]
        for owner, key, value in self._before.values():
            owner._buffers[key] = value.clone()
        try:
            yield
        finally:
            for owner, key, latest in after:
                owner._buffers[key] = latest


def _equal(current: Tensor | None, before: Tensor) -> bool:
    return current is not None and torch.equal(current, before)


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
            but_filled: do not count one that was missing or `None` before: a cache is filled once.
        """
        for prefix, key, value in self._attributes():
            before = self._values.get((prefix, key), _NOTHING)
            if not (but_filled and before in (_NOTHING, _fingerprint(None))) and before != _fingerprint(value):
                return f"{prefix}.{key}".removeprefix(".")
        return None


_NOTHING: tuple[Any, ...] = ()


def _fingerprint(value: Any) -> tuple[Any, ...]:
    """Equal for equal numbers and texts, and for containers and tensors that nobody has changed in between."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, (list, tuple, set)):
        return type(value), *map(id, value)
    if isinstance(value, dict):
        return type(value), *((id(k), id(v)) for k, v in value.items())
    return (id(value),)
