"""Checkpoints of every format in every other: torch's, bitsandbytes', our own codes, sparse weights, 24-bit weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, Sparsity, apply_low_precision, apply_sparsity
from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    decoded_state_dict,
    for_adafactor,
)
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.techniques.sparsity.checkpoints import layouts_of
from lightning_memsave.torch_internals.state_layout import from_dense_layout, to_dense_layout

from .optimizer_state_subjects import big_model, flat, run_steps, set_gradients, through_disk

ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
STATES = {
    "torch": None,
    "8bit": OptimizerState(backend="own", **ALL),
    "bitsandbytes": OptimizerState(backend="bitsandbytes", **ALL),
    "4bit": OptimizerState(first_moment="4bit", **ALL),
    "fp8": OptimizerState(first_moment="fp8", **ALL),
    "factored": OptimizerState(second_moment="factored", **ALL),
    "4bit-factored": OptimizerState(first_moment="4bit", second_moment="factored", **ALL),
    "5bit-factored": OptimizerState(first_moment="5bit", second_moment="factored", **ALL),
    "offload": OptimizerState(placement="host", **ALL),
    "bf16+8": OptimizerState(backend="own", **ALL),
    "sparse": OptimizerState(backend="own", **ALL),
}
# Relative L2 distance of 5 continued steps from those of torch's AdamW that loads the same checkpoint.
BOUNDS = dict.fromkeys(STATES, 0.1) | dict.fromkeys(("4bit", "factored", "4bit-factored", "5bit-factored"), 0.6)
BOUNDS |= {"fp8": 0.2, "torch": 0.0, "offload": 0.0}


def build(name, model, checkpoint="plain"):
    """A model's optimizer with such state; the model itself changes for the last two."""
    if name == "sparse":
        apply_sparsity(model, Sparsity(sparsity=0.5, min_size=0, initial="magnitude"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = STATES[name]
    if config is not None:
        apply_optimizer_state(optimizer, replace(config, checkpoint=checkpoint), model)
    if name == "bf16+8":
        apply_low_precision(model, optimizer, LowPrecision(format="bf16+8"))
    return optimizer


def saved_by(name, checkpoint="plain"):
    torch.manual_seed(0)
    model = big_model()
    optimizer = build(name, model, checkpoint)
    run_steps(model, optimizer, range(4))
    state = optimizer.state_dict()
    if name == "sparse":
        state = to_dense_layout(optimizer, state, layouts_of(model))
    return through_disk((model.state_dict(), state))


def continued(name, saved):
    """The parameters after 5 steps more, of a model that starts as the saved one."""
    model = big_model()
    if name == "sparse":
        model.load_state_dict(saved[0])  # pruned as it is
        optimizer = build(name, model)
        optimizer.load_state_dict(from_dense_layout(optimizer, saved[1], layouts_of(model)))
        for step in range(4, 9):
            set_gradients(model, step)
            optimizer.step()
        return torch.cat([v.double().flatten() for v in model.state_dict().values()])
    optimizer = build(name, model)
    model.load_state_dict(saved[0])
    state = saved[1] if STATES[name] else decoded_state_dict(saved[1])
    optimizer.load_state_dict(state)
    run_steps(model, optimizer, range(4, 9))
    return torch.cat([v.double().flatten() for v in model.state_dict().values()])


@pytest.mark.parametrize("written_by", STATES)
@pytest.mark.parametrize("read_by", STATES)
def test_any_checkpoint_continues_in_any_format(written_by, read_by):
    saved = saved_by(written_by)
    start = torch.cat([v.double().flatten() for v in saved[0].values()])
    found = continued(read_by, copy.deepcopy(saved))
    assert found.isfinite().all()
    if read_by == "sparse":  # other weights live: only that it goes on
        assert not torch.equal(found, start)
        return
    expected = continued("torch", copy.deepcopy(saved))
    error = (found - expected).norm() / (expected - start).norm()
    assert error <= BOUNDS[read_by]


@pytest.mark.parametrize("written_by", [name for name in STATES if name not in ("torch", "offload", "sparse")])
@pytest.mark.parametrize("read_by", [name for name in STATES if name != "sparse"])
def test_compact_checkpoints_continue_in_any_format(written_by, read_by):
    saved = saved_by(written_by, "compact")
    start = torch.cat([v.double().flatten() for v in saved[0].values()])
    assert isinstance(saved[1]["state"][0]["exp_avg"], dict)
    found, expected = continued(read_by, copy.deepcopy(saved)), continued("torch", copy.deepcopy(saved))
    assert (found - expected).norm() / (expected - start).norm() <= BOUNDS[read_by]


@pytest.mark.parametrize("written_by", [name for name in STATES if name not in ("torch", "offload", "sparse")])
def test_a_compact_checkpoint_stands_for_the_plain_one(written_by):
    plain, compact = saved_by(written_by), saved_by(written_by, "compact")
    decoded = decoded_state_dict(compact[1])
    for number, state in plain[1]["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(decoded["state"][number][name])), name


def test_second_moments_of_adam_and_adafactor_stand_for_the_same_mean_of_squares():
    """Adam's is short of it by 1 - beta2**t, which it divides by in its step; Adafactor's is the mean itself."""
    model = big_model()
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999))
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.full_like(p, 3.0)
        adam.step()
    adafactor = torch.optim.Adafactor(model.parameters())
    as_adafactor = for_adafactor(adafactor, adam.state_dict())["state"]
    assert torch.allclose(as_adafactor[0]["row_var"], torch.tensor(9.0))
    back = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(back, OptimizerState(placement="host", min_size=0), model)
    back.load_state_dict({**adam.state_dict(), "state": as_adafactor})
    second = back.state_dict()["state"][0]["exp_avg_sq"]
    assert torch.allclose(second, torch.tensor(9 * (1 - 0.999**4)))


@pytest.mark.parametrize("read_by", [name for name in STATES if name not in ("torch", "sparse")])
def test_adafactors_checkpoint_continues_as_adam(read_by):
    model = big_model()
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    run_steps(model, optimizer, range(4))
    found = continued(read_by, through_disk((model.state_dict(), optimizer.state_dict())))
    assert found.isfinite().all()
    assert 0 < (found - flat(model)).abs().max() < 5 * 2e-2  # no step is longer than about the learning rate


@pytest.mark.parametrize("written_by", [name for name in STATES if name != "sparse"])
@pytest.mark.parametrize("checkpoint", ["plain", "compact"])
def test_adams_checkpoint_continues_as_adafactor(written_by, checkpoint):
    if checkpoint == "compact" and written_by in ("torch", "offload"):
        pytest.skip("nothing is compact")
    weights, saved = saved_by(written_by, checkpoint)
    model = big_model()
    model.load_state_dict(weights)
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    optimizer.load_state_dict(for_adafactor(optimizer, saved))
    start = flat(model)
    run_steps(model, optimizer, range(4, 9))
    assert flat(model).isfinite().all()
    assert not torch.equal(flat(model), start)


def test_scales_of_another_pattern_are_not_used():
    torch.manual_seed(0)
    sparse_model = big_model()
    apply_sparsity(sparse_model, Sparsity(sparsity=0.5, min_size=0))
    optimizer = torch.optim.AdamW(sparse_model.parameters(), 1e-2)
    apply_optimizer_state(optimizer, STATES["bitsandbytes"], sparse_model)
    run_steps(sparse_model, optimizer, range(3))
    saved = through_disk(to_dense_layout(optimizer, optimizer.state_dict(), layouts_of(sparse_model)))
    other_model = big_model()
    apply_sparsity(other_model, Sparsity(sparsity=0.75, min_size=0, seed=5))
    other = torch.optim.AdamW(other_model.parameters(), 1e-2)
    apply_optimizer_state(other, STATES["bitsandbytes"], other_model)
    other.load_state_dict(from_dense_layout(other, saved, layouts_of(other_model)))
    before = flat(other_model)
    run_steps(other_model, other, range(3, 6))
    assert flat(other_model).isfinite().all()
    assert (flat(other_model) - before).abs().max() < 0.1
    for p, state in other.state.items():
        assert state["absmax1"].numel() == -(-p.numel() // 256)


def test_moments_of_a_subspace_are_refused_elsewhere():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(projection="galore", rank=8, min_size=0), model)
    run_steps(model, optimizer, range(2))
    saved = optimizer.state_dict()
    second = nn.Linear(64, 64)
    other = torch.optim.AdamW(second.parameters())
    apply_optimizer_state(other, STATES["8bit"], second)
    with pytest.raises(ValueError, match=r"those of a subspace.*lowrank"):
        other.load_state_dict(saved)


def test_a_whole_moment_is_projected_when_it_is_loaded():
    model = nn.Linear(64, 64)
    plain = torch.optim.AdamW(model.parameters(), 1e-3)
    run_steps(model, plain, range(4))
    second = copy.deepcopy(model)
    other = torch.optim.AdamW(second.parameters(), 1e-3)
    apply_optimizer_state(other, OptimizerState(projection="galore", rank=8, min_size=0), second)
    other.load_state_dict(through_disk(plain.state_dict()))
    assert other.state[second.weight]["exp_avg"].shape == (8, 64)
    assert (other.state[second.weight]["exp_avg_sq"] >= 0).all()
    run_steps(second, other, range(4, 9))
    assert flat(second).isfinite().all()


@pytest.mark.parametrize("state_format", ["lowrank", "apollo"])
def test_moments_of_subspaces_start_from_zero_in_a_plain_optimizer(state_format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    apply_optimizer_state(optimizer, OptimizerState(**BY_NAME[state_format], rank=4, min_size=1), model)
    run_steps(model, optimizer, range(2))
    with pytest.warns(UserWarning, match="The moments of parameters 0 are those of a subspace.*start from zero"):
        saved = decoded_state_dict(through_disk(optimizer.state_dict()))
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(saved)
    assert plain.state[model[0].weight] == {}
    assert plain.state[model[1].weight]["step"] == 2
    run_steps(model, plain, [2])
    assert plain.state[model[0].weight]["step"] == 1


@pytest.mark.parametrize("state", ["8bit", "bitsandbytes", "4bit"])
def test_names_repetitions_and_entries_of_nobody_load_as_in_torch(state):
    """`torch.distributed.checkpoint` names parameters; torch warns of one that stands twice, and reads no others."""
    torch.manual_seed(0)
    model = nn.Linear(40, 24)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.AdamW([model.weight, model.bias, model.bias])
    apply_optimizer_state(optimizer, STATES[state], model)
    run_steps(model, optimizer, range(2))
    saved = through_disk(optimizer.state_dict())
    names = {number: f"p{number}" for number in saved["state"]}
    (group,) = saved["param_groups"]
    named = {**saved, "param_groups": [{**group, "params": [names[n] for n in group["params"]]}]}
    named["state"] = {**{names[n]: values for n, values in saved["state"].items()}, "extra": 3}
    named.pop("memsave_8bit", None)
    named.pop("memsave_state", None)
    for given in (saved, named):
        optimizer.load_state_dict(given)
        found = decoded_state_dict(optimizer.state_dict())["state"]
        for number, values in saved["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(found[number][name], values[name], rtol=0.1, atol=1e-3)


def test_dictionaries_of_other_optimizers_are_left_alone():
    entry = {"low": torch.zeros(2), "layout": "theirs"}
    assert decoded_state_dict({"state": {0: {"exp_avg": entry}}, "param_groups": []})["state"] == {
        0: {"exp_avg": entry}
    }
