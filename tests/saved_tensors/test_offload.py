"""Offload: what comes back is what went, and what lies elsewhere takes no memory here."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore, offload
from lightning_memsave.saved_tensors.encodings import Identity, IntCodes, Mask, Recompute, TwoValues
from lightning_memsave.saved_tensors.offload import Offloader
from tests.saved_tensors.nets import Data, assert_same_bits, cnn, gradients, relative_error

LARGE = 1 << 14  # float32 elements: 64 KiB, the least that moves


def equal_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64])
def test_raw_tensors_come_back_to_the_bit(dtype):
    flat = torch.randn(4 * LARGE).to(dtype) if dtype.is_floating_point else torch.arange(4 * LARGE).to(dtype)
    if dtype.is_floating_point:
        flat[:3] = torch.tensor([float("nan"), float("-inf"), -0.0], dtype=dtype)
    taken = Offloader().take(Identity(flat))
    assert taken.fidelity is Fidelity.EXACT
    assert list(taken.payload()) == []
    first, second = taken.flat(), taken.flat()
    assert equal_bits(first, flat)
    assert equal_bits(second, flat)
    assert first.data_ptr() != flat.data_ptr()


@pytest.mark.parametrize("make", [
    lambda flat: IntCodes.of(flat, Fidelity.INT8, 7),
    lambda flat: IntCodes.of(flat, Fidelity.INT4, 7),
    lambda flat: IntCodes.of(flat, Fidelity.INT4, 7, True),
    Mask.positive,
    lambda flat: TwoValues.of((flat > 0).float()),
], ids=["int8", "int4", "int4 signed", "mask", "two values"])  # fmt: skip
def test_coded_tensors_decode_to_the_same(make):
    flat = torch.randn(64 * LARGE)
    encoding = make(flat)
    expected = encoding.flat()
    taken = Offloader().take(encoding)
    assert taken.fidelity is encoding.fidelity
    assert sum(t.nbytes for t in encoding.payload()) == 0, "its bytes went"
    for _ in range(2):
        assert equal_bits(taken.flat(), expected)
        assert sum(t.nbytes for t in encoding.payload()) == 0, "and do not stay"


def test_small_tensors_and_recomputations_stay():
    offloader = Offloader()
    assert offloader.take(Identity(torch.randn(LARGE - 1))) is None
    assert offloader.take(Identity(torch.randn(LARGE))) is not None
    flat = torch.randn(LARGE)
    assert offloader.take(Recompute(lambda: flat, flat, Fidelity.EXACT, (), 1)) is None
    assert offloader.take(offloader.take(Identity(flat))) is None


def test_places_in_the_file_are_used_again():
    offloader, size = Offloader(), 4 * LARGE
    gc.disable()
    try:
        kept = [offloader.take(Identity(torch.randn(LARGE))) for _ in range(3)]
        file = offloader._file
        assert file._end == 3 * size
        for _ in range(5):  # while others stay
            del kept[1]
            flat = torch.randn(LARGE)
            kept.append(offloader.take(Identity(flat)))
            assert torch.equal(kept[-1].flat(), flat)
        assert file._end == 3 * size
        kept.append(offloader.take(Identity(torch.randn(2 * LARGE))))
        assert file._end == 5 * size
    finally:
        gc.enable()


def test_a_fake_tensor_leaves_no_place_behind():
    offloader = Offloader()
    taken = offloader.take(Identity(torch.full((LARGE,), 1.0)))
    with FakeTensorMode():
        fake = offloader.take(Identity(torch.empty(LARGE)))
        assert fake.flat().shape == (LARGE,)
    del fake
    other = offloader.take(Identity(torch.full((LARGE,), 2.0)))
    assert taken.flat().eq(1).all()
    assert other.flat().eq(2).all()


def test_a_file_without_a_name_in_the_folder_that_was_given(tmp_path):
    taken = Offloader(str(tmp_path)).take(Identity(torch.randn(LARGE)))
    assert list(tmp_path.iterdir()) == []
    assert taken.flat().numel() == LARGE


def test_the_collector_may_free_a_place_while_another_is_written(monkeypatch):
    file, written = offload.File(None), []
    first = file.write(torch.ones(8))

    def collected(tensor, _bytes=offload._bytes):
        file.give_back(first, 32)  # as a finalizer does, in the middle of it
        return _bytes(tensor)

    monkeypatch.setattr(offload, "_bytes", collected)
    thread = threading.Thread(target=lambda: written.append(file.write(torch.ones(4))), daemon=True)
    thread.start()
    thread.join(10)
    assert written == [32]


def test_a_copy_opens_a_file_of_its_own(tmp_path):
    offloader, flat = Offloader(str(tmp_path)), torch.randn(LARGE)
    taken = offloader.take(Identity(flat))
    twin = copy.deepcopy(offloader)
    other = twin.take(Identity(flat * 2))
    assert twin._file is not offloader._file
    assert torch.equal(taken.flat(), flat)
    assert torch.equal(other.flat(), flat * 2)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_network_is_bit_equal_and_holds_nothing_large(recompute):
    model, x = cnn(), torch.randn(16, 3, 24, 24)
    model(x)
    store = SavedTensorStore(recompute=recompute, offloader=Offloader())
    ends = []
    for _ in range(3):
        assert_same_bits(gradients(model, x, store), gradients(model, x))
        assert store.tally.entries["offloaded"] >= 4
        assert store.tally.held_bytes <= 0.05 * store.tally.plain_bytes
        ends.append(store.offloader._file._end)
    assert ends[0] == ends[1] == ends[2] > 0


LAYOUTS = {
    "whole": lambda h: h,
    "transposed": lambda h: h.t(),
    "permuted": lambda h: h.view(4, 64, 256).permute(2, 0, 1),
    "rows": lambda h: h[64:],
    "columns": lambda h: h[:, 64:],
    "every second": lambda h: h[::2, ::2],
    "expanded": lambda h: h[:, :1].expand(256, 256),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"lossy": Fidelity.INT4}], ids=["raw", "exact", "int4"])
def test_a_tensor_in_any_layout_comes_back_where_it_was(layout, options):
    """What is moved is the storage, whatever part of it, and in whatever order, the tensor is."""
    found, weight = [], torch.randn(256, 256, requires_grad=True)
    other = None if "lossy" not in options else SavedTensorStore(min_numel=1, **options)
    for store in (other, SavedTensorStore(min_numel=1, offloader=Offloader(), **options)):
        torch.manual_seed(0)
        with contextlib.nullcontext() if store is None else store.scope():
            h = Data.apply(torch.randn(256, 256) @ weight)
            loss = layout(h).sin().sum() + (layout(h) * layout(h.cos())).sum()
        found.append(torch.autograd.grad(loss, weight)[0])
    assert store.tally.entries["offloaded"] > 0
    assert equal_bits(*found)


def test_codes_are_offloaded_too():
    model, x = cnn(), torch.randn(32, 3, 48, 48)
    model(x)
    plain = gradients(model, x)
    here, elsewhere = (
        SavedTensorStore(lossy=Fidelity.INT8),
        SavedTensorStore(lossy=Fidelity.INT8, offloader=Offloader()),
    )
    assert_same_bits(gradients(model, x, elsewhere), gradients(model, x, here))
    assert elsewhere.tally.held_bytes < 0.2 * here.tally.held_bytes
    assert 0 < relative_error(gradients(model, x, elsewhere), plain) < 0.1


def test_a_change_in_place_raises_though_the_bytes_are_away():
    weight = nn.Parameter(torch.randn(64, 64))
    with SavedTensorStore(offloader=Offloader()).scope():
        h = Data.apply(torch.randn(512, 64, requires_grad=True))
        out = h @ weight
        rest = [Data.apply(torch.randn(512, 64, requires_grad=True)).sin() for _ in range(5)]  # h is away by now
        with torch.no_grad():
            h.add_(1)
    del rest
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ------------------------------------------------------------------------------- CUDA
@pytest.mark.kernels
@pytest.mark.gpu
def test_cuda_tensors_come_back_to_the_bit_while_the_device_is_busy():
    """The copy out reads what the compute stream wrote, and the copy back is waited for: no event may be missing."""
    device = torch.device("cuda")
    offloader = Offloader()
    busy = torch.randn(4096, 4096, device=device)
    taken, expected = [], []
    for index in range(6):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        flat = busy.view(-1)[: 64 * LARGE] + index  # written late: the copy must wait for it
        expected.append(flat.clone())
        taken.append(offloader.take(Identity(flat)))
        del flat  # its memory is given away to the next one, not before the copy is done
    for index in reversed(range(6)):
        assert torch.equal(taken[index].flat(), expected[index])


@pytest.mark.gpu
def test_cuda_fetches_ahead_of_backward():
    offloader = Offloader()
    taken = [offloader.take(Identity(torch.randn(LARGE, device="cuda"))) for _ in range(5)]
    places = [encoding._places[0] for encoding in taken]
    taken[4].flat()
    assert [place._fetched is not None for place in places] == [False, False, True, True, False]
    taken[3].flat()
    assert [place._fetched is not None for place in places] == [False, True, True, False, False]


@pytest.mark.gpu
def test_cuda_holds_nothing_between_forward_and_backward():
    weights = [nn.Parameter(torch.randn(1024, 1024, device="cuda") / 32) for _ in range(8)]
    x = torch.randn(8192, 1024, device="cuda")

    def step(store):
        before = torch.cuda.memory_allocated()
        with store.scope() if store else torch.enable_grad():
            h = x
            for weight in weights:
                h = torch.tanh(h @ weight)
            loss = h.square().mean()
        del h
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        return held, torch.autograd.grad(loss, weights)

    step(None)
    (plain, expected), (ours, grads) = step(None), step(SavedTensorStore(offloader=Offloader()))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert ours < 0.3 * plain


def test_what_is_fetched_ahead_is_what_was_sent_before_also_when_others_have_died(monkeypatch):
    class Sent:
        is_fetched = False

        def fetch(self):
            self.is_fetched = True

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    stream = offload.Stream(torch.device("cuda"))
    first = [Sent() for _ in range(6)]
    numbers = [stream.sent(place) for place in first]
    del first[4:], first[1]  # dead: the last two, and one in the middle
    second = [Sent() for _ in range(3)]
    assert [stream.sent(place) for place in second] == [6, 7, 8]
    stream.fetch_before(8)
    assert [place.is_fetched for place in second] == [True, True, False]
    stream.fetch_before(numbers[3])
    assert [place.is_fetched for place in first] == [False, True, False]
