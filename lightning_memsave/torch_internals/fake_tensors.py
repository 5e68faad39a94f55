"""Tensors with a shape and no values, on which a step is run to predict its memory (torch's fake tensors).

Where the size of something depends on values, code asks here what is known of them. Facts are noted by whoever runs the
step (`simulation.value_propagation`); without any, the answer is the one that takes more bytes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memsave.torch_internals.private_names import find

T = TypeVar("T")

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
else:
    DataDependentOutputException = find("torch._subclasses.fake_tensor.DataDependentOutputException")
    FakeTensor = find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = find("torch._subclasses.fake_tensor.FakeTensorMode")
    unset_fake_temporarily = find("torch._subclasses.fake_tensor.unset_fake_temporarily")


class Facts(NamedTuple):
    """What is known of the values in a storage; `None` for what is not."""

    low: int | None = None
    """A bound below all integers or booleans."""
    high: int | None = None
    """A bound above them."""
    num_values: int | None = None
    """How many different values there are at most: two in dropout's noise or an attention mask."""


UNKNOWN = Facts()
_facts: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.dtype, Facts]] = {}
_num_set = WeakIdKeyDictionary()


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape and no values."""
    return isinstance(tensor, FakeTensor)


ASKS_DEVICE = torch.ops.prim.device.default
"""What torch runs to ask a fake tensor for its device, in every operation more than once.

It is no operation of a step. An error that a dispatch mode raises there ends the process: autograd asks in C++ where
nothing may be raised (`InputMetadata`; seen in torch 2.11 and 2.13).
"""


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor; of a fake one without running `ASKS_DEVICE`, which costs as an operation does."""
    device: torch.device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device


def is_plain(tensor: Tensor, kind: type = Tensor) -> bool:
    """Return whether a tensor is of torch's own `kind`, of no subclass and not nested.

    A fake one stands for such a tensor. One that was made in inference mode is not plain: nobody counts its edits.
    """
    is_kind = type(tensor) is kind or (is_fake(tensor) and isinstance(tensor, kind))
    return is_kind and not tensor.is_nested and not tensor.is_inference()


def truth(condition: Tensor, otherwise: bool) -> bool:
    """Return whether `condition` holds; `otherwise` where it has no value."""
    return otherwise if is_fake(condition) else bool(condition)


def with_values(function: Callable[[], T]) -> T:
    """Call a function that computes with tensors of its own, in a thread, where no mode makes them fake."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


_num_alike = 1


def num_alike() -> int:
    """Return how many times what runs at present would run with values."""
    return _num_alike


@contextlib.contextmanager
def standing_for(num: int) -> Iterator[None]:
    """Let what runs inside count as `num` runs, which are all the same where there are no values."""
    global _num_alike
    before, _num_alike = _num_alike, num
    try:
        yield
    finally:
        _num_alike = before


def note(tensor: Tensor, facts: Facts) -> None:
    """Remember what is known of the values of a fake tensor, in its dtype, until its storage dies."""
    storage, facts = tensor.untyped_storage(), _that_fit(facts, tensor.dtype)
    address = storage._cdata
    if facts == UNKNOWN:
        _facts.pop(address, None)
    else:
        _facts[address] = weakref.ref(storage, lambda _: _facts.pop(address, None)), tensor.dtype, facts


def _that_fit(facts: Facts, dtype: torch.dtype) -> Facts:
    """Return facts of numbers once they are of a dtype: booleans are 0 or 1, and integers that are too large wrap."""
    low, high = facts.low, facts.high
    if low is None or high is None:
        return facts
    if dtype == torch.bool:
        is_true = low > 0 or high < 0
        return Facts(1, 1, 1) if is_true else Facts(0, 0, 1) if low == high == 0 else Facts(0, 1, facts.num_values)
    if not dtype.is_floating_point and not dtype.is_complex:
        info = torch.iinfo(dtype)
        if low < info.min or high > info.max:
            return Facts(num_values=facts.num_values)
    return facts


def facts_of(tensor: Tensor) -> Facts:
    """Return what was noted of the storage of a fake tensor; nothing where it is seen as another dtype."""
    noted = _facts.get(tensor.untyped_storage()._cdata)
    return UNKNOWN if noted is None or noted[0]() is None or noted[1] != tensor.dtype else noted[2]


def integer_range(tensor: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest of integers; of a fake tensor, bounds of them."""
    ends = torch.aminmax(tensor)
    if is_fake(tensor):
        facts, info = facts_of(tensor), torch.iinfo(tensor.dtype)
        return info.min if facts.low is None else facts.low, info.max if facts.high is None else facts.high
    return int(ends.min), int(ends.max)


def has_two_values(tensor: Tensor) -> bool:
    """Return whether a fake tensor is known to have at most two values."""
    return facts_of(tensor).num_values in (1, 2)


def note_num_set(packed: Tensor, num_set: int) -> None:
    """Remember how many bits of a mask are set, if it is fake."""
    if is_fake(packed):
        _num_set[packed] = num_set


def num_set(packed: Tensor) -> int:
    """Return how many bits of a fake mask are set: as noted, else all of them."""
    noted: int = _num_set.get(packed, 8 * packed.numel())
    return noted
