"""Which weights live: patterns, distributions, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_memsave import Ledger, Sparsity, apply_sparsity
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.techniques.sparsity import sparse_layers
from tests.techniques.sparsity_subjects import small, tiny


# ------------------------------------------------------------------------------- patterns
def densities(config: Sparsity) -> dict[str, float]:
    torch.manual_seed(0)
    model = WideResNet()
    apply_sparsity(model, config)
    return {n: layer.values.numel() / layer.dense_shape.numel() for n, layer in sparse_layers(model).items()}


def total(config: Sparsity) -> int:
    torch.manual_seed(0)
    model = WideResNet()
    apply_sparsity(model, config)
    return sum(layer.values.numel() for layer in sparse_layers(model).values())


def test_uniform_is_uniform_and_the_others_keep_the_sum():
    assert all(abs(d - 0.1) < 1e-3 for d in densities(Sparsity(sparsity=0.9)).values())
    for distribution in ("uniform", "erk", "global"):
        for initial in ("random", "magnitude"):
            live = total(Sparsity(sparsity=0.9, distribution=distribution, initial=initial))
            assert abs(live - 146_176) <= 26


def test_erk_gives_small_layers_more():
    found = densities(Sparsity(sparsity=0.9, distribution="erk"))
    assert found["groups.0.0.conv1"] > found["groups.1.1.conv1"] > found["groups.2.1.conv1"]
    # 16 -> 32 and 64 -> 64 channels, 3x3: (sum of sizes) / (product of sizes).
    ratio = (16 + 32 + 6) / (16 * 32 * 9) / ((64 + 64 + 6) / (64 * 64 * 9))
    assert found["groups.0.0.conv1"] / found["groups.1.1.conv1"] == pytest.approx(ratio, rel=1e-2)
    crowded = densities(Sparsity(sparsity=0.3, distribution="erk"))
    assert max(crowded.values()) == 1.0


def test_magnitude_keeps_the_largest():
    layer = nn.Linear(40, 30)
    weight = layer.weight.detach().clone()
    apply_sparsity(nn.Sequential(layer), tiny(0.9, initial="magnitude"))
    assert torch.equal(layer.values.abs().sort().values, weight.abs().view(-1).sort().values[-120:])


@pytest.mark.parametrize("kind", [lambda: nn.Linear(64, 32), lambda: nn.Conv2d(8, 6, 3)])
@pytest.mark.parametrize("initial", ["random", "magnitude"])
def test_two_of_four(kind, initial):
    layer = kind()
    weight = layer.weight.detach().clone()
    apply_sparsity(nn.Sequential(layer), tiny("2:4", initial=initial))
    assert layer.values_index.nbytes * 8 == weight.numel()
    groups = (layer.layout.dense(layer.values.detach()) != 0).view(-1, 4)
    assert torch.equal(groups.sum(1), torch.full((len(groups),), 2))
    if initial == "magnitude":
        expected = weight.view(-1, 4).abs()
        assert bool((expected[groups].view(-1, 2).min(1).values >= expected[~groups].view(-1, 2).max(1).values).all())


def test_weights_that_are_loaded_live_in_groups_too():
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(16, 8)), nn.Sequential(nn.Linear(16, 8))
    apply_sparsity(model, tiny("2:4"))
    model.load_state_dict(other.state_dict())
    groups, whole = model[0].weight.detach().view(-1, 4), other[0].weight.detach().view(-1, 4)
    assert torch.equal(groups.count_nonzero(dim=1), torch.full((32,), 2))
    assert torch.equal(groups.abs().sort(dim=1).values, whole.abs().sort(dim=1).values * torch.tensor([0, 0, 1, 1]))


def test_the_same_seed_gives_the_same_pattern_and_no_generator_is_touched():
    patterns = []
    for seed in (0, 0, 1):
        layer = nn.Linear(40, 30)
        before = torch.get_rng_state()
        apply_sparsity(nn.Sequential(layer), tiny(seed=seed))
        assert torch.equal(before, torch.get_rng_state())
        patterns.append(layer.layout.positions())
    assert torch.equal(patterns[0], patterns[1])
    assert not torch.equal(patterns[0], patterns[2])


def test_a_sparse_model_keeps_its_pattern():
    layer = nn.Linear(40, 30)
    model = nn.Sequential(layer)
    apply_sparsity(model, tiny(0.9)).undo()
    weight = layer.weight.detach().clone()
    assert int(weight.count_nonzero()) == 120
    for initial in ("random", "magnitude"):
        applied = apply_sparsity(model, tiny(0.8, initial=initial, seed=3))
        assert layer.values.numel() == 240
        applied.undo()
        assert torch.equal(layer.weight, weight)


def test_a_sparse_model_keeps_its_pattern_under_one_threshold_for_all():
    model = small()
    apply_sparsity(model, tiny(0.9, distribution="erk")).undo()
    before = {n: m.weight.detach().clone() for n, m in model.named_modules() if n in ("0", "4")}
    for initial in ("random", "magnitude"):
        applied = apply_sparsity(model, tiny(0.8, initial=initial, distribution="global"))
        assert sum(layer.values.numel() for layer in sparse_layers(model).values()) == round(0.2 * (216 + 1280))
        applied.undo()
        assert all(torch.equal(model.get_submodule(name).weight, weight) for name, weight in before.items())


# ------------------------------------------------------------------------------- refusals


def test_selections_that_match_nothing():
    for modules in ("*.missing", nn.Conv3d, lambda name, module: False):
        with pytest.raises(ValueError, match=r"`Sparsity.modules` must match at least one layer"):
            apply_sparsity(small(), tiny(modules=modules))
    with pytest.raises(ValueError, match=r"0 \(216 weights\)"):
        apply_sparsity(small(), Sparsity())
    with pytest.raises(ValueError, match="no Linear, Conv or Embedding"):
        apply_sparsity(nn.ReLU(), Sparsity())


def test_selections_and_what_stays_dense():
    for modules in ("4", "Linear", nn.Linear, lambda name, module: name == "4"):
        model = small()
        apply_sparsity(model, tiny(modules=modules))
        assert list(sparse_layers(model)) == ["4"]
    model = small()
    model[0].weight.requires_grad_(False)
    assert "dense: 0 (frozen)" in apply_sparsity(model, tiny()).summary
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 6), nn.Linear(6, 8))
    summary = apply_sparsity(model, tiny("2:4")).summary
    assert "0 (its weight is computed)" in summary
    assert "2 (6 weights per output do not divide into groups of 4)" in summary


def test_tied_weights_are_left_dense_and_refused_where_they_are_asked_for():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight, self.other = self.embed.weight, nn.Linear(8, 8)

    with pytest.raises(ValueError, match=r"tied weights, got 'embed.weight and head.weight'.*name != 'embed'"):
        apply_sparsity(Tied(), tiny(modules="*"))
    model = Tied()
    assert "dense: embed (tied weights), head (tied weights)" in apply_sparsity(model, tiny()).summary
    assert list(sparse_layers(model)) == ["other"]
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_that_edit_or_skip_the_dense_weight_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        apply_sparsity(nn.Sequential(nn.Embedding(20, 8, **options)), tiny())


def test_applying_twice_is_refused():
    model = small()
    apply_sparsity(model, tiny())
    with pytest.raises(ValueError, match="must be applied once"):
        apply_sparsity(model, tiny())


@pytest.mark.parametrize("padding_idx", [None, 0, 7])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_of_an_embedding_only_the_rows_that_are_read_become_dense(padding_idx, by_frequency):
    dense = nn.Embedding(4000, 24, padding_idx=padding_idx, scale_grad_by_freq=by_frequency)
    sparse = copy.deepcopy(dense)
    apply_sparsity(sparse, Sparsity(sparsity=0.9))
    dense.load_state_dict(sparse.state_dict())
    ids = torch.randint(0, 4000, (3, 5), dtype=torch.int32)
    ids[0, :3] = torch.tensor([7, 7, 3999])
    with Ledger().watching(sparse, batch=ids) as ledger:
        out = sparse(ids)
        out.sin().sum().backward()
    whole = dense(ids)
    whole.sin().sum().backward()
    assert torch.equal(out, whole)
    assert torch.equal(sparse.values.grad, sparse.layout.compact(dense.weight.grad))
    positions_bytes = 8 * sparse.values.numel()  # unpacked for a moment
    assert ledger.measurement.peak_bytes - ledger.measurement.held_bytes < positions_bytes + dense.weight.nbytes / 5


def test_an_embedding_with_a_forward_of_its_own_sees_its_whole_weight():
    class Scaled(nn.Embedding):
        def forward(self, input):
            return super().forward(input) * self.weight.std()

    dense = Scaled(100, 32)
    sparse = copy.deepcopy(dense)
    apply_sparsity(sparse, Sparsity(sparsity=0.5))
    dense.load_state_dict(sparse.state_dict())
    ids = torch.arange(9)
    assert torch.equal(sparse(ids), dense(ids))


def test_an_average_of_the_weights_has_their_pattern():
    """`update_parameters` goes by the order of parameters; positions by name would average other weights."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()
            self.average = AveragedModel(self.net)

    torch.manual_seed(0)
    model = Averaged()
    apply_sparsity(model, Sparsity(sparsity=0.75, min_size=0))
    model.average.update_parameters(model.net)
    with torch.no_grad():
        for p in model.net.parameters():
            p.add_(torch.randn_like(p))
    model.average.update_parameters(model.net)
    patterns = {name: layer.values_index for name, layer in sparse_layers(model).items()}
    assert len(patterns) >= 2
    for name in patterns:
        if name.startswith("net."):
            assert torch.equal(patterns[name], patterns[name.replace("net.", "average.module.")])
    ours, expected = (dict(m.named_parameters()) for m in (model.average.module, model.net))
    assert ours.keys() == expected.keys()


def test_layers_that_start_alike_have_patterns_of_their_own():
    """As those of `nn.TransformerEncoder`, which are copies of one."""
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, copy.deepcopy(layer))
    apply_sparsity(model, Sparsity(sparsity=0.75))
    assert not torch.equal(model[0].values_index, model[1].values_index)
