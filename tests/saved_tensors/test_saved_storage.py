"""One entry for a storage, one handle for each tensor of it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.saved_storage import Passed, Recent, SavedStorage, SavedTensor, kept_bytes


class Halved:
    """Half of the elements, each of which stands for two."""

    kind, fidelity = "halved", Fidelity.INT8

    def __init__(self, flat):
        self.half, self.num_decoded = flat[::2].clone(), 0

    def flat(self):
        self.num_decoded += 1
        return self.half.repeat_interleave(2)

    def payload(self):
        yield self.half


def entry_of(tensor, recent=None):
    return SavedStorage(tensor, recent or Recent())


def test_any_view_comes_back_with_its_strides_and_offset():
    x = torch.arange(24.0).view(4, 6)
    entry = entry_of(x)
    for view in (x, x.t(), x[1:, ::2], x[2, 3], x.diagonal(), x[:0]):
        found = SavedTensor(entry, view).get()
        assert torch.equal(found, view)
        assert (found.stride(), found.storage_offset()) == (view.stride(), view.storage_offset())


def test_an_entry_is_of_the_whole_storage():
    x = torch.arange(24.0)
    entry = entry_of(x[3:5])
    assert entry.plain_bytes == 24 * 4
    assert torch.equal(entry.flat(), x)
    assert entry.made_as == ((24,), (1,))


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[0].zero_(), lambda x: x.t().mul_(2)])
@pytest.mark.parametrize("is_coded", [False, True])
def test_a_change_in_place_raises_as_in_autograd(change, is_coded):
    x = torch.ones(4, 4)
    entry = entry_of(x)
    kept = SavedTensor(entry, x)
    if is_coded:
        entry.become(Halved(entry.flat()))
    assert entry.is_unchanged
    kept.get()
    change(x)
    assert not entry.is_unchanged
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.get()


def test_an_entry_that_becomes_a_code_lets_the_bytes_go():
    x = torch.arange(8.0)
    entry, storage = entry_of(x), weakref.ref(x.untyped_storage())
    kept = SavedTensor(entry, x)
    assert entry.is_raw
    assert kept_bytes([entry]) == 32
    entry.become(Halved(entry.flat()))
    del x
    assert storage() is None
    assert (entry.is_raw, entry.is_lossy) == (False, True)
    assert kept_bytes([entry]) == 16
    assert kept.get().tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


def test_an_entry_takes_its_bytes_back():
    x = torch.arange(8.0)
    entry = entry_of(x)
    entry.become(Halved(entry.flat()))
    entry.become_raw(x.untyped_storage())
    assert entry.is_raw
    assert torch.equal(SavedTensor(entry, x.view(2, 4)).get(), x.view(2, 4))
    x.add_(1)
    assert not entry.is_unchanged


def test_consumers_that_follow_each_other_decode_once():
    recent, x, y = Recent(), torch.ones(8), torch.ones(8)
    first, second = entry_of(x, recent), entry_of(y, recent)
    for entry in (first, second):
        entry.become(Halved(entry.flat()))
    assert first.flat() is first.flat()
    assert first.encoding.num_decoded == 1
    second.flat()
    assert first.decoded is None, "the values of one entry are kept, the latest"
    first.flat()
    assert (first.encoding.num_decoded, second.encoding.num_decoded) == (2, 1)
    recent.replace(None)
    assert first.decoded is None


def test_bytes_of_a_storage_that_two_entries_hold_count_once():
    x, y = torch.zeros(8), torch.zeros(100)
    entries = [entry_of(x), entry_of(x[2:]), entry_of(y[:1])]
    assert kept_bytes(entries) == 8 * 4 + 100 * 4
    assert kept_bytes([]) == 0


def test_counting_bytes_is_no_operation_of_the_step():
    """The planner traces steps: a view that counting made would be one more use of the tensor, after its last one."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    entries = [entry_of(torch.zeros(8, 3).t()), entry_of(torch.zeros(8)[2:])]
    with Refusing():
        assert kept_bytes(entries) == 8 * 3 * 4 + 8 * 4


def test_a_tensor_that_is_passed_is_the_same_memory_and_is_watched():
    x = torch.zeros(3, requires_grad=True)
    kept = Passed(x)
    assert kept.get().data_ptr() == x.data_ptr()
    assert not kept.get().requires_grad
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.get()
