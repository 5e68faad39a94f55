"""Tiles against the plain module: outputs, gradients, random numbers, hooks, and what is kept."""

from __future__ import annotations

import copy
import pickle

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    LowRank,
    MemSave,
    NoEffectWarning,
    OptimizerState,
    Tiling,
    apply_activation_compression,
    apply_checkpointing,
    apply_low_rank,
    apply_tiling,
    predict,
)
from tests.contracts.spec import Spec

# Adam steps by as much for a gradient that is rounding alone: another order of sums may give it another sign.
SPEC = Spec(config=Tiling(dim=0, size=16), loss_class="exact", tips_by=0.06, shrinks="activations")
D = 16


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout, batch_first=True)
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), MLP(dropout)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.head = nn.Linear(D, D)

    def forward(self, x):
        return self.head(self.blocks(x))


def net(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net(dropout).to(dtype)


def step(model, x, *, autocast=False):
    """The output, all gradients, and the next number of the generator."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    output.double().square().mean().backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **named, "next number": torch.rand(())}


def assert_alike(found, expected, rtol=1e-12, atol=1e-15):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def batch(dtype=torch.float64, num_samples=9):
    return torch.randn(num_samples, 20, D, generator=torch.Generator().manual_seed(2)).to(dtype)


# ---------------------------------------------------------------------------------------------------- exactness
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("config", "summary"),
    [
        (Tiling(dim=0, size=2), "1 module in tiles: 1 x Sequential, at most 2 samples"),
        (Tiling(dim=0, size=1), "1 module in tiles: 1 x Sequential, at most 1 samples"),
        (Tiling(dim=1, size=6), "2 modules in tiles: 2 x MLP, at most 6 positions"),
        (Tiling(modules="MLP", size=6), "2 modules in tiles: 2 x MLP, at most 6 positions"),
        (Tiling(modules=MLP, dim=0, size=6), "2 modules in tiles: 2 x MLP, at most 6 samples"),
        (
            Tiling(modules=("MLP", "blocks.1"), dim=0, size=6),
            "1 x MLP, at most 6 samples; 1 x Block, at most 6 samples",
        ),
        (Tiling(modules="*.0.mlp", size=1), "1 module in tiles: 1 x MLP, at most 1 positions"),
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


# ---------------------------------------------------------------------------------------------------- composition
AROUND = {
    "regions": lambda model: apply_checkpointing(model, Checkpointing(modules="Block")),
    "regions inside": lambda model: apply_checkpointing(model, Checkpointing(modules="MLP")),
    "exact activations": lambda model: apply_activation_compression(model, ActivationCompression()),
    "both": lambda model: (
        apply_checkpointing(model, Checkpointing(modules="Block")),
        apply_activation_compression(model, ActivationCompression()),
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("config", [Tiling(dim=0, size=2), Tiling(modules="MLP", dim=1, size=6)])
def test_regions_and_compressed_activations_go_with_tiles(around, config):
    model, x = net(0.2, torch.float32), batch(torch.float32)
    expected = step(copy.deepcopy(model), x)
    apply_tiling(model, config)
    AROUND[around](model)
    for _ in range(3):
        model.zero_grad()
        assert_alike(step(model, x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [Tiling(dim=0, size=2), Tiling(modules="MLP", dim=1, size=6)])
def test_layers_of_low_rank_go_in_tiles(config):
    model = net(0.2)
    apply_low_rank(model, LowRank(rank=4, modules="Linear"))
    expected = step(copy.deepcopy(model), batch())
    apply_tiling(model, config)
    assert sum(name.endswith("factors") for name in expected) == 5
    assert_alike(step(model, batch()), expected)


@pytest.mark.parametrize("config", [Tiling(dim=0, size=2), Tiling(modules="MLP", dim=1, size=6)])
def test_int8_activations_in_tiles_are_as_near_as_without(config):
    model, x = net(0.0, torch.float32), batch(torch.float32)
    exact = step(copy.deepcopy(model), x)
    coded, tiled = copy.deepcopy(model), model
    apply_tiling(tiled, config)
    for each in (coded, tiled):
        apply_activation_compression(each, ActivationCompression(codecs=("exact", "int8")))
    found = [step(each, x) for each in (coded, tiled)]
    for name in ("input", *dict(model.named_parameters())):
        errors = [float((each[name] - exact[name]).norm()) for each in found]
        assert errors[1] <= 2 * errors[0] + 1e-6 * float(exact[name].norm()), name


def test_autocast_is_the_same_inside():
    model, x = net(0.2, torch.float32), batch(torch.float32)
    expected = step(copy.deepcopy(model), x, autocast=True)
    apply_tiling(model, Tiling(dim=0, size=2))
    assert_alike(step(model, x, autocast=True), expected, rtol=2e-2, atol=2e-4)


def test_frozen_weights_get_no_gradient_and_a_frozen_module_is_not_cut():
    model = net()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].mlp.up.requires_grad_(False)
    expected = step(copy.deepcopy(model), batch())
    apply_tiling(model, Tiling(dim=0, size=2))
    assert_alike(step(model, batch()), expected)
    model.requires_grad_(False)
    assert model(batch()).grad_fn is None


def test_a_second_backward_and_a_gradient_of_the_gradient_are_the_plain_ones():
    model = net(0.2)
    results = []
    for each in (copy.deepcopy(model), model):
        if each is model:
            apply_tiling(each, Tiling(dim=0, size=2))
        x = batch().requires_grad_()
        torch.manual_seed(1)
        loss = each(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        torch.manual_seed(1)
        (gradient,) = torch.autograd.grad(each(x).square().mean(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append({"input": x.grad, **{name: p.grad for name, p in each.named_parameters()}})
    assert_alike(results[1], results[0], rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_hooks_after_accumulation_run_once_for_each_weight(dtype):
    model = net(dtype=dtype)
    apply_tiling(model, Tiling(dim=0, size=2))
    model(batch(dtype)).sum().backward()  # the test of the first call is over
    counts = dict.fromkeys(dict(model.named_parameters()), 0)

    def count(name):
        return lambda p: counts.__setitem__(name, counts[name] + 1)

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(count(name))
    model(batch(dtype)).sum().backward()
    assert set(counts.values()) == {1}


def test_hooks_after_accumulation_do_not_run_in_the_test():
    model = net()
    seen = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen.append)
    apply_tiling(model, Tiling(dim=0, size=2))
    model(batch())
    assert seen == []
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
@pytest.mark.parametrize("compiled", ["blocks", "mlps", "model"])
@pytest.mark.parametrize("config", [Tiling(dim=0, size=3), Tiling(modules="MLP", dim=1, size=6)])
def test_compiled_modules_go_with_tiles(compiled, config):
    torch.compiler.reset()
    model = net()
    expected = step(copy.deepcopy(model), batch())
    apply_tiling(model, config)
    inside = {"blocks": list(model.blocks), "mlps": [block.mlp for block in model.blocks], "model": [model]}
    for module in inside[compiled]:
        module.compile(backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        assert_alike(step(model, batch()), expected)


def test_tiles_and_regions_of_one_module_can_be_undone_in_any_order():
    for first_undone in (0, 1):
        model = net()
        expected = step(copy.deepcopy(model), batch())
        both = [
            apply_tiling(model, Tiling(modules="MLP", dim=1, size=6)),
            apply_checkpointing(model, Checkpointing(modules="MLP")),
        ]
        with pytest.raises(ValueError, match="must be applied once"):
            apply_tiling(model, Tiling(modules="MLP"))
        assert_alike(step(model, batch()), expected)
        both[first_undone].undo()
        model.zero_grad()
        assert_alike(step(model, batch()), expected)
        both[1 - first_undone].undo()
        assert all("forward" not in vars(module) for module in model.modules())


def test_copies_and_pickles_are_plain_or_compute_with_their_own_weights():
    model = net()
    apply_tiling(model, Tiling(dim=0, size=2))
    step(model, batch())
    twin = copy.deepcopy(model)
    assert_alike(step(twin, batch()), step(net(), batch()))
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert not twin(batch().requires_grad_()).any()
    assert list(model.state_dict()) == list(net().state_dict())
    assert_alike(step(pickle.loads(pickle.dumps(net())), batch()), step(net(), batch()))


def test_shared_arguments_are_given_to_every_tile_and_keywords_are_cut():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(D, D))

        def forward(self, x, *, scale, bias, flag=None):
            assert flag is None
            return {"y": self.linear(x) * scale + bias, "none": None}

    torch.manual_seed(0)
    base = nn.ModuleDict({"inner": Scaled()}).double()
    results = []
    for is_tiled in (False, True):
        model = copy.deepcopy(base)
        if is_tiled:
            applied = apply_tiling(model, Tiling(modules="Scaled", dim=0, size=2))
        x, scale, bias = batch().requires_grad_(), torch.rand(20, 1).double().requires_grad_(), batch().requires_grad_()
        with torch.no_grad():
            scale.fill_(0.5)
        output = model["inner"](x, scale=scale, bias=bias)
        assert output["none"] is None
        output["y"].square().mean().backward()
        results.append({"x": x.grad, "scale": scale.grad, "bias": bias.grad, "y": output["y"].detach()})
    assert_alike(results[1], results[0])
    assert applied.summary == "1 module in tiles: 1 x Scaled, at most 2 samples"


# ---------------------------------------------------------------------------------------------------- what is kept
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


# ---------------------------------------------------------------------------------------------------- refused
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


# ---------------------------------------------------------------------------------------------------- in a run
class Lit(L.LightningModule):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.net = Net(dropout)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(*callbacks, dropout=0.1, dtype="64-true", strategy="auto"):
    torch.manual_seed(0)
    module = Lit(dropout)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision=dtype,
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(batch(torch.float32, 24)), 8))
    return module


@pytest.mark.parametrize("tiling", ["samples", "positions", "MLP", True, Tiling(modules="MLP", dim=1, size=3)])
def test_a_run_in_tiles_is_the_plain_run(tiling):
    memsave = MemSave(tiling=tiling)
    found, expected = fit(memsave), fit()
    assert_alike(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-11, atol=1e-14)
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert "in tiles" in applied.summary
    assert memsave.report.loss_class == "exact"
    assert all("forward" not in vars(module) for module in found.modules())


def test_a_strategy_by_name_and_settings_in_logs():
    memsave = MemSave(tiling=Tiling(modules="MLP", dim=1, size=3))
    found, expected = fit(memsave, strategy="memsave"), fit()
    assert_alike(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-11, atol=1e-14)
    assert memsave.recipe.as_dict()["tiling"] == {"modules": "MLP", "dim": 1, "size": 3, "batchnorm": None}
    assert memsave.recipe.as_dict()["recipe"] == "lossless, tiling=Tiling(modules=MLP, dim=1, size=3)"


@pytest.mark.parametrize("gradients", ["release", "into-state"])
def test_gradients_that_end_in_backward_go_with_tiles(gradients):
    state = OptimizerState(first_moment="32bit", gradients=gradients)
    slots = {"optimizer_state": state, "microbatch": False, "summary": False}
    found, expected = fit(MemSave(tiling="samples", **slots)), fit(MemSave(**slots))
    assert_alike(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-10, atol=1e-13)


class Clip(L.LightningModule):
    def __init__(self):
        super().__init__()
        size = {"hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = CLIPTextConfig(vocab_size=60, max_position_embeddings=8, eos_token_id=59, attention_dropout=0.1, **size)
        vision = CLIPVisionConfig(image_size=16, patch_size=8, attention_dropout=0.1, **size)
        config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
        self.clip = CLIPModel(config)

    def training_step(self, batch, batch_idx):
        self.clip.train()
        return self.clip(input_ids=batch[1], pixel_values=batch[0], return_loss=True).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def test_clip_of_transformers_is_tiled_without_a_mark():
    generator = torch.Generator().manual_seed(3)
    images, ids = torch.randn(16, 3, 16, 16, generator=generator), torch.randint(0, 59, (16, 8), generator=generator)
    ids[:, -1] = 59
    results = []
    for memsave in (None, MemSave(tiling=Tiling(dim=0, size=2), summary=False)):
        torch.manual_seed(0)
        module = Clip().double()
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            precision="64-true",
            callbacks=[memsave] if memsave else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(images, ids), 8))
        results.append(dict(module.state_dict()))
    assert_alike(results[1], results[0], rtol=1e-6, atol=1e-7)  # transformers computes some of it in float32
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert applied.summary.startswith("2 modules in tiles")
    assert memsave.report.loss_class == "exact"


def test_a_default_that_finds_nothing_says_why():
    class Mixing(Lit):
        def training_step(self, batch, batch_idx):
            return self.net.blocks[0].mlp(batch[0] - batch[0].mean(0)).square().mean()

        def __init__(self):
            super().__init__()
            self.net.blocks[0].mlp = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(20))

    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[MemSave(tiling="samples")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.warns(NoEffectWarning, match="no module treats samples independently, `net.blocks.0.mlp`: it changes"):
        trainer.fit(Mixing(), DataLoader(TensorDataset(batch(torch.float32, 8)), 8))


@pytest.mark.parametrize("size", ["auto", pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_prediction_for_shapes_alone_is_what_is_measured(size, dropout):
    config = Tiling(modules="MLP", dim=1, size=size)
    memsave = MemSave(tiling=config, microbatch=False)
    fit(memsave, dropout=dropout, dtype="32-true")
    torch.manual_seed(0)
    predicted = predict(Lit(dropout), (batch(torch.float32, 8),), memsave)
    assert predicted.source == "fake"
    assert predicted.peak_bytes == memsave.report.peak_bytes


def test_a_prediction_of_what_a_test_must_find_runs_real_steps():
    memsave = MemSave(tiling="samples", microbatch=False)
    fit(memsave, dtype="32-true")
    torch.manual_seed(0)
    predicted = predict(Lit(), (batch(torch.float32, 8),), memsave)
    assert predicted.source == "measured"
    assert predicted.peak_bytes == memsave.report.peak_bytes


def test_inputs_of_regions_that_leave_the_device_are_no_values_that_a_module_reads():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(3)]
    model, x = nn.Sequential(nn.Sequential(*blocks)).double(), torch.randn(8, 8, 64, 64, dtype=torch.float64)
    plain = copy.deepcopy(model)
    applied = apply_tiling(model, Tiling(modules="0", dim=0, size=2))
    apply_checkpointing(model, Checkpointing(modules="0.*", offload=True))
    for each in (plain, model):
        each(x).square().mean().backward()
    gradients = [dict(each.named_parameters()) for each in (model, plain)]
    assert_alike(*({name: p.grad for name, p in each.items()} for each in gradients))
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 2 samples"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
def test_what_is_compiled_inside_of_a_tile_stays_compiled():
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = net()
    for block in model.blocks:
        block.mlp.compile(backend=backend)
    apply_tiling(model, Tiling(modules="Sequential", dim=0, size=3))
    for _ in range(3):
        step(model, batch())
    assert compiled, "not eager because a test has met it first"


@pytest.mark.parametrize("kind", ["regions inside", "regions around", "regions inside and around"])
def test_dropout_in_regions_and_tiles_has_the_masks_of_the_plain_step(kind):
    model = net(0.3)
    expected = step(copy.deepcopy(model), batch())
    applied = apply_tiling(model, Tiling(modules="Sequential", dim=0, size=2))
    if "inside" in kind:
        apply_checkpointing(model, Checkpointing(modules="MLP" if "around" in kind else "Block"))
    if "around" in kind:
        apply_checkpointing(model, Checkpointing(modules="Sequential"))
    assert_alike(step(model, batch()), expected)
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 2 samples"
    assert applied.loss_class == "exact"
