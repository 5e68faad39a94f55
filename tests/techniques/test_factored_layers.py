"""Low-rank layers compute what dense ones with the product as their weight do, and are dense on disk."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_memsave import (
    ActivationCompression,
    LowRank,
    Sparsity,
    apply_activation_compression,
    apply_low_rank,
    apply_sparsity,
    export_dense,
)
from lightning_memsave.techniques.low_rank import low_rank_layers
from lightning_memsave.techniques.low_rank.factored_layers import become_low_rank
from lightning_memsave.torch_internals.autograd_graph import is_made_of_weights
from tests.techniques.low_rank_subjects import small

X = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)


@st.composite
def convolutions(draw):
    dims = draw(st.integers(1, 3))
    options = {"bias": draw(st.booleans())} | {name: draw(st.integers(1, 2)) for name in ("stride", "dilation")}
    options["padding"] = draw(st.sampled_from([0, 1, "valid", *(["same"] if options["stride"] == 1 else [])]))
    channels = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    layer = getattr(nn, f"Conv{dims}d")(*channels, draw(st.integers(1, 3)), **options)
    return layer.double(), torch.randn(2, channels[0], *[6] * dims, dtype=torch.float64)


@st.composite
def linears(draw):
    sizes = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    x = torch.randn(*draw(st.sampled_from([(7,), (2, 3), ()])), sizes[0], dtype=torch.float64)
    if draw(st.booleans()):
        return nn.Linear(*sizes, bias=draw(st.booleans())).double(), x
    return Conv1D(sizes[1], sizes[0]).double(), x.unsqueeze(0)


def run(layer, x):
    x = x.detach().clone().requires_grad_()
    y = layer(x).sin()
    y.sum().backward()
    return y.detach(), x.grad


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=120, deadline=None)
@given(st.one_of(convolutions(), linears()), st.integers(1, 4))
def test_outputs_and_gradients_are_those_of_the_product(case, rank):
    layer, x = case
    dense = copy.deepcopy(layer)
    rank = min(rank, *layer.weight.flatten(1).shape)
    become_low_rank(layer, rank)
    with torch.no_grad():
        dense.weight.copy_(layer.weight)
    for ours, expected in zip(run(layer, x), run(dense, x), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    first, second = layer.pair
    gradient = dense.weight.grad.flatten(1)  # [N, M]
    expected = torch.cat([gradient @ second, gradient.T @ first])
    torch.testing.assert_close(layer.factors.grad, expected, rtol=1e-10, atol=1e-10)
    if layer.bias is not None:
        torch.testing.assert_close(layer.bias.grad, dense.bias.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layer", [nn.Linear(5, 4), nn.Conv2d(2, 3, 2), Conv1D(4, 5)])
def test_gradients_of_gradients(layer):
    layer = copy.deepcopy(layer).double()
    become_low_rank(layer, 2)
    x = torch.randn(2, 2, 3, 3) if isinstance(layer, nn.Conv2d) else torch.randn(3, 5)

    def function(x, factors):
        return torch.func.functional_call(layer, {"factors": factors}, (x,)).tanh()

    def through_the_weight(factors):
        return torch.func.functional_call(Reads(layer), {"layer.factors": factors}, ()).tanh()

    factors = layer.factors.detach().clone().requires_grad_()
    inputs = x.double().requires_grad_(), factors
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(through_the_weight, (factors,))


class Reads(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self):
        return self.layer.weight


def test_modules_that_read_the_weights_of_their_children_and_layers_with_a_forward_of_their_own():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    torch.manual_seed(0)
    for module in (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), nn.Sequential(Scaled(32, 32))):
        apply_low_rank(module, LowRank(rank=4))
        dense = export_dense(copy.deepcopy(module))
        x = torch.randn(2, 5, 32)
        torch.testing.assert_close(module(x), dense(x))
        with torch.no_grad():
            torch.testing.assert_close(module.eval()(x), dense.eval()(x))
    assert list(low_rank_layers(module)) == ["0"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_have_no_break_and_the_same_gradients(backend):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32 * 36, 32), nn.Tanh())
    apply_low_rank(model, LowRank(rank=4))
    expected = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    found = torch.autograd.grad(
        torch.compile(model, backend=backend, fullgraph=True)(X).sum(), list(model.parameters())
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


class Summed(nn.Module):
    """Makes the input of a layer itself: what the caller holds is in no store."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.cumsum(0)).sin()


def test_a_layer_keeps_its_input_and_what_is_between_its_factors_and_no_weight():
    for layer, x, inner in (
        (nn.Linear(64, 48), torch.randn(10, 64), 10 * 4),
        (nn.Conv2d(16, 48, 3), torch.randn(2, 16, 8, 8), 2 * 4 * 36),
    ):
        become_low_rank(layer, 4)
        kept = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x).sum().backward()
        own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        assert own & kept.keys(), "views of the factors"
        assert sum(size for place, size in kept.items() if place not in own) == 4 * (x.numel() + inner)


@pytest.mark.parametrize(("codec", "least", "most"), [("exact", 0.0, 0.0), ("int4", 1e-3, 0.3)])
@pytest.mark.parametrize("layer", [nn.Linear(64, 48), nn.Conv2d(16, 48, 3)], ids=["linear", "convolution"])
def test_a_store_takes_inputs_and_no_factors(layer, codec, least, most):
    layer = copy.deepcopy(layer)
    become_low_rank(layer, 4)
    model, gradients = Summed(layer), []
    x = torch.randn(200, 64) if isinstance(layer, nn.Linear) else torch.randn(4, 16, 12, 12)
    for codecs in ((), (codec,)):
        applied = apply_activation_compression(model, ActivationCompression(codecs=codecs)) if codecs else None
        given = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(model(given).sum(), (given, layer.factors)))
        if applied is not None:
            applied.undo()
    error = (gradients[0][1] - gradients[1][1]).norm() / gradients[0][1].norm()
    assert least <= error <= most


class Own(nn.Linear):
    def forward(self, x):
        return torch.nn.functional.linear(x.cumsum(0), self.weight, self.bias)


def test_a_product_of_factors_is_taken_for_a_weight_that_no_codec_makes_coarse():
    torch.manual_seed(0)
    layer, x = Own(96, 96), torch.randn(64, 96)
    become_low_rank(layer, 4)
    assert is_made_of_weights(layer.weight)
    assert is_made_of_weights(layer.weight.T)
    assert not is_made_of_weights(torch.nn.functional.linear(x, layer.weight))
    model, found = nn.Sequential(layer, nn.Linear(96, 96)), []
    for codecs in ((), ("int4",)):
        applied = apply_activation_compression(model, ActivationCompression(codecs=codecs)) if codecs else None
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(model(given).sum(), (given, layer.factors)))
        if applied is not None:
            applied.undo()
    (plain_x, plain), (coded_x, coded) = found
    assert torch.equal(plain_x, coded_x)
    assert not torch.equal(plain, coded), "its input is coded"


# ------------------------------------------------------------------------------- the change of a layer, and back
def test_a_layer_keeps_its_place_among_parameters_and_comes_back():
    layer = nn.Linear(12, 10)
    bias = layer.bias
    become_low_rank(layer, 3)
    assert isinstance(layer, nn.Linear)
    assert type(layer).__name__ == "LowRankLinear"
    assert [name for name, _ in layer.named_parameters()] == ["factors", "bias"]
    assert layer.bias is bias
    assert layer.factors.shape == (22, 3)
    assert layer.rank == 3
    weight = layer.weight.detach().clone()
    layer.factors.requires_grad_(False)
    layer.become_dense()
    assert type(layer) is nn.Linear
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    assert torch.equal(layer.weight, weight)


def test_undo_and_export_give_a_plain_module_back():
    model, plain = small(), small()
    applied = apply_low_rank(model, LowRank(rank=4))
    expected = model(X)
    exported = export_dense(copy.deepcopy(model))
    applied.undo()
    applied.undo()
    for module in (model, exported):
        assert [type(m) for m in module.modules()] == [type(m) for m in plain.modules()]
        assert [(n, p.shape) for n, p in module.named_parameters()] == [
            (n, p.shape) for n, p in plain.named_parameters()
        ]
        assert all(vars(m).keys() == vars(p).keys() for m, p in zip(module.modules(), plain.modules(), strict=True))
        torch.testing.assert_close(module(X), expected)
    with pytest.raises(ValueError, match="must have sparse, low-rank or partly trained layers"):
        export_dense(model)


@pytest.mark.parametrize("layer", ["attention", "a forward of its own"])
def test_weights_that_are_read_under_autocast_have_the_dtype_of_their_parameter(layer):
    class Doubled(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, 2 * self.weight, self.bias)

    torch.manual_seed(0)
    model = nn.MultiheadAttention(64, 4, batch_first=True) if layer == "attention" else nn.Sequential(Doubled(64, 64))
    apply_low_rank(model, LowRank(rank=4))
    [compact] = low_rank_layers(model).values()
    x = torch.randn(2, 5, 64)

    def gradient(enabled):
        compact.factors.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = model(x, x, x)[0] if layer == "attention" else model(x)
            assert compact.weight.dtype == torch.float32
        y.float().square().sum().backward()
        return compact.factors.grad

    exact, found = gradient(False), gradient(True)
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize(
    "apply", [lambda m: apply_low_rank(m, LowRank(rank=4)), lambda m: apply_sparsity(m, Sparsity(sparsity=0.8))]
)
def test_undo_after_export_changes_nothing(apply):
    model = nn.Sequential(nn.Linear(64, 64))
    applied = apply(model)
    export_dense(model)
    weight = model[0].weight
    applied.undo()
    assert model[0].weight is weight


def test_copies_and_pickles_compute_with_their_own_weights():
    model = small()
    apply_low_rank(model, LowRank(rank=4))
    expected = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), expected)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not twin(X).any()
        assert torch.equal(model(X), expected)


def test_device_and_dtype_moves():
    model = small()
    apply_low_rank(model, LowRank(rank=4))
    assert model.to(torch.float64)(X.double()).dtype == torch.float64
    assert model.bfloat16()(X.bfloat16()).dtype == torch.bfloat16
    assert model.linear.factors.element_size() == 2


# ------------------------------------------------------------------------------- state dicts
def test_checkpoints_are_dense_both_ways():
    model, dense = small(), small()
    keys = list(model.state_dict())
    apply_low_rank(model, LowRank(rank=4))
    assert list(model.state_dict()) == keys
    assert not any(tensor.requires_grad for tensor in model.state_dict().values())
    dense.load_state_dict(model.state_dict())
    torch.testing.assert_close(dense(X), model(X))
    other = small()
    apply_low_rank(other, LowRank(rank=4))
    other.load_state_dict(dense.state_dict())
    torch.testing.assert_close(other(X), model(X))
    full = small()
    model.load_state_dict(full.state_dict())  # cut to the rank
    apply_low_rank(full, LowRank(rank=4))
    assert torch.equal(model.linear.factors, full.linear.factors)


def test_loading_its_own_weights_keeps_the_factors():
    layer = nn.Linear(20, 30)
    become_low_rank(layer, 3)
    with torch.no_grad():
        layer.factors.normal_()
    factors = layer.factors.detach().clone()
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer.factors, factors)


def test_a_checkpoint_that_does_not_fit_is_told_in_torchs_words():
    model = small()
    apply_low_rank(model, LowRank(rank=4))
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*linear\.weight"):
        model.load_state_dict({k: v for k, v in state.items() if k != "linear.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for linear\.weight"):
        model.load_state_dict({**state, "linear.weight": torch.zeros(3, 3)})
