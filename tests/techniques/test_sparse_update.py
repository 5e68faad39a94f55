"""A sparse update trains what it says, with the gradients of full training, and states its bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import (
    LowRank,
    SparseUpdate,
    Sparsity,
    apply_low_rank,
    apply_sparse_update,
    apply_sparsity,
    export_dense,
)
from lightning_memsave.techniques.sparse_update import estimate_sparse_update, partial_layers
from tests.contracts.spec import Spec
from tests.techniques.sparse_update_subjects import convolutions, small

SPEC = Spec(config=SparseUpdate(layers={"blocks.*.fc1": 0.25, "head": 1.0}), loss_class="changed", shrinks="gradients")
X = torch.linspace(-2, 2, 2 * 3 * 144, dtype=torch.float64).sin().view(2, 3, 12, 12)
EVERY_LAYER = {"conv": 0.4, "dilated": 0.5, "line": (1, 2, 7), "linear": 0.5, "of_transformers": 0.3, "head": 1.0}


def gradients(model):
    model.zero_grad()
    model(X).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------------------- what is computed
def test_gradients_are_those_of_full_training_and_outputs_are_the_same_bits():
    model, plain = small().double(), small().double()
    apply_sparse_update(model, SparseUpdate(layers=EVERY_LAYER))
    layers = partial_layers(model)
    assert set(layers) == set(EVERY_LAYER) - {"head"}
    assert torch.equal(model(X), plain(X))
    ours, theirs = gradients(model), gradients(plain)
    for name, layer in layers.items():
        expected = layer.layout.compact(theirs[f"{name}.weight"])
        assert ours[f"{name}.values"].shape == expected.shape == layer.values.shape
        torch.testing.assert_close(ours[f"{name}.values"], expected, rtol=1e-12, atol=1e-14)
    whole = [name for name in ours if not name.endswith("values")]
    assert {name.rpartition(".")[2] for name in whole} == {"bias", "weight"}
    for name in whole:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-14)


def test_over_a_transposed_input_a_linear_gives_the_same_up_to_rounding():
    """Torch may choose another product there for a frozen weight."""
    model = nn.Sequential(nn.Linear(6, 10)).double()
    plain, x = copy.deepcopy(model), X.flatten(2)[..., :102].reshape(2, 3, 6, 17)[:, 0].mT.requires_grad_()
    assert not x.is_contiguous()
    apply_sparse_update(model, SparseUpdate(layers={"0": 0.5}))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-15)


def test_a_step_moves_the_trained_columns_alone_as_full_training_would():
    model, plain = small().double(), small().double()
    apply_sparse_update(model, SparseUpdate(layers={"dilated": (0, 5), "head": 1.0}, biases=False))
    for each in (model, plain):
        gradients(each)
        with torch.no_grad():
            for p in each.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    before, after, full = small().double().state_dict(), model.state_dict(), plain.state_dict()
    moved = torch.zeros(8, dtype=torch.bool)
    moved[[0, 5]] = True
    expected = torch.where(moved[None, :, None, None], full["dilated.weight"], before["dilated.weight"])
    torch.testing.assert_close(after["dilated.weight"], expected, rtol=1e-12, atol=0)
    assert all(torch.equal(after[n], before[n]) for n in after if n[:4] not in ("head", "dila", "norm"))
    with torch.no_grad():
        plain.load_state_dict(after)
        assert torch.equal(model(X), plain(X))


def test_a_layer_that_is_called_twice_adds_up_and_a_step_between_is_noticed():
    model, plain = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    plain.load_state_dict(model.state_dict())
    apply_sparse_update(model, SparseUpdate(layers={"Linear": (1, 4)}))
    x = torch.randn(3, 6, dtype=torch.float64)
    for each in (model, plain):
        each(torch.tanh(each(x))).sum().backward()
    torch.testing.assert_close(model.values.grad, plain.weight.grad[:, [1, 4]], rtol=1e-12, atol=1e-14)
    loss = model(torch.tanh(model(x))).sum()
    with torch.no_grad():
        model.values.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["conv", "dilated", "line", "linear", "of_transformers"])
def test_each_layer_passes_gradcheck_and_refuses_a_second_derivative(name):
    model = small().double()
    apply_sparse_update(model, SparseUpdate(layers={name: (0, 2)}))
    layer = model.get_submodule(name)
    shape = {"conv": (2, 3, 5, 5), "dilated": (1, 8, 5, 5), "line": (2, 12, 7), "linear": (2, 6)}.get(name, (2, 3, 10))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = x, *layer.parameters()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), inputs)
    (found,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


@pytest.mark.parametrize("autocast", [True, False])
def test_under_autocast_gradients_are_those_of_plain_autocast(autocast):
    model, plain, x = convolutions(), convolutions(), torch.randn(4, 1, 8, 8)
    apply_sparse_update(model, SparseUpdate(layers={"8": 0.25, "14": 0.5}))
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = each(x)
        y.float().square().sum().backward()
    for name, layer in partial_layers(model).items():
        theirs = layer.layout.compact(plain.get_submodule(name).weight.grad)
        tolerance = 0.02 if autocast else 1e-5
        assert (layer.values.grad - theirs).norm() <= tolerance * theirs.norm()


def test_evaluation_sees_the_values_of_the_latest_step():
    model, x = convolutions(), torch.randn(2, 1, 8, 8)
    apply_sparse_update(model, SparseUpdate(layers={"8": 0.5, "14": 0.5}))
    for mode in (torch.inference_mode, torch.no_grad):
        with torch.no_grad():
            for layer in partial_layers(model).values():
                layer.values.add_(0.1)
        plain = export_dense(copy.deepcopy(model))
        with mode():
            assert torch.equal(model(x), plain(x))
    model(x).sum().backward()  # buffers are no inference tensors


# ------------------------------------------------------------------------------- bytes
def kept_bytes(call, model, x):
    """What autograd keeps of a call besides parameters, buffers and `x`, each storage once."""
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t  # alive, so that no address comes twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in there)


def test_a_layer_keeps_its_trained_channels_and_a_frozen_one_nothing():
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    layers = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(nn.Hardswish(), *layers)  # Hardswish keeps `x`
    assert kept_bytes(lambda: model(x), model, x) == 3 * 4 * 8 * 36 * 4
    apply_sparse_update(model, SparseUpdate(layers={"3": (0, 3, 4)}))
    assert kept_bytes(lambda: model(x), model, x) == 3 * 4 * 36 * 4


def test_what_is_trained_takes_the_bytes_that_are_stated():
    model = convolutions()
    config = SparseUpdate(layers={"8": 0.25, "10": (3,), "14": 1.0})
    stated = estimate_sparse_update(model, config)
    summary = apply_sparse_update(model, config).summary
    numbers = 8 * 32 * 9 + 32 * 9 + 5 * 32 + 32 + 32 + 5
    total = sum(p.numel() for p in convolutions().parameters())
    assert summary == f"{numbers:,} of {total:,} numbers are trained, of weights in 3 layers (2 in part)"
    model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == stated == 4 * numbers
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    values_and_channels = 4 * (8 * 32 * 9 + 32 * 9) + 8 * 9
    assert held == sum(p.nbytes for p in convolutions().parameters()) + values_and_channels


# ------------------------------------------------------------------------------- which layers
def test_a_fraction_takes_the_channels_with_the_largest_weights():
    model = nn.Linear(8, 4)
    sizes = model.weight.detach().square().sum(0)
    apply_sparse_update(model, SparseUpdate(layers={"Linear": 0.5}))
    assert model.channels.tolist() == sorted(sizes.topk(4).indices.tolist())


def test_biases_are_those_behind_the_earliest_layer_or_those_that_are_named():
    def trained(**options):
        model = convolutions()
        apply_sparse_update(model, SparseUpdate(layers={"8": (0,)}, **options))
        return [name for name, p in model.named_parameters() if p.requires_grad]

    assert trained() == ["8.values", "8.bias", "10.bias", "14.bias"]
    assert trained(biases=False) == ["8.values"]
    assert trained(biases=("14", "2")) == ["2.bias", "8.values", "14.bias"]


def test_layers_that_cannot_be_trained_in_part_stay_frozen_with_a_reason():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(2 * x)

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Conv1d(4, 4, 1, groups=2), nn.Linear(4, 4), nn.Embedding(3, 4))
    model[3].weight.requires_grad_(False)
    summary = apply_sparse_update(model, SparseUpdate(layers={"*": 0.5})).summary
    assert summary.endswith("; frozen: 1 (its forward is not known), 2 (2 groups), 3 (frozen before)")
    assert list(partial_layers(model)) == ["0"]
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert "0 (tied weights), 1 (tied weights)" in apply_sparse_update(tied, SparseUpdate(layers={"*": 0.5})).summary
    assert not tied[0].weight.requires_grad


def test_convolutions_that_compute_something_else_behind_the_plain_forward_are_left_alone():
    class Standardised(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)

    model, x = nn.Sequential(Standardised(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8)
    expected = model(x)
    summary = apply_sparse_update(model, SparseUpdate(layers={"*": (0, 1)})).summary
    assert summary.endswith("; frozen: 0 (its forward is not known)")
    assert type(model[0]) is Standardised
    assert torch.equal(model(x), expected)


def test_a_frozen_convolution_that_is_unfrozen_later_has_the_gradients_of_a_plain_one():
    model, plain, x = convolutions().double(), convolutions().double(), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    apply_sparse_update(model, SparseUpdate(layers={"14": 1.0}))
    for each in (model, plain):
        each.requires_grad_(True)
        each(x).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_modules_that_are_no_layers_are_trained_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4))
    apply_sparse_update(model, SparseUpdate(layers={"LayerNorm": 1.0, "2": 1.0}))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight", "1.bias", "2.weight"]


def test_what_matches_nothing_is_refused():
    for layers, text in (
        ({"*.missing": 0.5}, r"`SparseUpdate.layers` must match a module with parameters, got '\*.missing'"),
        ({"grouped": 0.5}, r"must match a layer that can be trained in part.*grouped \(4 groups\)"),
        ({"conv": (3,)}, r"must have channels below 3, which 'conv' has, got 3"),
    ):
        model = small()
        with pytest.raises(ValueError, match=text):
            apply_sparse_update(model, SparseUpdate(layers=layers))
        assert all(p.requires_grad for p in model.parameters())
        assert [type(m) for m in model.modules()] == [type(m) for m in small().modules()]
    with pytest.raises(ValueError, match="`sparse_update` needs a plan for its budget first"):
        apply_sparse_update(small(), SparseUpdate(budget="1MiB"))


def test_layers_that_have_changed_already_are_refused():
    changes = (
        lambda m: apply_sparse_update(m, SparseUpdate(layers={"0": 0.5})),
        lambda m: apply_low_rank(m, LowRank(rank=2)),
        lambda m: apply_sparsity(m, Sparsity(min_size=1)),
    )
    for first in changes:
        for second in changes[:1] if first is not changes[0] else changes:
            model = nn.Sequential(nn.Linear(32, 32))
            applied = first(model)
            with pytest.raises(ValueError, match=r"must be applied once, to dense layers, got '0'"):
                second(model)
            applied.undo()
            second(model)


# ------------------------------------------------------------------------------- there and back
def test_undo_restores_classes_order_and_what_was_trained():
    model, plain = small(), small()
    for each in (model, plain):
        each.norm.bias.requires_grad_(False)
    applied = apply_sparse_update(model, SparseUpdate(layers=EVERY_LAYER))
    assert list(model.state_dict()) == list(plain.state_dict())
    applied.undo()
    applied.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    ours, theirs = list(model.named_parameters()), list(plain.named_parameters())
    assert [(n, p.shape, p.requires_grad) for n, p in ours] == [(n, p.shape, p.requires_grad) for n, p in theirs]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert all(vars(a).keys() == vars(b).keys() for a, b in zip(model.modules(), plain.modules(), strict=True))


def test_state_dicts_are_dense_both_ways_and_copies_compute_the_same():
    model, other = small().double().eval(), small().double().eval()
    apply_sparse_update(model, SparseUpdate(layers=EVERY_LAYER))
    with torch.no_grad():
        for p in (*model.parameters(), *other.parameters()):
            p.add_(torch.randn_like(p) / 10)
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in other.state_dict().items()}
    for twin in (copy.deepcopy(model), export_dense(copy.deepcopy(model))):
        assert torch.equal(twin(X), model(X))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(X), other(X))
    fresh = small().double().eval()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(X), other(X))


def test_a_weight_that_is_read_is_dense_and_its_gradient_goes_to_the_values():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    plain, x = copy.deepcopy(attention), torch.randn(2, 3, 8)
    apply_sparse_update(attention, SparseUpdate(layers={"out_proj": (2, 3)}))
    for each in (attention, plain):
        each(x, x, x)[0].sum().backward()
    assert torch.equal(attention.out_proj.weight, plain.out_proj.weight)
    torch.testing.assert_close(attention.out_proj.values.grad, plain.out_proj.weight.grad[:, [2, 3]])
