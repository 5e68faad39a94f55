"""Random generators: their states are kept, so that what drew from them once can draw the same again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.torch_internals.containers import CONTAINERS, values

_MOST_OBJECTS = 10_000  # that are looked through for generators
_MT19937_BYTES = 625 * 4


class Randomness:
    """The states of generators: torch's of the CPU and of `devices`, Python's, numpy's, and `private` ones.

    Args:
        devices: whose generators count; the CPU's always does.
        private: generators that somebody made: of torch, of `random`, of numpy (see `generators_in`).

    Example:
        >>> before = Randomness([])
        >>> first = random.random()
        >>> before.equals(Randomness([]))
        False
        >>> before.restore()
        >>> first == random.random()
        True
    """

    def __init__(self, devices: Iterable[torch.device], private: Iterable[Any] = ()) -> None:
        self.devices = frozenset(device for device in devices if device.type not in ("cpu", "meta"))
        self._cpu = torch.get_rng_state()
        self._others = {d: torch.get_device_module(d).get_rng_state(d) for d in self.devices}
        self._python, self._numpy = random.getstate(), _numpy_state()
        self._private = [(generator, _state_of(generator)) for generator in private]

    @property
    def private(self) -> list[Any]:
        """The generators that somebody made."""
        return [generator for generator, _ in self._private]

    def now(self) -> Randomness:
        """Return the same generators, as they are now."""
        return Randomness(self.devices, self.private)

    def equals(self, other: Randomness) -> bool:
        """Return whether both are of the same generators, and no number was drawn between the two."""
        return (
            self.devices == other.devices
            and list(map(id, self.private)) == list(map(id, other.private))
            and _bytes(self._cpu) == _bytes(other._cpu)
            and all(_bytes(state) == _bytes(other._others[d]) for d, state in self._others.items())
            and self._python == other._python
            and (self._numpy is None or other._numpy is None or self._numpy[0] == other._numpy[0])
            and all(mine[1] == theirs[1] for mine, theirs in zip(self._private, other._private, strict=True))
        )

    def restore(self) -> None:
        """Let the generators go on from here."""
        torch.set_rng_state(self._cpu)
        for device, state in self._others.items():
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy[1])
            _latest.clear()  # its pair of normal numbers may be another, of the same bytes
        for generator, private_state in self._private:
            _set_state(generator, private_state)

    @classmethod
    @contextlib.contextmanager
    def untouched(cls, devices: Iterable[torch.device] = (), private: Iterable[Any] = ()) -> Iterator[None]:
        """Restore the generators at the end, whatever is drawn inside."""
        before = cls(devices, private)
        try:
            yield
        finally:
            before.restore()


def _bytes(state: Tensor) -> bytes:
    """Return the bytes of a generator's state, compared without an operation, so among fake tensors as well."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


# ---------------------------------------------------------------------------------------------------- numpy
_NumpyState = tuple[Any, Any]
_latest: list[_NumpyState] = []
"""The state of numpy's global generator that was read last: its bytes, and what numpy makes of them, which is slow."""


def _numpy_state() -> _NumpyState | None:
    """Return the global generator's identity and state; `None` where nobody has imported numpy."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    generator = numpy.random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        state = numpy.random.get_state(legacy=False)
        return pickle.dumps(state), state
    raw = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    # Normal numbers are made in pairs: the second one is drawn without a change of these bytes.
    if not _latest or _latest[0][0][0] != raw or _latest[0][1]["has_gauss"]:
        state = numpy.random.get_state(legacy=False)
        _latest[:] = [((raw, state["has_gauss"], state["gauss"]), state)]
    return _latest[0]


# ------------------------------------------------------------------------------- generators of users
def generators_in(*owners: Any) -> list[Any]:
    """Return the generators that objects hold in attributes, containers, and plain objects inside of these; each once.

    Of modules, those in their own attributes; name the modules inside as well.

    >>> class Augment:
    ...     def __init__(self):
    ...         self.draws = {"flip": random.Random(0)}
    >>> len(generators_in(Augment()))
    1
    """
    found: dict[int, Any] = {}
    seen, todo = set[int](), list(owners)
    is_owner = set(map(id, owners))
    while todo and len(seen) < _MOST_OBJECTS:
        each = todo.pop()
        if id(each) in seen or isinstance(each, _WITHOUT):
            continue
        seen.add(id(each))
        if is_generator(each):
            found[id(each)] = each
        else:
            # Most values are atoms: these are left out without being looked at one by one.
            todo += [value for value in _held_by(each, id(each) in is_owner) if type(value) not in _ATOMS]
    return list(found.values())


def _held_by(each: Any, is_owner: bool) -> Iterable[Any]:
    """Return what an object holds, as far as generators of users may be among it."""
    if type(each) in CONTAINERS:
        return values(each)
    if isinstance(each, functools.partial):  # asked for its `__dict__`, it makes one, which is a change
        return *each.args, *each.keywords.values()
    if isinstance(each, nn.Module):
        return [value for key, value in vars(each).items() if key not in PARTS_OF_TORCH] if is_owner else ()
    return vars(each).values() if hasattr(each, "__dict__") and not is_of_a_library(each) else ()


PARTS_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that torch gives to each module: parameters, buffers, children, hooks."""
_WITHOUT = (Tensor, str, bytes, int, float, complex, type, type(None), type(sys), type(len), type(_bytes))
_ATOMS = frozenset((*_WITHOUT, bool, nn.Parameter))
_LIBRARIES = frozenset(["torch", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "logging"])


def is_of_a_library(value: Any) -> bool:
    """Return whether it is of a library that holds no generators of users: Lightning's trainer leads to everything."""
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def is_generator(value: Any) -> bool:
    """Return whether it is a random generator whose state can be kept."""
    if torch.Generator in type(value).__mro__:  # `isinstance` runs Python code, which Dynamo would compile
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    of_numpy = generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state
    return pickle.dumps(of_numpy)


def _set_state(generator: Any, state: bytes) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))  # written above
    elif hasattr(generator, "set_state"):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)
