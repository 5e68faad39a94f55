"""Sparse layers against masked dense ones: outputs and gradients are the same bits, and bytes are those stated."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_memsave import Ledger, Sparsity, apply_sparsity
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.techniques.sparsity import estimate_sparsity, sparse_layers
from tests.contracts.spec import Spec
from tests.techniques.sparsity_subjects import tiny

SPEC = Spec(config=Sparsity(sparsity=0.9), loss_class="changed", shrinks="weights")


# ------------------------------------------------------------------------------- bit-equality
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


# ------------------------------------------------------------------------------- bytes
def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    with Ledger().watching(model, batch=x) as ledger:
        before = ledger.live_bytes
        loss = model(x).sum()
        kept = ledger.live_bytes - before
    loss.backward()
    return kept


def test_the_dense_weight_is_not_kept():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    x = torch.randn(2, 64, requires_grad=True)
    plain = kept_bytes(copy.deepcopy(model), x)
    apply_sparsity(model, tiny(0.9))
    assert kept_bytes(model, x) == plain == 2 * 64 * 4 + 4  # one activation, and the loss
    with SavedTensorStore(recompute=True, min_numel=1).scope():
        loss = model(x).sum()
    loss.backward()


@pytest.mark.parametrize("scope", ["alone", "store"])
def test_a_store_changes_nothing(scope):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    plain, ids = copy.deepcopy(model), torch.randint(0, 50, (4, 6))
    apply_sparsity(model, tiny())
    plain.load_state_dict(model.state_dict())
    store = SavedTensorStore(recompute=True, min_numel=1)
    if scope == "store":
        with store.scope():
            loss = model(ids).square().sum()
        # Two activations; the ReLU's mask is read off its result.
        assert store.tally.plain_bytes >= store.tally.held_bytes
    else:
        loss = model(ids).square().sum()
    loss.backward()
    plain(ids).square().sum().backward()
    for name, layer in sparse_layers(model).items():
        assert torch.equal(layer.values.grad, layer.layout.compact(plain.get_submodule(name).weight.grad))


def test_weights_that_a_model_uses_by_itself_are_recipes_in_a_store():
    """A model that calls functions on `layer.weight` outside of the layer's own forward."""
    layer = nn.Linear(64, 64)
    apply_sparsity(nn.Sequential(layer), tiny(0.9))
    x, store = torch.randn(2, 64, requires_grad=True), SavedTensorStore(min_numel=1)
    with store.scope():
        loss = F.linear(x, layer.weight).sum()
    assert store.tally.held_bytes == 0  # `x` is the caller's, the weight is made again
    loss.backward()
    expected = torch.autograd.grad(F.linear(x, layer.layout.dense(layer.values.detach())).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_a_lossy_store_keeps_weights_exact():
    layer = nn.Linear(64, 64, bias=False)
    apply_sparsity(nn.Sequential(layer), tiny(0.5))
    x = torch.randn(32, 64, requires_grad=True)
    expected = torch.autograd.grad(layer(x.tanh() * 1.0).sum(), [x, layer.values])
    with SavedTensorStore(lossy=Fidelity.INT4, min_numel=1).scope():
        loss = layer(x.tanh() * 1.0).sum()
    gradients = torch.autograd.grad(loss, [x, layer.values])
    assert torch.equal(gradients[0], expected[0])
    assert not torch.equal(gradients[1], expected[1])  # of the input, which is coded


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


@pytest.mark.parametrize(
    "options",
    [
        *({"sparsity": sparsity} for sparsity in (0.5, 0.9, 0.95, "2:4")),
        {"sparsity": 0.9, "distribution": "erk"},
        {"sparsity": 0.9, "distribution": "global", "initial": "magnitude"},
        {"sparsity": 0.9, "method": "gradual"},
    ],
)
def test_bytes_are_those_estimated(options):
    model, config = WideResNet(), Sparsity(**options)
    before = sum(p.nbytes for p in model.parameters())
    prunable = {n: m.weight.numel() for n, m in model.named_modules() if hasattr(m, "weight")}
    estimate = estimate_sparsity(model, config)
    apply_sparsity(model, config)
    layers = sparse_layers(model)
    held = sum(layer.values.nbytes + layer.values_index.nbytes for layer in layers.values())
    assert held == estimate
    rest = before - 4 * sum(prunable[name] for name in layers)
    assert sum(p.nbytes for p in model.parameters()) + sum(layer.values_index.nbytes for layer in layers.values()) == (
        rest + estimate
    )


def test_wide_resnet_at_90_percent_holds_two_megabytes():
    """Weights with positions, buffers, gradients and momentum."""
    model = WideResNet()
    apply_sparsity(model, Sparsity(sparsity=0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    gradients = sum(p.grad.nbytes for p in model.parameters())
    momentum = sum(state["momentum_buffer"].nbytes for state in optimizer.state.values())
    assert (held, gradients, momentum) == (805_500, 608_116, 608_116)
    dense = WideResNet()
    assert sum(t.nbytes for t in (*dense.parameters(), *dense.buffers())) == 5_885_104


def test_ids_beyond_the_table_of_a_sparse_embedding_raise():
    model = nn.Sequential(nn.Embedding(50, 8))
    apply_sparsity(model, Sparsity(sparsity=0.5, min_size=1))
    model(torch.tensor([0, 49])), model(torch.tensor([], dtype=torch.long))
    for ids in ([50], [-1, 3]):
        with pytest.raises(RuntimeError, match="index out of range"):
            model(torch.tensor(ids))
