"""Tiles beside other techniques, autocast, hooks, compiled code, copies, and a second backward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    LowRank,
    Tiling,
    apply_activation_compression,
    apply_checkpointing,
    apply_low_rank,
    apply_tiling,
)

from .tiling_subjects import D, assert_alike, batch, net, step

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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:Tiles change the result")
@pytest.mark.parametrize("which", ["inside", "around", "beside"])
@pytest.mark.parametrize("is_named", [True, False])
def test_compiled_code_with_dropout_draws_by_itself(which, is_named):
    torch.compiler.reset()
    num_calls = []

    def backend(graph, inputs):
        def call(*args):
            num_calls.append(1)
            return graph.forward(*args)

        return call

    model = net(0.3)
    if which == "around":
        model.blocks = torch.compile(model.blocks, backend=backend)
    else:
        model.blocks[0 if which == "inside" else 1].mlp.compile(backend=backend)
    name = {"inside": "blocks.0", "around": "blocks._orig_mod.0", "beside": "blocks.0"}[which]
    applied = apply_tiling(model, Tiling(modules=name if is_named else None, dim=0, size=3))
    for _ in range(2):
        before = len(num_calls)
        step(model, batch())
        assert len(num_calls) > before, "compiled code has become eager"
    if which == "beside":
        assert (applied.loss_class, "in tiles: 1 x" in applied.summary) == ("exact", True)
    elif is_named:
        assert (applied.loss_class, "in tiles: 1 x Block" in applied.summary) == ("changed", True)
        assert "other random numbers" in applied.reasons[0]
    else:
        assert applied.loss_class == "exact"
        assert "blocks.0` (" not in applied.summary.partition("in tiles")[2]


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
