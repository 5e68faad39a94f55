"""What is private in Lightning, and its two names: `lightning.pytorch` and `pytorch_lightning`, with unrelated classes.

The package's classes are written against `lightning.pytorch`. `counterpart` makes the same classes for the other name,
from the same code; nothing else in the package tells the two apart. Private names were seen in Lightning 2.5 and 2.6;
`tests/strategies/test_lightning_compat.py` fails when one of them moves.
"""

from __future__ import annotations

import abc
import dis
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from lightning.pytorch import Trainer

from lightning_memsave.torch_internals.private_names import find

Batch: TypeAlias = Any
"""What a loader yields: tensors, in any containers and classes."""

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
_WRITTEN_FOR = NAMESPACES[0]
_LIGHTNINGS, _OURS = ("lightning.", "pytorch_lightning."), "lightning_memsave."

AutomaticOptimization = find("lightning.pytorch.loops.optimization.automatic._AutomaticOptimization")
Closure = find("lightning.pytorch.loops.optimization.automatic.Closure")
ClosureResult = find("lightning.pytorch.loops.optimization.automatic.ClosureResult")
block_sync = find("lightning.pytorch.loops.utilities._block_parallel_sync_behavior")


def namespace_of(obj: object) -> str:
    """Return the namespace that the class of `obj` comes from.

    Raises:
        TypeError: none of its classes is Lightning's.
    """
    for cls in type(obj).__mro__:
        for name in NAMESPACES:
            if cls.__module__.startswith(f"{name}."):
                return name
    raise TypeError(f"{type(obj).__name__} is not a Lightning object")


def callbacks_of(trainer: Trainer) -> list[Any]:
    """Return the callbacks of a trainer, which Lightning sets outside of its class."""
    found: Any = trainer
    return found.callbacks  # type: ignore[no-any-return]  # a list


def kinds_of(obj: object) -> set[str]:
    """Return the names of the classes that an object is of: Lightning's are imported by two names."""
    return {cls.__name__ for cls in type(obj).__mro__}


def callbacks_named(trainer: Trainer, *names: str) -> list[Any]:
    """Return the callbacks of a trainer that are of one of Lightning's classes."""
    return [each for each in callbacks_of(trainer) if kinds_of(each).intersection(names)]


def data_module_of(trainer: Trainer) -> Any:
    """Return the data module that a trainer was given, or `None`."""
    found: Any = trainer
    return found.datamodule


def session_of(trainer: Trainer) -> Any:
    """Return the session of a trainer whose strategy has one (`loops.session`)."""
    strategy: Any = trainer.strategy
    return strategy.memsave


def ddp_options_of(strategy: object) -> dict[str, Any]:
    """Return the arguments that a strategy was given for DDP."""
    return getattr(strategy, "_ddp_kwargs", {})


def has_ddp_hook(strategy: object) -> bool:
    """Return whether a strategy was given a communication hook for DDP."""
    return getattr(strategy, "_ddp_comm_hook", None) is not None


def is_tensor_parallel(strategy: object) -> bool:
    """Return whether a strategy was told to divide tensors among processes."""
    return getattr(strategy, "_tensor_parallel_size", 1) not in (1, "auto")


def is_tuned(trainer: Trainer) -> bool:
    """Return whether a callback of Lightning's tuner ends this fit early, and puts back what it has saved."""
    return any(getattr(callback, "_early_exit", False) for callback in callbacks_of(trainer))


def bucket_bytes_of(strategy: object) -> int | None:
    """Return the size of DDP's buckets that a strategy was given, or `None`."""
    megabytes = ddp_options_of(strategy).get("bucket_cap_mb")
    return None if megabytes is None else int(2**20 * megabytes)


def loaders_of(trainer: Any) -> Any:
    """Return what the source of a trainer's training data returns: a loader, or a nest of them."""
    connector = import_module(f"{namespace_of(trainer.strategy)}.trainer.connectors.data_connector")
    return connector._request_dataloader(trainer.fit_loop._data_source)


def is_compiled(module: object) -> bool:
    """Return whether a LightningModule was compiled as a whole before it was handed to the trainer."""
    return getattr(module, "_compiler_ctx", None) is not None


def is_overridden(owner: Any, hook: str) -> bool:
    """Return whether a user's class of a module, callback or strategy defines a hook of Lightning's."""
    others = (cls for cls in type(owner).__mro__ if not cls.__module__.startswith(_OURS))
    defined_in = next((cls for cls in others if hook in vars(cls)), None)  # a mock has none
    return defined_in is not None and not defined_in.__module__.startswith(_LIGHTNINGS)


def has_hook(owner: Any, hook: str) -> bool:
    """Return whether a hook of Lightning's is defined by a user's class, or set on the object (`LambdaCallback`)."""
    return hook in vars(owner) or is_overridden(owner, hook)


def says_grad(method: object) -> bool:
    """Return whether the code of a function says `.grad`, `getattr(..., "grad")`, or Lightning's `grad_norm`."""
    return any(map(_says_grad, _codes_of(method)))


def _says_grad(code: CodeType) -> bool:
    read = any(step.opname in _READS and step.argval == "grad" for step in dis.get_instructions(code))
    by_name = ("getattr" in code.co_names and "grad" in code.co_consts) or "grad_norm" in code.co_names
    return (read and "autograd" not in code.co_names) or by_name


_READS = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")


def reaches_grad(owner: object, hook: str) -> bool:
    """Return whether a hook says `.grad`, or a method or function of the user's that it calls by name."""
    spaces = [vars(cls) for cls in type(owner).__mro__ if cls.__module__.partition(".")[0] not in _LIBRARIES]
    waiting: list[Any] = [space.get(hook) for space in spaces]
    seen = set[FunctionType]()
    while waiting:
        function = inspect.unwrap(found) if callable(found := waiting.pop()) else getattr(found, "__func__", None)
        if not isinstance(function, FunctionType) or function in seen:
            continue
        if str(function.__module__).partition(".")[0] in _LIBRARIES:
            continue
        seen.add(function)
        for code in _codes_of(function):
            if _says_grad(code):
                return True
            known = [function.__globals__.get(name) for name in code.co_names]
            inside = [*spaces, *(vars(each) for each in known if isinstance(each, ModuleType))]
            waiting += [*known, *(space.get(name) for name in code.co_names for space in inside)]
    return False


_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "numpy", "transformers")


def edits_grad(owner: object, hook: str) -> bool:
    """Return whether a hook, or a method that it names, may change a `.grad`: sets it, clips, or edits in place."""
    names, codes, waiting = set[str](), [], [hook]
    while waiting:
        name = waiting.pop()
        method = getattr(type(owner), name, None)
        if name in names or method is None or str(getattr(method, "__module__", "")).startswith(_LIGHTNINGS):
            continue
        names.add(name)
        found = list(_codes_of(method))
        codes += found
        waiting += [each for code in found for each in code.co_names]
    said = {name for code in codes for name in code.co_names}
    if any("clip_grad" in name for name in said):
        return True
    steps = [step for code in codes for step in dis.get_instructions(code)]
    is_set = any(step.opname == "STORE_ATTR" and step.argval in ("grad", "data") for step in steps)
    is_set |= any(step.opname == "STORE_SUBSCR" for step in steps)
    in_place = any(name.endswith("_") and not name.endswith("__") for name in said)
    return "grad" in said and (is_set or in_place)


def _codes_of(method: object) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions inside of it."""
    waiting = [method.__code__] if hasattr(method, "__code__") else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting.extend(each for each in code.co_consts if isinstance(each, CodeType))


def has_own_loop(trainer: Trainer) -> bool:
    """Return whether somebody has put a loop of automatic optimization of their own in the place of Lightning's."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    return not type(loop).__module__.startswith((*_LIGHTNINGS, _OURS))


# ------------------------------------------------------------------------------- one class, for either namespace
_COUNTERPARTS: dict[tuple[type, str], type] = {}
_NOT_COPIED = {"__dict__", "__weakref__", "_abc_impl"}


def counterpart(cls: Any, namespace: str) -> Any:
    """Return the class that `cls` would be if it was written against `namespace`.

    Its bases and the names that its functions read are those of the namespace, where they are Lightning's or have
    counterparts themselves; the code of its functions is the same.

    Args:
        cls: of this package, derived from a class of `lightning.pytorch`.
        namespace: one of `NAMESPACES`.
    """
    if namespace == _WRITTEN_FOR:
        return cls
    if (cls, namespace) not in _COUNTERPARTS:
        bases = tuple(_translated(base, namespace) for base in cls.__bases__)
        made = type(cls)(cls.__name__, bases, {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
        _COUNTERPARTS[cls, namespace] = made  # before its functions, which may read its own name
        names = _Names(vars(sys.modules[cls.__module__]), namespace)
        for name, value in vars(cls).items():
            if name not in _NOT_COPIED:
                setattr(made, name, _rebound(value, cls, made, names))
        abc.update_abstractmethods(made)
    return _COUNTERPARTS[cls, namespace]


class _Names(dict[str, Any]):
    """The names of a module, with counterparts in place of what has some."""

    def __init__(self, module: Mapping[str, Any], namespace: str) -> None:
        super().__init__(module)
        for name, value in module.items():
            if isinstance(value, (type, FunctionType)):
                self[name] = _translated(value, namespace)


def _translated(value: Any, namespace: str) -> Any:
    """Return what stands for a class or a function in a namespace."""
    if value.__module__.startswith(f"{_WRITTEN_FOR}."):
        module = import_module(value.__module__.replace(_WRITTEN_FOR, namespace, 1))
        return getattr(module, value.__name__)
    is_ours = isinstance(value, type) and value.__module__.startswith("lightning_memsave.")
    if is_ours and any(base.__module__.startswith(f"{_WRITTEN_FOR}.") for base in value.__mro__):
        return counterpart(value, namespace)
    return value


def _rebound(value: Any, cls: type, made: type, names: _Names) -> Any:
    """Return a function, or what holds some, with `made` in place of `cls` for `super()`, and with other names."""
    if isinstance(value, property):
        return property(*(_rebound(each, cls, made, names) for each in (value.fget, value.fset, value.fdel)))
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(_rebound(value.__func__, cls, made, names))
    if not isinstance(value, FunctionType):
        return value
    cells = [CellType(_in_cell(cell.cell_contents, cls, made, names)) for cell in value.__closure__ or ()]
    namespace = names if value.__module__ == cls.__module__ else value.__globals__
    function = FunctionType(value.__code__, namespace, value.__name__, value.__defaults__, tuple(cells) or None)
    for attribute in ("__kwdefaults__", "__qualname__", "__doc__", "__module__"):
        setattr(function, attribute, getattr(value, attribute))
    return function


def _in_cell(value: Any, cls: type, made: type, names: _Names) -> Any:
    return made if value is cls else _rebound(value, cls, made, names)
