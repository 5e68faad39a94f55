"""Sparse layers against masked dense ones: outputs and gradients are the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_memsave import Sparsity, apply_sparsity
from lightning_memsave.numerics.sparse_index import pack_positions
from lightning_memsave.techniques.sparsity import sparse_layers
from lightning_memsave.techniques.sparsity.layers import SparseEmbedding, become_sparse, sparse_class
from tests.techniques.sparsity_subjects import tiny


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    is_transposed = draw(st.booleans())
    kind = getattr(nn, f"Conv{'Transpose' if is_transposed else ''}{dims}d")
    options = {"groups": groups, "bias": draw(st.booleans())}
    options |= {name: draw(st.integers(1, 2)) for name in ("stride", "dilation")}
    options["padding"] = draw(st.integers(0, 1))
    if not is_transposed:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    channels = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 4))
    layer = kind(*channels, draw(st.integers(1, 3)), **options)
    return layer, torch.randn(2, channels[0], *[6] * dims)


@st.composite
def others(draw):
    sizes = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["Linear", "Embedding", "Conv1D"]))
    if kind == "Embedding":
        padding_idx = draw(st.sampled_from([None, 0]))
        return nn.Embedding(*sizes, padding_idx=padding_idx), torch.randint(0, sizes[0], (3, 5))
    shape = draw(st.sampled_from([(7,), (2, 3)]))
    if kind == "Conv1D":
        return Conv1D(sizes[1], sizes[0]), torch.randn(*shape, sizes[0])
    return nn.Linear(*sizes, bias=draw(st.booleans())), torch.randn(*shape, sizes[0])


def run(layer: nn.Module, x: torch.Tensor):
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    y = layer(x).sin()
    y.sum().backward()
    return [y.detach(), *([x.grad] if x.is_floating_point() else [])]


@settings(max_examples=150)
@given(
    st.one_of(convolutions(), others()),
    st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.97]),
    st.sampled_from(["random", "magnitude"]),
    st.integers(0, 9),
)
def test_outputs_and_gradients_equal_masked_dense_ones_to_the_bit(case, sparsity, initial, seed):
    layer, x = case
    masked = copy.deepcopy(layer)
    apply_sparsity(nn.Sequential(layer), tiny(sparsity, initial=initial, seed=seed))
    mask = layer.layout.dense(torch.ones_like(layer.values)) != 0
    assert int(mask.sum()) == layer.values.numel() == max(1, round((1 - sparsity) * mask.numel()))
    with torch.no_grad():
        masked.weight *= mask
    for ours, expected in zip(run(layer, x), run(masked, x), strict=True):
        assert torch.equal(ours, expected)
    assert torch.equal(layer.values.grad, masked.weight.grad[mask])
    if getattr(layer, "bias", None) is not None:
        assert torch.equal(layer.bias.grad, masked.bias.grad)


def test_autocast_and_views_are_rebuilt_to_the_bit():
    for layer in (nn.Linear(40, 30), nn.Conv2d(3, 8, 3, bias=False)):
        masked = copy.deepcopy(layer)
        apply_sparsity(nn.Sequential(layer), tiny())
        with torch.no_grad():
            masked.weight *= layer.layout.dense(torch.ones_like(layer.values))
        x = torch.randn(5, 40) if isinstance(layer, nn.Linear) else torch.randn(2, 3, 9, 9)
        with torch.autocast("cpu", torch.bfloat16):
            for ours, expected in zip(run(layer, x), run(masked, x), strict=True):
                assert torch.equal(ours, expected)
        assert torch.equal(layer.values.grad, layer.layout.compact(masked.weight.grad))


def test_gradients_of_gradients():
    layer = nn.Linear(3, 4).double()
    apply_sparsity(nn.Sequential(layer), tiny())
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def function(x, values):
        return torch.func.functional_call(layer, {"values": values}, (x,)).tanh()

    values = layer.values.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, values))
    assert torch.autograd.gradgradcheck(function, (x, values))


def test_modules_that_read_the_weights_of_their_children():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    masked = copy.deepcopy(attention)
    apply_sparsity(attention, tiny(0.8))
    assert list(sparse_layers(attention)) == ["out_proj"]
    masked.load_state_dict(attention.state_dict())
    x = torch.randn(2, 5, 32)
    for module in (attention, masked):
        module(x, x, x)[0].square().sum().backward()
    assert torch.equal(attention.out_proj.values.grad, attention.out_proj.layout.compact(masked.out_proj.weight.grad))
    assert torch.equal(attention.eval()(x, x, x)[0], masked.eval()(x, x, x)[0])


def test_compiled_modules_leave_sparse_layers_to_eager():
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    apply_sparsity(model, tiny())
    x = torch.randn(3, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_ids_beyond_the_table_of_a_sparse_embedding_raise():
    model = nn.Sequential(nn.Embedding(50, 8))
    apply_sparsity(model, Sparsity(sparsity=0.5, min_size=1))
    model(torch.tensor([0, 49])), model(torch.tensor([], dtype=torch.long))
    for ids in ([50], [-1, 3]):
        with pytest.raises(RuntimeError, match="index out of range"):
            model(torch.tensor(ids))


# ------------------------------------------------------------------------------- the change of a layer, and back
def test_a_layer_keeps_its_live_values_and_its_place_among_parameters():
    layer = nn.Linear(5, 4)
    weight, bias = layer.weight.detach().clone(), layer.bias
    positions = torch.tensor([0, 3, 7, 19])
    become_sparse(layer, pack_positions(positions, 20))
    assert isinstance(layer, nn.Linear)
    assert [name for name, _ in layer.named_parameters()] == ["values", "bias"]
    assert layer.bias is bias
    assert torch.equal(layer.values, weight.view(-1)[positions])
    assert layer.layout.positions().tolist() == positions.tolist()
    expected = torch.zeros(20).index_put((positions,), weight.view(-1)[positions]).view(4, 5)
    assert torch.equal(layer.weight, expected)
    layer.become_dense()
    assert type(layer) is nn.Linear
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.named_buffers()) == []
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, expected)


def test_a_frozen_layer_is_frozen_when_it_is_dense_again():
    layer = nn.Linear(5, 4)
    become_sparse(layer, pack_positions(torch.tensor([2, 9]), 20))
    layer.values.requires_grad_(False)
    layer.become_dense()
    assert not layer.weight.requires_grad


def test_one_class_for_each_class_of_layers():
    assert sparse_class(nn.Linear) is sparse_class(nn.Linear)
    assert issubclass(sparse_class(nn.Embedding), (SparseEmbedding, nn.Embedding))
    assert not issubclass(sparse_class(nn.Conv2d), SparseEmbedding)

    class Own(nn.Embedding):
        def forward(self, ids):
            return self.weight[ids]

    assert not issubclass(sparse_class(Own), SparseEmbedding), "whose forward may read any row"


@pytest.mark.parametrize("positions", [[1, 4, 5, 6], [3], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
def test_values_move_and_the_parameter_stays_the_same_object(positions):
    layer = nn.Linear(3, 3, bias=False)
    become_sparse(layer, pack_positions(torch.tensor([0, 4, 8]), 9))
    parameter, values = layer.values, torch.arange(1.0, len(positions) + 1)
    layer.move_to(torch.tensor(positions), values)
    assert layer.values is parameter
    assert torch.equal(layer.weight, torch.zeros(9).index_put((torch.tensor(positions),), values).view(3, 3))
    x = torch.randn(2, 3)
    layer(x).sum().backward()
    assert torch.equal(parameter.grad, x.sum(0).expand(3, 3).reshape(-1)[positions])


# ------------------------------------------------------------------------------- state dicts
def test_a_dense_checkpoint_gives_its_largest_values():
    layer, dense = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    become_sparse(layer, pack_positions(torch.tensor([0, 1, 2]), 12))
    with torch.no_grad():
        dense.weight.copy_(torch.tensor([5.0, -1, 2, 0.5, -9, 3, 0.1, 0.2, 4, -0.3, 0.4, 6]).view(3, 4))
    layer.load_state_dict(dense.state_dict())
    assert layer.layout.positions().tolist() == [0, 4, 11]
    assert layer.values.tolist() == [5.0, -9.0, 6.0]


def test_a_pattern_stays_where_its_values_are_zero():
    layer = nn.Linear(4, 3, bias=False)
    become_sparse(layer, pack_positions(torch.tensor([1, 5, 10]), 12))
    with torch.no_grad():
        layer.values.copy_(torch.tensor([2.0, 0.0, 0.0]))
    saved = layer.state_dict()
    assert list(saved) == ["weight"]
    other = nn.Linear(4, 3, bias=False)
    become_sparse(other, pack_positions(torch.tensor([1, 5, 10]), 12))
    other.load_state_dict(saved)
    assert other.layout.positions().tolist() == [1, 5, 10]
    assert other.values.tolist() == [2.0, 0.0, 0.0]


def test_in_groups_each_has_its_largest_values():
    layer, dense = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)
    become_sparse(layer, pack_positions(torch.tensor([0, 1, 4, 5]), 8), (2, 4))
    with torch.no_grad():
        dense.weight.copy_(torch.tensor([[9.0, 1, -8, 7], [0.1, 0.2, 0.3, -0.4]]))
    layer.load_state_dict(dense.state_dict())
    assert layer.layout.positions().tolist() == [0, 2, 6, 7]


def test_a_checkpoint_of_another_shape_or_without_the_weight_is_told():
    layer = nn.Linear(4, 3)
    become_sparse(layer, pack_positions(torch.tensor([0, 1, 2]), 12))
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: torch.Size\(\[3, 5\]\) in the checkpoint"):
        layer.load_state_dict(nn.Linear(5, 3).state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight"'):
        layer.load_state_dict({"bias": torch.zeros(3)})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
        layer.load_state_dict({**layer.state_dict(), "more": torch.zeros(3)})


# ------------------------------------------------------------------------------- gradients of what does not live
def test_whoever_watches_gets_the_dense_gradient_of_each_step():
    layer, dense = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    become_sparse(layer, pack_positions(torch.tensor([1, 5, 10]), 12))
    dense.load_state_dict(layer.state_dict())
    layer.watches_gradient = True
    for _ in range(2):
        layer.zero_grad()
        dense.zero_grad()
        for x in torch.randn(2, 5, 4):  # microbatches
            layer(x).square().sum().backward()
            dense(x).square().sum().backward()
        torch.testing.assert_close(layer.dense_gradient, dense.weight.grad)
