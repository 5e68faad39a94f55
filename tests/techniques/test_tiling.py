"""Tiles against the plain module: outputs, gradients, random numbers, what is kept, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import (
    Tiling,
    apply_tiling,
)
from tests.contracts.spec import Spec

from .tiling_subjects import MLP, D, assert_alike, batch, net, step

# Adam steps by as much for a gradient that is rounding alone: another order of sums may give it another sign.
SPEC = Spec(config=Tiling(dim=0, size=16), loss_class="exact", tips_by=0.06, shrinks="activations")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("config", "summary"),
    [
        (Tiling(dim=0, size=2), "1 module in tiles: 1 x Sequential, at most 2 samples"),
        (Tiling(dim=0, size=1), "1 module in tiles: 1 x Sequential, at most 1 sample"),
        (Tiling(dim=1, size=6), "2 modules in tiles: 2 x MLP, at most 6 positions"),
        (Tiling(modules="MLP", size=6), "2 modules in tiles: 2 x MLP, at most 6 positions"),
        (Tiling(modules=MLP, dim=0, size=6), "2 modules in tiles: 2 x MLP, at most 6 samples"),
        (
            Tiling(modules=("MLP", "blocks.1"), dim=0, size=6),
            "1 x MLP, at most 6 samples; 1 x Block, at most 6 samples",
        ),
        (Tiling(modules="*.0.mlp", size=1), "1 module in tiles: 1 x MLP, at most 1 position"),
        (Tiling(modules=lambda name, module: name == "blocks.1", size=5), "1 x Block, at most 5 samples"),
    ],
)
def test_results_and_random_numbers_are_those_of_the_plain_module(config, summary, dropout):
    model = net(dropout)
    expected = step(copy.deepcopy(model), batch())
    applied = apply_tiling(model, config)
    assert applied.summary == "no module has run yet"
    assert_alike(step(model, batch()), expected)
    assert applied.summary.endswith(summary)
    assert (applied.loss_class, applied.reasons) == ("exact", ())
    applied.undo()
    applied.undo()
    assert all("forward" not in vars(module) for module in model.modules())


def test_float32_is_as_far_from_float64_as_the_plain_module_is():
    model, x = net(0.2, torch.float32), batch(torch.float32)
    exact = step(copy.deepcopy(model).double(), x.double())
    plain = step(copy.deepcopy(model), x)
    apply_tiling(model, Tiling(dim=0, size=2))
    tiled = step(model, x)
    for name, tensor in exact.items():
        error = [float((found[name].double() - tensor).norm()) for found in (tiled, plain)]
        assert error[0] <= 2 * error[1] + 1e-7 * float(tensor.norm()), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("size", [256, 16])
def test_16_bit_weights_have_gradients_as_near_to_float64_as_the_plain_ones(size, autocast):
    torch.manual_seed(0)
    model, x = nn.Sequential(MLP()), torch.randn(2, 1024, D)
    exact = step(copy.deepcopy(model).double(), x.double())
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    plain = step(copy.deepcopy(model), x, autocast=autocast)
    apply_tiling(model, Tiling(dim=1, size=size))
    tiled = step(model, x, autocast=autocast)
    for name in dict(model.named_parameters()):
        assert tiled[name].dtype is plain[name].dtype
        error = [float((found[name].double() - exact[name]).norm()) for found in (tiled, plain)]
        assert error[0] <= 1.25 * error[1], name


def test_dropout_outside_draws_in_the_order_of_what_the_module_returns():
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.dropout = nn.MultiheadAttention(D, 2, batch_first=True), nn.Dropout(0.5)

        def forward(self, x):  # the attention's result lies in memory by positions, then samples
            return self.dropout(self.attention(x, x, x, need_weights=False)[0])

    model = nn.Sequential(Outside()).double()
    expected = step(copy.deepcopy(model), batch())
    apply_tiling(model, Tiling(modules=nn.MultiheadAttention, dim=0, size=2))
    assert_alike(step(model, batch()), expected)


def test_noise_that_cannot_be_kept_is_named_and_the_result_is_changed():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(D, D))

        def forward(self, x):
            return self.linear(x) * torch.bernoulli(torch.full_like(x, 0.5))

    model = nn.Sequential(Noisy()).double()
    applied = apply_tiling(model, Tiling(modules="Noisy", dim=1, size=4))
    found = step(model, batch())
    assert all(torch.isfinite(tensor).all() for tensor in found.values())
    assert (applied.loss_class, applied.reasons) == ("changed", ("0 (Noisy: other random numbers in tiles)",))
    applied.undo()
    applied = apply_tiling(model, Tiling(dim=1, size=4))
    step(model, batch())
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 4 positions"  # inside, where nothing is drawn
    assert applied.loss_class == "exact"


def kept_bytes(call):
    """Bytes of storages that autograd keeps, each once, without parameters."""
    found: dict[int, int] = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call()
    return sum(found.values()), output


def test_a_module_in_tiles_keeps_its_input_and_masks_as_bits():
    torch.manual_seed(0)
    model, x = nn.Sequential(MLP(0.5)), torch.randn(4, 64, D, requires_grad=True)
    apply_tiling(model, Tiling(dim=0, size=1))
    model(x)
    size, _ = kept_bytes(lambda: model(x))
    assert size == x.nbytes  # what hooks see: slices along samples share the input's memory
    (tile, *_) = model[0].__dict__["_tiles"]._known.values()
    assert [draw.times for draw in tile[1].draws] == [1, 1]


def test_auto_takes_as_many_tiles_as_bring_the_inside_down_to_the_edge():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
    model, x = nn.Sequential(mlp), torch.randn(2, 4096, D)
    applied = apply_tiling(model, Tiling(dim=1))
    model(x)
    # Per position 64 numbers before GELU and 64 behind it are kept inside, and 2 x 16 are input and output: 4 tiles.
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 1024 positions"


def test_evaluation_is_not_cut():
    model = net()
    applied = apply_tiling(model, Tiling(modules="MLP", dim=1, size=2))
    with torch.no_grad():
        model(batch())
    assert applied.summary == "no module has run yet"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": -1}, "Tiling.dim` must be the number of a dimension, got -1"),
        ({"dim": True}, "Tiling.dim` must be"),
        ({"size": 0}, 'Tiling.size` must be a positive integer or "auto", got 0'),
        ({"size": "small"}, "Tiling.size` must be"),
        ({"modules": 3}, "Tiling.modules` must be patterns"),
        ({"modules": ["MLP", 3]}, "Tiling.modules` must be patterns"),
        (
            {"modules": ["MLP", "no such thing"]},
            "Tiling.modules` must be a pattern without blanks, got 'no such thing'",
        ),
    ],
)
def test_wrong_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        Tiling(**settings)


def test_a_selection_without_a_match_says_what_there_is():
    with pytest.raises(ValueError, match=r"must match at least one module, got 'Conv\*'.*Block, MLP"):
        apply_tiling(net(), Tiling(modules="Conv*"))


def test_tiles_are_made_once():
    model = net()
    apply_tiling(model, Tiling(modules="MLP"))
    with pytest.raises(ValueError, match="must be applied once"):
        apply_tiling(model, Tiling(modules="MLP"))


def test_scripted_modules_and_16_bits_are_no_obstacle():
    """A scripted class has no `forward` of its own to be looked at; 16 bits do not hold the values that are tried."""

    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.scripted = MLP(), torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.GELU()))

        def forward(self, x):
            return self.scripted(self.mlp(x))

    model, x = Scripted(), torch.randn(64, D)
    applied = apply_tiling(model, Tiling(dim=0, size=16))
    model(x).sum().backward()
    assert applied.summary == "1 module in tiles: 1 x MLP, at most 16 samples"
    half = nn.Sequential(MLP()).half()
    applied = apply_tiling(half, Tiling(dim=0, size=16))
    half(x.half()).sum().backward()
    assert "16 samples" in applied.summary or "no module in tiles" in applied.summary


def test_a_module_that_is_traced_is_traced_as_it_is():
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)), torch.randn(9, 4)
    applied = apply_tiling(model, Tiling(dim=0, size=3))
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))
    applied.undo()


def test_a_scripted_module_is_refused():
    model = nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(D, D))))
    with pytest.raises(ValueError, match="TorchScript"):
        apply_tiling(model, Tiling(modules="0"))


@pytest.mark.parametrize(
    ("module", "x", "why"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)),
            (6, 3, 8, 8),
            "changes its buffer `1.num_batches_tracked`",
        ),
        (nn.Sequential(nn.Softmax(0)), (6, 5), "slices have other outputs"),
    ],
)
def test_a_module_that_was_named_and_mixes_is_refused_with_the_reason(module, x, why):
    model = nn.Sequential(module, nn.Flatten())
    before = copy.deepcopy(model.state_dict())
    apply_tiling(model, Tiling(modules="0", dim=0, size=2))
    with pytest.raises(ValueError, match=f"treat samples independently, and of this one .*{why}.*`0`"):
        model(torch.randn(x, requires_grad=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_later_call_that_cannot_be_cut_runs_whole():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(D, D))

        def forward(self, x, centred=False):
            return self.linear(x - x.mean(0) if centred else x)

    model = nn.Sequential(Sometimes()).double()
    plain = copy.deepcopy(model)
    apply_tiling(model, Tiling(modules="Sometimes", dim=0, size=2))
    for centred in (False, True, False):
        torch.testing.assert_close(model[0](batch(), centred), plain[0](batch(), centred), rtol=1e-12, atol=1e-14)
