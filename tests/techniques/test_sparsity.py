"""Sparse layers against masked dense ones: outputs and gradients are the same bits, and bytes are those stated."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_memsave import Ledger, Sparsity, apply_sparsity, export_dense
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.techniques.sparsity import estimate_sparsity, sparse_layers
from lightning_memsave.vault import Rank, Vault
from tests.contracts.spec import Spec

SPEC = Spec(config=Sparsity(sparsity=0.9), loss_class="changed", shrinks="weights")


def tiny(sparsity: float | str = 0.5, **options) -> Sparsity:
    return Sparsity(sparsity=sparsity, min_size=1, **options)


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
    with Vault(recompute=True, min_numel=1).scope():
        loss = model(x).sum()
    loss.backward()


@pytest.mark.parametrize("scope", ["alone", "vault"])
def test_a_vault_changes_nothing(scope):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    plain, ids = copy.deepcopy(model), torch.randint(0, 50, (4, 6))
    apply_sparsity(model, tiny())
    plain.load_state_dict(model.state_dict())
    vault = Vault(recompute=True, min_numel=1)
    if scope == "vault":
        with vault.scope():
            loss = model(ids).square().sum()
        # Two activations; the ReLU's mask is read off its result.
        assert vault.tally.plain_bytes >= vault.tally.held_bytes
    else:
        loss = model(ids).square().sum()
    loss.backward()
    plain(ids).square().sum().backward()
    for name, layer in sparse_layers(model).items():
        assert torch.equal(layer.values.grad, layer.layout.compact(plain.get_submodule(name).weight.grad))


def test_weights_that_a_model_uses_by_itself_are_recipes_in_a_vault():
    """A model that calls functions on `layer.weight` outside of the layer's own forward."""
    layer = nn.Linear(64, 64)
    apply_sparsity(nn.Sequential(layer), tiny(0.9))
    x, vault = torch.randn(2, 64, requires_grad=True), Vault(min_numel=1)
    with vault.scope():
        loss = F.linear(x, layer.weight).sum()
    assert vault.tally.held_bytes == 0  # `x` is the caller's, the weight is made again
    loss.backward()
    expected = torch.autograd.grad(F.linear(x, layer.layout.dense(layer.values.detach())).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_a_lossy_vault_keeps_weights_exact():
    layer = nn.Linear(64, 64, bias=False)
    apply_sparsity(nn.Sequential(layer), tiny(0.5))
    x = torch.randn(32, 64, requires_grad=True)
    expected = torch.autograd.grad(layer(x.tanh() * 1.0).sum(), [x, layer.values])
    with Vault(lossy=Rank.INT4, min_numel=1).scope():
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


# ------------------------------------------------------------------------------- portability
def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))


X = torch.linspace(-1, 1, 2 * 3 * 36).view(2, 3, 6, 6)


def test_checkpoints_are_dense_both_ways():
    model, dense = small(), small()
    keys = list(model.state_dict())
    apply_sparsity(model, tiny())
    assert list(model.state_dict()) == keys
    assert [n.replace("values", "weight") for n, _ in model.named_parameters()] == [
        n for n, _ in dense.named_parameters()
    ]
    dense.load_state_dict(model.state_dict())
    assert torch.equal(dense.eval()(X), model.eval()(X))
    other = small()
    apply_sparsity(other, tiny(seed=5))
    other.load_state_dict(dense.state_dict())  # the pattern is that of what is not zero
    assert torch.equal(other.eval()(X), model(X))
    full = small()
    model.load_state_dict(full.state_dict())  # pruned to the density
    for name, layer in sparse_layers(model).items():
        weight = full.get_submodule(name).weight.detach().abs().view(-1)
        assert torch.equal(layer.values.abs().sort().values, weight.sort().values[-layer.values.numel() :])


def test_loading_keeps_live_zeros():
    layer = nn.Linear(8, 8)
    apply_sparsity(nn.Sequential(layer), tiny())
    with torch.no_grad():
        layer.values[::2] = 0
    positions = layer.layout.positions()
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer.layout.positions(), positions)


def test_a_checkpoint_that_does_not_fit_is_told_in_torchs_words():
    model = small()
    apply_sparsity(model, tiny())
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*4\.weight"):
        model.load_state_dict({k: v for k, v in state.items() if k != "4.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*4\.weight_mask"):
        model.load_state_dict({**state, "4.weight_mask": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for 4\.weight"):
        model.load_state_dict({**state, "4.weight": torch.zeros(3, 3)})
    assert model.load_state_dict({}, strict=False).missing_keys == [k for k in state if not k.endswith("tracked")]


def test_copies_and_pickles_compute_with_their_own_weights():
    model = small().eval()
    apply_sparsity(model, tiny())
    expected = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), expected)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not twin(X).any()
        assert torch.equal(model(X), expected)


def test_undo_and_export_give_a_plain_module_back():
    model, plain = small().eval(), small()
    applied = apply_sparsity(model, tiny())
    expected = model(X)
    exported = export_dense(copy.deepcopy(model))
    applied.undo()
    applied.undo()
    for module in (model, exported):
        assert [type(m) for m in module.modules()] == [type(m) for m in plain.modules()]
        assert [(n, p.shape) for n, p in module.named_parameters()] == [
            (n, p.shape) for n, p in plain.named_parameters()
        ]
        assert [n for n, _ in module.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert all(vars(m).keys() == vars(p).keys() for m, p in zip(module.modules(), plain.modules(), strict=True))
        assert torch.equal(module(X), expected)
    with pytest.raises(ValueError, match="must have sparse layers"):
        export_dense(model)


def test_device_and_dtype_moves():
    model = small().eval()
    apply_sparsity(model, tiny())
    model.to(torch.float64)
    assert model(X.double()).dtype == torch.float64
    assert model[4].values_index.dtype == torch.uint8
    model.bfloat16()
    assert model[4].values.element_size() == 2
    assert model(X.bfloat16()).dtype == torch.bfloat16


# ------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sparsity": 1.0}, "fraction from 0 to below 1"),
        ({"sparsity": -0.1}, "fraction from 0 to below 1"),
        ({"sparsity": True}, "fraction from 0 to below 1"),
        ({"sparsity": "4:2"}, "fraction from 0 to below 1"),
        ({"sparsity": "many"}, "fraction from 0 to below 1"),
        ({"method": "lottery"}, "must be one of 'static'"),
        ({"initial": "zeros"}, "must be one of 'random'"),
        ({"distribution": "even"}, "must be one of 'uniform'"),
        ({"sparsity": "2:4", "method": "set"}, "in groups"),
        ({"sparsity": "2:4", "distribution": "erk"}, "in groups"),
        ({"initial": "snip", "method": "rigl"}, '"snip" with method="static"'),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        Sparsity(**settings)


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
