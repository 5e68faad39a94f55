"""Hazards of saved-tensor hooks: each has given wrong gradients, or held memory, in some design."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.saved_storage import Passed, SavedTensor
from tests.saved_tensors.nets import Attention, Data, cnn, data, exact, int4, int8

VAULTS = {
    "raw": lambda: SavedTensorStore(min_numel=1),
    "exact": exact,
    "int8": int8,
    "int4-chain": lambda: int4(fuse=True),
}


# ------------------------------------------------------------------------------- in-place changes
def three_ways(h, weight):
    """A result of which something is kept raw, something coded and something as a recomputation."""
    a = F.gelu(h)
    return {"raw": lambda: a.sin(), "coded": lambda: h @ weight, "recomputed": lambda: a @ weight}, a


@pytest.mark.parametrize("kept", ["raw", "coded", "recomputed"])
@pytest.mark.parametrize("when", ["inside", "after"])
def test_a_change_in_place_of_what_is_kept_raises(kept, when):
    store = exact() if kept == "recomputed" else int8()
    weight = torch.randn(16, 16, requires_grad=True)
    with store.scope():
        h = data(16, 16)
        ways, a = three_ways(h, weight)
        out = ways[kept]()
        changed = h if kept == "coded" else a
        if when == "inside":
            with torch.no_grad():
                changed.add_(1)
    if when == "after":
        with torch.no_grad():
            changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_changing_the_source_of_a_recomputation_in_place_raises_even_where_the_result_is_untouched():
    weight = torch.randn(16, 16, requires_grad=True)
    with exact().scope():
        h = data(16, 16)
        out = F.gelu(h) @ weight
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), weight)


def norms(width):
    return {
        "batch": nn.BatchNorm2d(width),
        "batch eval": nn.BatchNorm2d(width).eval(),
        "group": nn.GroupNorm(2, width),
    }


@pytest.mark.parametrize("parameter", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["batch", "batch eval", "group", "layer"])
def test_changing_a_parameter_that_a_recomputation_reads_raises(kind, parameter):
    """Plain autograd keeps the result itself, so it need not: a wrong gradient would be silent here."""
    norm = nn.LayerNorm(4) if kind == "layer" else norms(4)[kind]
    weight = torch.randn(4, requires_grad=True)
    store = exact()
    with store.scope():
        out = (norm(data(3, 4, 5, 4)) * weight).sum()
    assert store.tally.entries["recomputed"] == 1
    with torch.no_grad():
        getattr(norm, parameter).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, weight)


def test_changing_a_weight_between_forward_and_backward_raises_as_in_plain_torch():
    linear = nn.Linear(8, 8)
    with int8().scope():
        out = linear(data(4, 8))
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ------------------------------------------------------------------------------- identity of storages
@pytest.mark.parametrize("name", ["raw", "exact"])
def test_an_address_that_is_used_again_is_another_tensor(name):
    store, weights = VAULTS[name](), [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    for step in range(40):
        results = []
        for scope in (store.scope(), torch.enable_grad()):
            torch.manual_seed(step)
            with scope:
                h = data(64, 64)
                for weight in weights * 3:  # intermediate results die at once, and their addresses come back
                    h = torch.sin(h @ weight) * torch.rand(64, 64)
            results.append(torch.autograd.grad(h.sum(), weights))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), step


def test_views_of_one_storage_share_one_entry_and_keep_their_strides():
    store, found = int8(), {}
    with store.scope():
        qkv = data(2, 10, 48)
        parts = [p.view(2, 10, 2, 8).transpose(1, 2) for p in qkv.chunk(3, -1)]
        out = sum((p * p).sum() for p in parts)
        kept = [p.grad_fn for p in parts]
        handles = [SavedTensor(store.entries()[0], p) for p in parts]
        found = [(p.shape, p.stride(), p.storage_offset()) for p in parts]
        values = [p.detach().clone() for p in parts]
        assert len(store.entries()) == 1
        del qkv, parts, kept
    assert store.tally.entries == {"int8": 1}
    assert store.tally.plain_bytes == 2 * 10 * 48 * 4
    decoded = [h.get() for h in handles]
    assert [(d.shape, d.stride(), d.storage_offset()) for d in decoded] == found
    assert len({d.untyped_storage()._cdata for d in decoded}) == 1, "decoded once"
    torch.testing.assert_close(decoded, values, rtol=0, atol=0.05)
    out.backward()


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_strides_are_restored(format):
    for make in (int8, exact):
        store, weight = make(), torch.randn(4, 3, 3, 3, requires_grad=True)
        with store.scope():
            x = Data.apply(torch.randn(2, 3, 8, 8, requires_grad=True).contiguous(memory_format=format))
            y = F.conv2d(F.gelu(x), weight)
            expected = x.stride()
            del x
        handle = y.grad_fn._raw_saved_input.data
        assert isinstance(handle, SavedTensor)
        assert handle.stride == expected == handle.get().stride()


# ------------------------------------------------------------------------------- lifetime
@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forward(store):
    model, x = nn.Sequential(nn.Flatten(2), Attention()), torch.randn(2, 8, 4, 4)
    with store.scope():
        loss = model(Data.apply(x.requires_grad_())).square().mean()
        entries = [weakref.ref(entry) for entry in store.entries()]
    assert sum(entry() is not None for entry in entries) > 5
    return loss, entries


@pytest.mark.parametrize("name", VAULTS)
@pytest.mark.parametrize("end", ["backward", "dropped"])
def test_nothing_is_left_after_backward_or_without_it(name, end, no_gc):
    loss, entries = forward(VAULTS[name]())
    if end == "backward":
        loss.backward()
    del loss
    assert [entry() for entry in entries if entry() is not None] == []


@pytest.mark.parametrize("name", VAULTS)
def test_a_cnn_leaves_nothing_either(name, no_gc):
    store, model = VAULTS[name](), cnn()
    model(torch.randn(1, 3, 8, 8))
    with store.scope():
        loss = model(torch.randn(2, 3, 8, 8)).sum()
        entries = [weakref.ref(entry) for entry in store.entries()]
    del loss
    assert [entry() for entry in entries if entry() is not None] == []


def test_a_payload_goes_with_the_last_of_its_consumers(no_gc):
    store, w1, w2 = int8(), *(torch.randn(16, 16, requires_grad=True) for _ in range(2))
    with store.scope():
        h = data(64, 16)
        a, b = h @ w1, h @ w2
        del h
        entry = weakref.ref(store.entries()[0])
        assert len(store.entries()) == 1
    a.sum().backward()
    assert entry() is not None
    b.sum().backward()
    assert entry() is None


def test_the_original_is_freed_as_soon_as_it_is_coded(no_gc):
    store, w = int8(), torch.randn(16, 16, requires_grad=True)
    with store.scope():
        h = data(64, 16)
        storage = weakref.ref(h.untyped_storage())
        entry_of, out = weakref.WeakSet(), h @ w
        entry_of.add(store.entries()[0])
        original = store.entries()[0].original
        del h, storage
        assert original.is_alive
    assert not original.is_alive
    assert store.tally.held_bytes == 64 * 16 + 4 * 4  # a byte per element and a range per 256
    assert len(entry_of) == 1
    out.sum().backward()


# ------------------------------------------------------------------------------- what is left alone
def managed(store, call):
    """Shapes of what the store manages in `call`, and of what it passes."""
    kept = {"managed": [], "passed": []}
    pack = store.pack

    def spy(tensor):
        packed = pack(tensor)
        kept["passed" if isinstance(packed, Passed) else "managed"].append(tuple(tensor.shape))
        return packed

    store.pack = spy
    with store.scope():
        out = call()
    return out, kept


def merged():
    """A low-rank update, as LoRA merges it."""
    return nn.Parameter(torch.randn(6, 2)) @ nn.Parameter(torch.randn(2, 8)) * 0.5


def test_parameters_and_what_is_made_of_them_alone_are_left_alone():
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 6, bias=False))
    for make in (
        lambda h: nn.Linear(8, 6)(h),
        lambda h: normed(h),
        lambda h: h @ nn.Parameter(torch.randn(6, 8)).t(),
        lambda h: F.linear(h, nn.Parameter(torch.randn(6, 8)) + merged()),
        lambda h: F.linear(h, nn.Parameter(torch.randn(6, 8)) * 0.5),
    ):
        _, kept = managed(int8(), lambda make=make: make(data(32, 8)))
        assert [shape for shape in kept["managed"] if shape not in ((32, 8), (6, 1))] == []  # (6, 1): a norm
        assert (32, 8) in kept["managed"]


def test_casts_of_weights_under_autocast_are_left_alone():
    with torch.autocast("cpu", torch.bfloat16):
        _, kept = managed(int8(), lambda: nn.Linear(8, 6)(data(32, 8)))
    assert kept["managed"] == [(32, 8)]
    assert [set(shape) for shape in kept["passed"]] == [{8, 6}]


def test_an_embeddings_output_is_data_though_it_depends_on_weights_alone():
    embedding, linear = nn.Embedding(10, 8), nn.Linear(8, 6)
    _, kept = managed(int8(), lambda: linear(embedding(torch.randint(10, (4, 16)))))
    assert (64, 8) in kept["managed"] or (4, 16, 8) in kept["managed"]


def test_small_tensors_are_left_alone():
    for numel, is_managed in ((1023, False), (1024, True)):
        _, kept = managed(SavedTensorStore(lossy=Fidelity.INT8), lambda numel=numel: data(numel).sin())
        assert bool(kept["managed"]) is is_managed


def test_the_batch_and_returned_outputs_are_given_back():
    store, linear, x = int8(), nn.Linear(8, 8), torch.randn(64, 8)
    with store.scope():
        x = Data.apply(x.requires_grad_())
        y = linear(x)
        out = torch.exp(y * y)
    held = [entry for entry in (out.grad_fn._raw_saved_result.data, y.grad_fn._raw_saved_mat1.data)]
    assert [handle.entry.is_raw for handle in held] == [True, True]
    assert held[0].get().untyped_storage()._cdata == out.untyped_storage()._cdata
    assert held[1].get().untyped_storage()._cdata == x.untyped_storage()._cdata
    assert store.tally.held_bytes == 0
    assert store.tally.num_held_elsewhere == 3
    plain = torch.autograd.grad(torch.exp(linear(x) ** 2).sum(), linear.weight)
    assert torch.equal(torch.autograd.grad(out.sum(), linear.weight)[0], plain[0])


def test_a_slice_of_a_data_set_does_not_keep_the_data_set():
    data_set, weight = torch.randn(1000, 8), torch.randn(8, 8, requires_grad=True)
    _, kept = managed(int8(), lambda: data_set[10:200] @ weight)
    assert (190, 8) in kept["passed"]
