"""What is kept exactly in fewer bytes: values that come back to the bit, and the bytes that they take."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.numerics.bits import bits_for
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.code_rows import Rows, covers_its_storage
from lightning_memsave.saved_tensors.encodings import IntCodes
from lightning_memsave.saved_tensors.recompute_rules import _gelu_curvature, _silu_curvature
from tests.saved_tensors.nets import Data, data, exact, int4, int8


def round_trip(function, x, store):
    """Results and gradient in the store and in plain torch, with what the store kept."""
    both = []
    for scope in (torch.enable_grad(), store.scope()):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        with scope:
            out = function(Data.apply(leaf))
            outs = [Data.apply(o) for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
            del out
        (grad,) = torch.autograd.grad([o.sum() for o in outs], leaf)
        both.append((outs, grad))
    (plain, plain_grad), (ours, grad) = both
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert torch.equal(grad.nan_to_num(7.0), plain_grad.nan_to_num(7.0))
    return store.tally


# ------------------------------------------------------------------------------- one bit
def test_dropouts_mask_is_one_bit_per_element():
    x = torch.randn(100, 100)
    tally = round_trip(lambda h: F.dropout(h, 0.3), x, int4())
    assert tally.entries == {"1-bit mask": 1}
    assert tally.held_bytes == 10_000 // 8


def test_a_boolean_attention_mask_becomes_zero_and_infinity_and_gives_no_nan():
    q, mask = torch.randn(2, 2, 16, 8), torch.rand(2, 1, 16, 16) > 0.3
    mask[..., 0] = True
    for store in (int4(), exact()):
        torch.manual_seed(0)
        leaf = q.clone().requires_grad_()
        with store.scope():
            h = Data.apply(leaf)
            out = F.scaled_dot_product_attention(h, h * 1.5, h * 0.5, mask.clone())
        out.sum().backward()
        assert bool(leaf.grad.isfinite().all())
        assert store.tally.entries["1-bit mask"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [(0.0, -0.0), (float("-inf"), 0.0), (float("nan"), 1.0), (2.5, 2.5), (1e-40, 3.0)])
def test_two_values_come_back_to_the_bit(values, dtype):
    pattern = torch.tensor(values, dtype=dtype)[torch.randint(2, (3000,))]
    store, leaf = int8(), torch.ones(3000, dtype=dtype, requires_grad=True)
    with store.scope():
        out = Data.apply(leaf) * pattern.clone()
    assert store.tally.entries == {"1-bit mask": 1}
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(out.grad_fn._saved_other.view(as_integers), pattern.view(as_integers))


def test_three_values_by_their_bits_stay_as_they_are():
    pattern = torch.tensor([0.0, -0.0, 1.0])[torch.randint(3, (3000,))]
    store, leaf = int8(), torch.ones(3000, requires_grad=True)
    with store.scope():
        out = Data.apply(leaf) * pattern.clone()
    out.backward(torch.ones(3000))
    assert store.tally.entries == {"raw": 1}
    assert torch.equal(leaf.grad.view(torch.int32), pattern.view(torch.int32))


def test_what_a_kernel_fills_after_it_was_kept_is_not_coded_before():
    """rrelu's noise: autograd keeps the empty tensor, then the kernel draws into it."""
    for shape in ((), (2,), (2000,)):
        round_trip(lambda h: F.rrelu(h, 0.1, 0.9, training=True), torch.randn(shape), int8())


def test_booleans_are_one_bit():
    tally = round_trip(lambda h: h.masked_fill(torch.rand(999) > 0.5, 0.0), torch.randn(999), exact())
    assert tally.entries == {"1-bit mask": 1}
    assert tally.held_bytes == -(-999 // 8)


@pytest.mark.parametrize(("top", "itemsize"), [(2**8, 1), (2**8 + 1, 2), (2**15, 2), (2**15 + 1, 4)])
def test_integers_take_the_narrowest_type(top, itemsize):
    index = torch.arange(64) * 17 % 61
    index[0] = top - 1
    tally = round_trip(lambda h: h.index_select(0, index.clone()), torch.randn(top, 1), exact())
    assert tally.entries == {"narrowed integers": 1}
    assert tally.held_bytes == 64 * itemsize


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("fidelity", [Fidelity.BF16, Fidelity.INT8, Fidelity.INT4, Fidelity.INT2])
def test_what_is_not_finite_stays_raw(value, fidelity):
    x = torch.randn(1000)
    x[500] = value
    store = SavedTensorStore(lossy=fidelity, min_numel=1)
    assert round_trip(lambda h: h * h, x, store).entries == {"raw": 1}


# ------------------------------------------------------------------------------- needs
def test_a_relu_alone_needs_a_bit_and_a_convolution_behind_it_needs_all():
    x, weight = torch.randn(2, 8, 16, 16), nn.Parameter(torch.randn(8, 8, 3, 3))
    tally = round_trip(lambda h: F.relu(h).add(1), x, exact())
    assert (tally.entries, tally.held_bytes) == ({"1-bit mask": 1}, x.numel() // 8)
    tally = round_trip(lambda h: F.conv2d(F.relu(h), weight), x, SavedTensorStore(min_numel=1))
    assert (tally.entries, tally.held_bytes) == ({"raw": 1}, 4 * x.numel())


def test_the_need_rises_when_another_consumer_comes_after_coding():
    """The ReLU's output was a bit already; its bytes are still there, as somebody holds them."""
    store, weight = SavedTensorStore(min_numel=1), nn.Parameter(torch.randn(8, 8))
    leaf = torch.randn(64, 8, requires_grad=True)
    with store.scope():
        y = F.relu(Data.apply(leaf))
        rest = [F.relu(data(8)) for _ in range(5)]  # five later entries: y is coded by now
        kinds = {entry.encoding.kind for entry in store.entries() if entry.plain_bytes == 64 * 8 * 4}
        out = y @ weight
        del y, rest
    assert kinds == {"1-bit mask"}
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert torch.equal(grad, leaf.detach().relu().t() @ torch.ones(64, 8))


def test_a_leaky_relu_keeps_its_inputs_sign():
    tally = round_trip(lambda h: F.leaky_relu(h, 0.1).add(1), torch.randn(1000), int4())
    assert (tally.entries, tally.held_bytes) == ({"1-bit mask": 1}, 125)


# ------------------------------------------------------------------------------- pools
POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
SETTINGS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 1},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": 2, "dilation": 2, "stride": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2, "return_indices": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dims", POOLS)
@pytest.mark.parametrize("content", ["randn", "ties", "infinities", "nan"])
def test_max_pools_keep_positions_in_their_windows(dims, settings, content):
    x = torch.randn(2, 3, *[13, 11, 9][:dims])
    if content == "ties":
        x = x.round()
    elif content == "infinities":
        x[x < 1] = float("-inf")
    elif content == "nan":
        x[x > 1.5] = float("nan")
    pooled = POOLS[dims](x, **settings)
    count = (pooled[0] if isinstance(pooled, tuple) else pooled).numel()
    tally = round_trip(lambda h: POOLS[dims](h, **settings), x, exact())
    assert tally.entries["pool index"] == 1
    assert set(tally.entries) <= {"pool index", "shape only"}, "nothing of the input is kept"
    assert tally.held_bytes == -(-count * bits_for(settings["kernel_size"] ** dims) // 8)


def test_a_two_by_two_pool_keeps_two_bits_per_output():
    tally = round_trip(nn.MaxPool2d(2), torch.randn(4, 8, 32, 32), exact())
    assert tally.held_bytes == 4 * 8 * 16 * 16 * 2 // 8


@pytest.mark.parametrize("kernel", [(2, 3), [3, 1], (5, 5), (16, 16), (17, 16)])
def test_pools_of_any_window(kernel):
    tally = round_trip(nn.MaxPool2d(kernel), torch.randn(2, 2, 34, 35), exact())
    fits = kernel != (17, 16)  # 272 positions do not fit a byte: narrowed integers instead
    assert tally.entries[("pool index" if fits else "narrowed integers")] == 1


def test_pools_of_channels_last_and_of_views():
    x = torch.randn(2, 4, 12, 12).contiguous(memory_format=torch.channels_last)
    round_trip(nn.MaxPool2d(3, 2, 1), x, exact())
    round_trip(lambda h: nn.MaxPool2d(3, 2, 1)(h[:, 1:3, 2:]), x, exact())
    round_trip(lambda h: nn.MaxPool2d(2)(h[0]), x, exact())


class Windows:
    AVERAGES: ClassVar = [nn.AvgPool1d(2), nn.AvgPool2d(3, 2, 1), nn.AvgPool3d(2), nn.AdaptiveAvgPool2d(3)]
    MAXIMA: ClassVar = [nn.AdaptiveMaxPool1d(3), nn.AdaptiveMaxPool2d((3, 2)), nn.AdaptiveMaxPool3d(2)]


@pytest.mark.parametrize("pool", Windows.AVERAGES + Windows.MAXIMA, ids=str)
def test_average_and_adaptive_pools_keep_no_input(pool):
    dims = int(type(pool).__name__[-2])
    x = torch.randn(2, 3, *[8] * dims)
    tally = round_trip(pool, x, exact())
    indices = pool(x).numel() * 2 if pool in Windows.MAXIMA else 0  # of planes up to 512 elements: 1 or 2 bytes
    assert tally.held_bytes in (indices, indices // 2)
    assert not tally.entries["raw"]


# ------------------------------------------------------------------------------- layout
@pytest.mark.parametrize(
    ("tensor", "covers"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), True),
        (torch.zeros(3, 4)[:, :2], False),
        (torch.zeros(3, 4)[1:], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(3, 1, 4)[:, :, None], True),
    ],
)
def test_covers_its_storage(tensor, covers):
    assert covers_its_storage(tensor) is covers


# ------------------------------------------------------------------------------- functions of codes
@pytest.mark.parametrize(
    ("function", "curvature", "bound"),
    [
        (F.gelu, _gelu_curvature, 1e-12),
        (lambda x: F.gelu(x, approximate="tanh"), _gelu_curvature, 0.01),
        (F.silu, _silu_curvature, 1e-12),
    ],
    ids=["gelu", "gelu, tanh", "silu"],
)
def test_curvatures_are_second_derivatives(function, curvature, bound):
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert (curvature(x) - second).abs().max() <= bound


ORDERED = Rows(100, ((50, 20), (5, 1000), (20, 1)))
"""Rows that lie in five pieces each."""


@pytest.mark.parametrize("rows", [Rows(5000), Rows(500), Rows(100), ORDERED], ids=["one", "short", "whole", "ordered"])
@pytest.mark.parametrize("signed", [False, True], ids=["zeros", "signs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_mean_of_a_function_of_codes_is_that_of_the_values(rows, signed, dtype):
    """Without the correction it is off by f''(x) v / 2, which is many times what is left."""
    x = (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    codes = [IntCodes.of(x, Fidelity.INT4, seed, signed, rows) for seed in range(200)]
    mapped = torch.stack([code.mapped(F.gelu, _gelu_curvature) for code in codes]).double().mean(0)
    plain = torch.stack([F.gelu(code.flat()) for code in codes]).double().mean(0)
    curvature = _gelu_curvature(x.double())
    off, off_plain = (((mean - F.gelu(x.double())) * curvature).mean() for mean in (mapped, plain))
    assert codes[0].mapped(F.gelu, _gelu_curvature).dtype == dtype
    assert off_plain > 2e-3
    assert abs(off) < 0.15 * off_plain


def test_no_curvature_is_no_correction():
    code = IntCodes.of(torch.randn(512), Fidelity.INT8, 1)
    assert torch.equal(code.mapped(torch.square, torch.zeros_like), code.flat().square())
