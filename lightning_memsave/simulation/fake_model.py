"""Fake tensors: run a training step for its shapes alone, without memory and without a device's time.

The model is not copied: its parameters, buffers and gradients are exchanged for fake ones in place, and come back.
Recurrent layers keep their parameters a second time, in `_flat_weights` and `_flat_weight_refs`.

A step that reads values (`.item()`, a branch on a sum) raises, unless they follow from the batch's integers
(`value_propagation`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import sys
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memsave.simulation.known_sizes import pad_packed_sequence
from lightning_memsave.simulation.value_propagation import FactsMode, forget_values, note_values
from lightning_memsave.torch_internals.containers import nested, refill
from lightning_memsave.torch_internals.coupling import held_by
from lightning_memsave.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from lightning_memsave.torch_internals.held_optimizers import with_held
from lightning_memsave.torch_internals.model_copies import copied

_FLAT_WEIGHTS, _FLAT_REFERENCES = "_flat_weights", "_flat_weight_refs"


@contextlib.contextmanager
def fake_tensors(model: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Make `model` of fake tensors while entered; what operations return is fake as well.

    Yields:
        A function that gives a nest of containers with fake tensors in place of real ones; the same for the same.

    Example:
        >>> model = nn.Linear(1000, 1000)
        >>> with fake_tensors(model) as fake:
        ...     model(fake(torch.ones(10**6, 1000))).shape
        torch.Size([1000000, 1000])
    """
    exchange = _Exchange()
    try:
        exchange.enter(model)
        with exchange.mode, FactsMode(), hidden_from_transformers(), unlogged():
            yield exchange.of_known
    finally:
        exchange.leave()


class _Exchange:
    """Fake tensors in place of real ones, one for each."""

    def __init__(self, mode: FakeTensorMode | None = None, device: torch.device | str | None = None) -> None:
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._bases: dict[tuple[int, torch.dtype], Tensor] = {}  # one for each real storage
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the real one, which is kept to keep its id
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._containers: list[tuple[Any, Any]] = []

    def of(self, tree: Any) -> Any:
        """Return the same nest of containers with fake tensors."""
        return tree_map(self._leaf, tree)

    def of_known(self, tree: Any) -> Any:
        """Return the same, of which is known what integers they hold."""
        found = self.of(tree)
        for real, fake in self._fakes.values():
            note_values(fake, real)
        return found

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._fake_of(leaf)
        if isinstance(leaf, UserDict):  # transformers' BatchEncoding
            return self._copy_with(leaf, {"data": self.of(dict(leaf.data))})
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return self._copy_with(leaf, {key: self.of(value) for key, value in vars(leaf).items()})
        return leaf

    @staticmethod
    def _copy_with(leaf: Any, changes: dict[str, Any]) -> Any:
        other = copy.copy(leaf)
        for key, value in changes.items():
            object.__setattr__(other, key, value)  # also where a dataclass is frozen
        return other

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._fakes:
            fake = self._made(tensor)
            if tensor.is_leaf and tensor.grad_dtype != fake.grad_dtype:
                fake.grad_dtype = tensor.grad_dtype
            if tensor.is_leaf and tensor.grad is not None:
                fake.grad = self._fake_of(tensor.grad)
            self._fakes[id(tensor)] = tensor, fake
        return self._fakes[id(tensor)][1]

    def _made(self, tensor: Tensor) -> Tensor:
        any_tensor: Any = tensor
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(any_tensor):
            return self.mode.from_tensor(tensor)
        key = tensor.untyped_storage()._cdata, tensor.dtype
        if key not in self._bases:
            self._bases[key] = _fake(tensor, self.mode, self._device)
            return self._bases[key]
        with self.mode, torch.no_grad():  # it shares memory with an earlier one
            view = self._bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
        return _like(tensor, view)

    def enter(self, model: nn.Module) -> None:
        """Put fake tensors into a model."""
        for module in model.modules():
            self._containers += [(container, copy.copy(container)) for container in _containers(module)]
        for module in model.modules():
            for owner in (module._parameters, module._buffers):
                for key in owner:
                    self._put(owner, key)
            for name, how in ((_FLAT_WEIGHTS, tree_map), (_FLAT_REFERENCES, _weakly)):
                if name in vars(module):
                    self._put(vars(module), name, how)

    def _put(self, owner: dict[str, Any], key: str, how: Callable[[Any, Any], Any] = tree_map) -> None:
        self._before.append((owner, key, owner[key]))
        owner[key] = how(self._leaf, owner[key])

    def leave(self) -> None:
        """Put the real ones back, and with them the attributes of every module as they were.

        A cache that a forward filled inside holds fake tensors; left there, training would go on with them and change
        nothing, without an error.
        """
        for owner, key, value in reversed(self._before):
            owner[key] = value
        for container, before in self._containers:
            refill(container, before)


def _weakly(exchange: Callable[[Any], Any], references: list[Any]) -> list[Any]:
    """Return weak references to what takes the place of what these refer to."""
    held = [reference and reference() for reference in references]  # one may have died: its weight was replaced
    return [r if t is None else weakref.ref(exchange(t)) for r, t in zip(references, held, strict=True)]


def _containers(module: nn.Module) -> Iterator[Any]:
    """Yield the attributes of a module, and containers among them, in each other: where a forward may leave tensors."""
    yield vars(module)
    for value in vars(module).values():  # parameters and buffers are such dictionaries
        yield from nested(value, math.inf)[0]


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str | None = None) -> Tensor:
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    with mode, torch.no_grad():
        fake = torch.empty(num_elements, dtype=tensor.dtype, device=tensor.device if device is None else device)
        fake = fake.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
    return _like(tensor, fake)


def _like(tensor: Tensor, fake: Tensor) -> Tensor:
    """Return a fake tensor of the same kind, parameter or not."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return bytes of state that an optimizer holds from its first step on.

    Found by a step on fake tensors if it has none.

    Where that step cannot be made without values, what it made until then: often everything.
    """
    if held := with_held([optimizer])[1:]:  # a step of a copy would step them
        return sum(optimizer_state_bytes(each) for each in held if not held_by(each))
    return _state_bytes(optimizer.state) or sum(_rehearsed_bytes(optimizer, group) for group in optimizer.param_groups)


def _rehearsed_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Return the bytes of state of a group, from two parameters of each kind where each gets a state of its own."""
    parameters = [p for p in group["params"] if p.requires_grad]
    kinds: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for p in parameters:
        kinds[type(p), p.shape, p.stride(), p.dtype, p.device].append(p)
    tried = [p for alike in kinds.values() for p in alike[:2]]
    fakes, state = _rehearse(optimizer, group, tried)
    if len(state) == len(fakes) and all(fake in state for fake in fakes):
        own = {p: _state_bytes({fake: state[fake]}) for p, fake in zip(tried, fakes, strict=True)}
        return sum(len(alike) * own[alike[0]] for alike in kinds.values())
    return _state_bytes(_rehearse(optimizer, group, parameters)[1])


def _rehearse(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[Tensor]
) -> tuple[list[Tensor], dict[Any, Any]]:
    """Step a copy of an optimizer on fake parameters; return these and the state that this made."""
    rehearsing = copy.copy(optimizer)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    rehearsing.state = defaultdict(dict)
    fakes = [_with_gradient(p, mode) for p in parameters]
    rehearsing.param_groups = [{**group, "params": fakes}]
    # A kernel of its own, a closure, or a value that it reads: torch's Adafactor does, when its state is made.
    with contextlib.suppress(Exception), mode:
        type(optimizer).step(rehearsing)
    return fakes, rehearsing.state


def _state_bytes(state: dict[Any, Any]) -> int:
    storages = {
        leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(list(state.values()))
        if isinstance(leaf, Tensor)
    }
    return sum(storages.values())


def _with_gradient(parameter: Tensor, mode: FakeTensorMode) -> Tensor:
    fake = _fake(parameter, mode)
    fake.grad = _fake(parameter.detach(), mode)
    return fake


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of a model that is made of fake tensors on the CPU.

    The model stays as it is, and no memory is taken.

    Args:
        model: of real tensors, of the meta device's, or of fake ones of the same `mode`.
        mode: of the fake tensors.
    """
    exchange = _Exchange(mode, "cpu")
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                memo[id(tensor)] = exchange.of(tensor)
    for fake in memo.values():
        fake.grad = None
    with Copying(exchange.of):
        return copied(model, memo)


def fakes_of(tree: Any, mode: FakeTensorMode) -> Any:
    """Return a nest of containers with fake tensors on the CPU, of which is known what integers they may hold."""
    return _Exchange(mode, "cpu").of_known(tree)


_CONVERSIONS = {
    *(Tensor.to, Tensor.type, Tensor.bfloat16, Tensor.half, Tensor.float, Tensor.double),
    *(Tensor.detach, Tensor.requires_grad_),
}


class Copying(TorchFunctionMode):
    """`copy.deepcopy` of a tensor calls `copied` while this is entered: torch's own way fails among fake tensors.

    So does the conversion of a module, which swaps its parameters: the fake mode remembers what it has made by weak
    references (`fake_tensor_converter`, private, seen in torch 2.13), as do known values, and what has some cannot be
    swapped.

    Args:
        copied: by default, another fake tensor like a fake one.
    """

    def __init__(self, copied: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self._copied = copied or _copied

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `copied` for copies, forget values after conversions, and run nearly any other function as it is."""
        if func in (Tensor.__deepcopy__, nn.Parameter.__deepcopy__):
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._copied(tensor)
            return memo[id(tensor)]
        if func is torch._VF._pad_packed_sequence:
            return pad_packed_sequence(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in _CONVERSIONS and isinstance(out, FakeTensor):
            out.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
            if isinstance(args[0], nn.Parameter) and func is not Tensor.detach:
                for tensor in (args[0], out):
                    forget_values(tensor)
        return out


def _copied(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return _like(tensor, tensor.detach().clone())


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Silence torch's errors about missing kernels for shapes alone: a log's handler may keep frames with tensors.

    Whoever tries fake tensors first has another way then.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def hidden_from_transformers() -> Iterator[None]:
    """Hide fake tensors from transformers, which has other code for them that takes more memory.

    Private name of transformers (seen in 5.23).
    """
    module = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if module is None or before is None:
        yield
        return
    module.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]  # told by `getattr`
    try:
        yield
    finally:
        module.is_fake_tensor = before  # type: ignore[attr-defined]  # as above
