"""Low-rank layers take the bytes that are stated, and are those that were asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave import LowRank, Sparsity, apply_low_rank, apply_sparsity
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.techniques.low_rank import estimate_low_rank, low_rank_layers
from tests.contracts.spec import Spec
from tests.techniques.low_rank_subjects import small

SPEC = Spec(config=LowRank(rank=8), loss_class="changed", shrinks="weights")


@pytest.mark.parametrize("rank", [1, 8, 0.05, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_estimated(rank, dtype):
    model, config = WideResNet().to(dtype), LowRank(rank=rank)
    before = sum(p.nbytes for p in model.parameters())
    weights = {n: m.weight.nbytes for n, m in model.named_modules() if hasattr(m, "weight")}
    estimate = estimate_low_rank(model, config)
    apply_low_rank(model, config)
    layers = low_rank_layers(model)
    assert sum(layer.factors.nbytes for layer in layers.values()) == estimate
    rest = before - sum(weights[name] for name in layers)
    assert sum(p.nbytes for p in model.parameters()) == rest + estimate


def test_wide_resnet_at_rank_16_holds_weights_gradients_and_momentum_of_factors():
    model = WideResNet()
    apply_low_rank(model, LowRank(rank=16))
    shapes = [layer.dense_shape for layer in low_rank_layers(model).values()]
    numbers = sum(16 * (shape[0] + shape[1] * shape[2] * shape[3]) for shape in shapes)
    others = sum(p.numel() for name, p in model.named_parameters() if not name.endswith("factors"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    held = 4 * (numbers + others)
    assert sum(p.nbytes for p in model.parameters()) == held
    assert sum(p.grad.nbytes for p in model.parameters()) == held
    assert sum(state["momentum_buffer"].nbytes for state in optimizer.state.values()) == held
    assert held < sum(p.nbytes for p in WideResNet().parameters()) / 5


def test_a_fraction_gives_each_layer_the_rank_that_takes_no_more():
    model = WideResNet()
    apply_low_rank(model, LowRank(rank=0.2))
    for layer in low_rank_layers(model).values():
        num, sides = layer.dense_shape.numel(), sum(layer.pair[0].shape[:1] + layer.pair[1].shape[:1])
        assert layer.rank * sides <= 0.2 * num < (layer.rank + 1) * sides


# ------------------------------------------------------------------------------- which layers
def test_layers_that_would_grow_and_those_that_cannot_be_factored_stay_dense():
    summary = apply_low_rank(small(), LowRank(rank=4)).summary
    assert summary == (
        "1,172 numbers instead of 5,280 weights in 4 layers (rank 4); dense: "
        "grouped (4 groups), reflected (padding_mode='reflect'), narrow (rank 4 takes no fewer bytes)"
    )
    assert "narrow (its rank would be 0)" in apply_low_rank(small(), LowRank(rank=0.1)).summary
    model = small()
    model.linear.weight.requires_grad_(False)
    assert "linear (frozen)" in apply_low_rank(model, LowRank(rank=4)).summary
    with torch.device("meta"):
        hollow = nn.Linear(32, 32)
    assert (
        "1 (its weight has no memory yet)"
        in apply_low_rank(nn.Sequential(nn.Linear(32, 32), hollow), LowRank(rank=4)).summary
    )


def test_selections():
    for modules in ("linear", "li*", lambda name, module: name == "linear"):
        model = small()
        apply_low_rank(model, LowRank(rank=4, modules=modules))
        assert list(low_rank_layers(model)) == ["linear"]
    for modules in ("Linear", nn.Linear):
        model = small()
        apply_low_rank(model, LowRank(rank=4, modules=modules))
        assert list(low_rank_layers(model)) == ["linear", "last"]
    for modules in ("*.missing", nn.Bilinear):
        with pytest.raises(ValueError, match=r"`LowRank.modules` must match at least one .* that can be of low rank"):
            apply_low_rank(small(), LowRank(modules=modules))
    with pytest.raises(ValueError, match=r"`low_rank` must match .*narrow \(rank 64 takes no fewer bytes\)"):
        apply_low_rank(small(), LowRank(rank=64))
    with pytest.raises(ValueError, match="no Linear or Conv"):
        apply_low_rank(nn.Embedding(50, 20), LowRank())


def test_tied_weights_are_left_dense_and_refused_where_they_are_asked_for():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
            self.head.weight, self.other = self.embed.weight, nn.Linear(32, 32)

    with pytest.raises(ValueError, match=r"tied weights, got 'embed.weight and head.weight'.*LowRank.*name != 'head'"):
        apply_low_rank(Tied(), LowRank(rank=2, modules="head"))
    model = Tied()
    assert "dense: head (tied weights)" in apply_low_rank(model, LowRank(rank=2)).summary
    assert list(low_rank_layers(model)) == ["other"]
    assert model.head.weight is model.embed.weight


def test_layers_that_have_changed_already_are_refused():
    for first in (lambda m: apply_low_rank(m, LowRank(rank=2)), lambda m: apply_sparsity(m, Sparsity(min_size=1))):
        model = nn.Sequential(nn.Linear(32, 32))
        applied = first(model)
        with pytest.raises(ValueError, match=r"must be applied once, to dense layers, got '0'"):
            apply_low_rank(model, LowRank(rank=2))
        applied.undo()
        apply_low_rank(model, LowRank(rank=2))
    with pytest.raises(ValueError, match="must be applied once"):
        apply_sparsity(model, Sparsity(min_size=1))


def test_factors_that_are_given_are_used_where_their_product_is_the_weight():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    applied = apply_low_rank(model, LowRank(rank=2))
    turn = torch.linalg.qr(torch.randn(2, 2))[0]  # another pair of factors, of the same product
    factors = {name: layer.factors.detach() @ turn for name, layer in low_rank_layers(model).items()}
    applied.undo()
    with torch.no_grad():
        model[1].weight.mul_(2)
    apply_low_rank(model, LowRank(rank=2), factors)
    assert torch.equal(model[0].factors, factors["0"])
    assert not torch.equal(model[1].factors, factors["1"])
    model = nn.Sequential(nn.Linear(32, 32))
    apply_low_rank(model, LowRank(rank=3), factors)  # of another rank
    assert model[0].factors.shape == (64, 3)
