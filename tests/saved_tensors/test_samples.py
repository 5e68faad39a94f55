"""Samples of what layers read: the bytes, the elements and rows that are kept, and the mean of many draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.numerics.kbit import coded_bytes
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.code_rows import Rows
from lightning_memsave.saved_tensors.samples import Sample, Sampling, draw_rows
from tests.saved_tensors.nets import Data

TENTH, ROWS = Sampling("topk", 0.1), Sampling("rows", 0.3)


def sampled(sampling, **options):
    return SavedTensorStore(sampling=sampling, min_numel=1, **options)


def gradients(function, x, *parameters, store=None):
    """Of `x` and of parameters, where a layer in front of `function` makes `x` something that is computed."""
    leaf = x.clone().requires_grad_()
    if store is None:
        out = function(Data.apply(leaf))
    else:
        with store.scope():
            out = function(Data.apply(leaf))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), [leaf, *parameters])


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize(
    ("sampling", "lossy", "expected"),
    [
        (TENTH, Fidelity.EXACT, 1280 * 4 + 12_800 // 8),
        (TENTH, Fidelity.BF16, 1280 * 2 + 12_800 // 8),
        (TENTH, Fidelity.INT4, coded_bytes(1280, 4) + 12_800 // 8),
        (ROWS, Fidelity.EXACT, 30 * 128 * 4 + 30 * 4),
        (ROWS, Fidelity.INT8, coded_bytes(30 * 128, 8, row=128) + 30 * 4),
        (ROWS, Fidelity.INT4, coded_bytes(30 * 128, 4, row=128) + 30 * 4),
        (Sampling("rows", 0.01), Fidelity.EXACT, 10 * 128 * 4 + 10 * 4),  # ten rows at least
    ],
)
def test_bytes_of_a_linears_input(sampling, lossy, expected):
    weight, store = parameter(8, 128), sampled(sampling, lossy=lossy)
    gradients(lambda h: F.linear(h, weight), torch.randn(100, 128), weight, store=store)
    assert dict(store.tally.entries) == {str(sampling): 1}
    assert store.tally.held_bytes == expected


@pytest.mark.parametrize("sampling", [TENTH, ROWS])
def test_signs_that_relu_reads_take_a_bit(sampling):
    weight, bare, store = parameter(8, 128), sampled(sampling), sampled(sampling)
    gradients(lambda h: F.linear(h, weight), torch.randn(100, 128), weight, store=bare)
    gradients(lambda h: F.linear(h.relu(), weight), torch.randn(100, 128), weight, store=store)
    assert store.tally.held_bytes == bare.tally.held_bytes + 12_800 // 8


# ------------------------------------------------------------------------------- exact where it must be
def conv(h, weight):
    return F.conv2d(h.view(4, 5, 8, 8).relu(), weight)


def linear(h, weight):
    return F.linear(h.view(64, 20), weight)


def few_that_are_not_zero(dtype=torch.float32):
    """The first tenth: of elements, and of rows."""
    return torch.cat([torch.randn(128, dtype=dtype), torch.zeros(1152, dtype=dtype)])


NO_LOSS = {"topk, conv": (TENTH, conv, (3, 5, 3, 3)), "topk": (TENTH, linear, (7, 20)), "rows": (ROWS, linear, (7, 20))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NO_LOSS)
def test_gradients_are_exact_to_the_bit_where_all_that_counts_is_kept(name, dtype):
    sampling, function, shape = NO_LOSS[name]
    x, weight, store = few_that_are_not_zero(dtype), parameter(*shape, dtype=dtype), sampled(sampling)
    plain = gradients(lambda h: function(h, weight), x, weight)
    found = gradients(lambda h: function(h, weight), x, weight, store=store)
    assert dict(store.tally.entries) == {str(sampling): 1}
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["topk", "rows"])
def test_a_sample_of_all_is_the_tensor_to_the_bit(kind, dtype):
    flat = (torch.randn(1000) * torch.exp(torch.randn(1000))).to(dtype)
    sample = Sample(Sampling(kind, 1.0), 10)
    assert torch.equal(sample.encode(flat, Fidelity.EXACT, 3, Rows(10), False).flat(), flat)
    assert sample.sampling.of(Call("linear", (), {}), flat.view(100, 10)) is None  # which takes fewer bytes as it is


@pytest.mark.parametrize("lossy", [Fidelity.EXACT, Fidelity.BF16, Fidelity.INT4])
@pytest.mark.parametrize("sampling", [TENTH, ROWS])
@pytest.mark.parametrize("activation", [torch.relu, F.leaky_relu, lambda h: F.relu(h, inplace=True)])
def test_only_the_gradient_of_the_weight_is_another(activation, sampling, lossy):
    """Signs included, which activations read of the same tensor."""
    weight, bias, behind = parameter(16, 32), parameter(16), parameter(4, 16)
    x = torch.randn(200, 32)

    def function(h):
        return F.linear(activation(F.linear(h * 1, weight, bias)), behind)

    plain = gradients(function, x, bias, weight, behind)
    store = sampled(sampling, lossy=lossy)
    found = gradients(function, x, bias, weight, behind, store=store)
    assert store.tally.entries[str(sampling)] == 2
    assert all(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found[2:], plain[2:], strict=True))


# ------------------------------------------------------------------------------- elements
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_the_largest_magnitudes_are_kept(dtype, fraction):
    flat = torch.randn(70_003).to(dtype)  # more than one chunk; many ties where a dtype has few values
    sampling = Sampling("topk", fraction)
    found = Sample(sampling, 1).encode(flat, Fidelity.EXACT, 0, Rows(70_003), False).flat()
    kept, num_kept = found != 0, round(fraction * 70_003)
    assert int(kept.sum()) == num_kept
    assert torch.equal(found[kept], flat[kept])
    assert flat[~kept].abs().max() <= flat[kept].abs().min()
    assert torch.equal(found.abs().sort(descending=True).values[:num_kept], flat.abs().topk(num_kept).values)


def test_of_equal_elements_the_first_are_kept():
    flat = torch.tensor([1.0, -3.0, 2.0, 2.0, -2.0, 0.0, 2.0, 1.0])
    found = Sample(Sampling("topk", 0.5), 1).encode(flat, Fidelity.EXACT, 0, Rows(8), False).flat()
    assert found.tolist() == [0.0, -3.0, 2.0, 2.0, -2.0, 0.0, 0.0, 0.0]


# ------------------------------------------------------------------------------- rows
def probabilities(norms, num_kept):
    """The slow way: rows become certain one by one."""
    certain = set()
    while True:
        rest = [i for i in range(len(norms)) if i not in certain]
        found = {i: norms[i] * (num_kept - len(certain)) / sum(norms[j] for j in rest) for i in rest}
        above = [i for i in rest if found[i] >= 1]
        if not above:
            return torch.tensor([1.0 if i in certain else found[i] for i in range(len(norms))], dtype=torch.float64)
        certain.add(max(above, key=lambda i: norms[i]))


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_each_row_counts_as_much_as_it_should_on_average(spread):
    """Over all starts, to the width of their grid; large rows are always there, with weight exactly 1."""
    rows = torch.randn(40, 8) * torch.exp(spread * torch.randn(40, 1))
    expected = probabilities(rows.double().norm(dim=1).tolist(), 12)
    num, drawn, weighted = 4000, torch.zeros(40), torch.zeros(40, dtype=torch.float64)
    for step in range(num):
        index, weights = draw_rows(rows, 12, (step + 0.5) / num)
        assert len(index.unique()) == 12
        drawn[index] += 1
        weighted[index] += weights.double()
        assert torch.allclose(weights.double(), 1 / expected[index], rtol=1e-5)
    is_certain = expected == 1
    assert bool((drawn[is_certain] == num).all())
    assert bool((weighted[is_certain] == num).all())
    assert ((weighted / num - 1).abs() * expected).max() < 2 / num
    assert bool(is_certain.any()) == (spread > 0)


def test_rows_of_zeros_need_no_place():
    rows = torch.zeros(100, 16)
    rows[::7] = torch.randn(15, 16)
    index, weights = draw_rows(rows, 15, 0.3)
    assert set(index.tolist()) == set(range(0, 100, 7))
    assert bool((weights == 1).all())
    index, weights = draw_rows(torch.zeros(100, 16), 15, 0.3)
    assert bool(weights.isfinite().all())


def test_what_is_not_a_number_stays_none():
    weight, x = parameter(8, 16), torch.randn(100, 16)
    x[3, 5] = torch.nan
    for sampling in (TENTH, ROWS):
        (_, found) = gradients(lambda h: F.linear(h, weight), x, weight, store=sampled(sampling))
        assert bool(found.isnan().any())


def mean_and_chance(function, x, *parameters, store, num):
    drawn = torch.stack(
        [torch.cat([g.flatten() for g in gradients(function, x, *parameters, store=store)]) for _ in range(num)]
    ).double()
    return drawn.mean(0), drawn.var(0).sum().sqrt() / num**0.5


@pytest.mark.parametrize("lossy", [Fidelity.EXACT, Fidelity.BF16, Fidelity.INT8, Fidelity.INT4])
def test_the_mean_of_many_draws_of_rows_is_the_gradient(lossy):
    weights = [parameter(32, 64), parameter(16, 32), parameter(4, 16)]
    x = torch.randn(100, 64) * torch.exp(torch.randn(100, 1))

    def function(h):
        for weight in weights:
            h = F.linear(h, weight).relu()
        return h

    store = sampled(ROWS, lossy=lossy)
    plain = torch.cat([g.flatten() for g in gradients(function, x, *weights)]).double()
    mean, chance = mean_and_chance(function, x, *weights, store=store, num=400)
    assert 0 < chance < 0.1 * plain.norm()
    assert (mean - plain).norm() < 1.15 * chance
    assert store.consequences.loss_class == "unbiased"


def test_rows_are_better_than_column_row_sampling_with_replacement():
    """At as many rows: its error, of which the mean square is known, is larger."""
    x, dy = torch.randn(200, 16).double() * torch.exp(torch.randn(200, 1)), torch.randn(200, 8).double()
    num_kept, errors = 60, []
    for step in range(500):
        index, weights = draw_rows(x, num_kept, (step * 0.618) % 1)
        errors.append(float((dy[index].T @ (x[index] * weights[:, None]) - dy.T @ x).square().sum()))
    p = x.norm(dim=1) / x.norm(dim=1).sum()
    squares = x.square().sum(1) * dy.square().sum(1)
    with_replacement = float((squares / p).sum() - (dy.T @ x).square().sum()) / num_kept
    assert sum(errors) / len(errors) < 0.6 * with_replacement


def test_elements_that_are_dropped_are_a_change():
    weight, store = parameter(8, 128), sampled(TENTH)
    plain = gradients(lambda h: F.linear(h, weight), torch.randn(100, 128), weight)
    found = gradients(lambda h: F.linear(h, weight), torch.randn(100, 128), weight, store=store)
    assert store.consequences.loss_class == "changed"
    assert found[1].norm() < plain[1].norm()


# ------------------------------------------------------------------------------- who is sampled
def norm_and_linear(h, weight):
    return F.linear(h, weight).sum() + F.layer_norm(h, (64,))


def squared_and_linear(h, weight):
    return h * h + F.linear(h, weight).sum()


OTHERS_READ = {
    "LayerNorm behind": norm_and_linear,
    "product before": squared_and_linear,
    "part of it": lambda h, weight: F.linear(h[:50], weight),
    "transposed": lambda h, weight: F.linear(h.T[:64].contiguous().T, weight),
    "weight of data": lambda h, weight: F.linear(h, (h[:8] * weight).sin()),
}


@pytest.mark.parametrize("lossy", [Fidelity.EXACT, Fidelity.INT8])
@pytest.mark.parametrize("name", OTHERS_READ)
def test_what_somebody_else_reads_is_not_sampled(name, lossy):
    """Kept as if there were no sampling: the same bits, the same bytes."""
    function, weight, x = OTHERS_READ[name], parameter(8, 64), torch.randn(100, 64)
    stores = [SavedTensorStore(lossy=lossy, min_numel=1, sampling=each) for each in (None, ROWS)]
    plain, found = (gradients(lambda h: function(h, weight), x, weight, store=store) for store in stores)
    assert stores[0].tally == stores[1].tally
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_two_layers_share_a_sample_of_what_both_read():
    first, second, x, store = parameter(8, 64), parameter(4, 64), torch.randn(100, 64), sampled(ROWS)
    gradients(lambda h: F.linear(h, first).sum() + F.linear(h, second), x, first, second, store=store)
    assert dict(store.tally.entries) == {"rows-0.3": 1}
    other = parameter(4, 32)
    gradients(lambda h: F.linear(h, first).sum() + F.linear(h.view(200, 32), other), x, first, other, store=store)
    assert dict(store.tally.entries) == {"raw": 1}  # whose rows are not the same


def test_rows_are_of_linears_and_elements_of_convolutions_too():
    weight, x = parameter(3, 5, 3, 3), torch.randn(1280)
    for sampling, kind in ((TENTH, "topk-0.1"), (ROWS, "raw")):
        store = sampled(sampling)
        gradients(lambda h: F.conv2d(h.view(4, 5, 8, 8), weight), x, weight, store=store)
        assert dict(store.tally.entries) == {kind: 1}
    assert Sampling("topk", 0.1).of(Call("matmul", (), {}), x) is None


def test_what_can_be_computed_again_is_not_sampled():
    norm, weight, x = nn.LayerNorm(64), parameter(8, 64), torch.randn(100, 64)
    store = sampled(ROWS, recompute=True)
    plain = gradients(lambda h: F.linear(norm(h), weight), x, weight)
    found = gradients(lambda h: F.linear(norm(h), weight), x, weight, store=store)
    assert store.tally.entries["recomputed"] == 1
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("sampling", [TENTH, ROWS])
def test_backward_can_be_differentiated(sampling):
    x, weight, found = few_that_are_not_zero(), parameter(8, 20), []
    for scope in (torch.enable_grad(), sampled(sampling).scope()):
        leaf = x.clone().requires_grad_()
        with scope:
            out = linear(Data.apply(leaf), weight).square().sum()
        (first,) = torch.autograd.grad(out, weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [leaf, weight]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_noise_repeats_with_its_seed_and_step():
    weight, x = parameter(8, 64), torch.randn(100, 64)

    def drawn(seed, step):
        store = sampled(ROWS, seed=seed)
        store.draw_for(step)
        return gradients(lambda h: F.linear(h, weight), x, weight, store=store)[1]

    assert torch.equal(drawn(3, 5), drawn(3, 5))
    assert not torch.equal(drawn(3, 5), drawn(3, 6))
    assert not torch.equal(drawn(3, 5), drawn(4, 5))
