"""Lean optimizer state as a whole: training, resuming, and what cannot be changed."""

import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    estimate_optimizer_state,
    from_plain,
    is_8bit,
    to_plain,
)
from lightning_memsave.techniques.optimizer_state.state_dict_layout import move_counts
from lightning_memsave.torch_internals.optimizer_class import SCALES_ITSELF
from tests.contracts.spec import Spec

from .optimizer_state_subjects import (
    BOUNDS_8BIT,
    CONFIG,
    PLAIN,
    big_model,
    every_kin,
    flat,
    run_steps,
    state_bytes,
    through_disk,
    trained_8bit,
    twins,
)

SPEC = Spec(config=OptimizerState(min_size=256), loss_class="changed", bit_equal=False, shrinks="optimizer_state")


@every_kin
def test_trains_a_model(name):
    model = big_model()
    optimizer = PLAIN[name](model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    x = torch.randn(64, 96)
    target = torch.tanh(x @ torch.randn(96, 32) / 10)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]


@every_kin
def test_frozen_parameters(name):
    model = big_model()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    optimizer = PLAIN[name](model.parameters())
    estimate = estimate_optimizer_state(optimizer, CONFIG, model)
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(2))
    assert torch.equal(model[0].weight, frozen)
    assert state_bytes(optimizer) == estimate
    from_plain(optimizer, through_disk(to_plain(optimizer)))
    run_steps(model, optimizer, range(2))
    assert torch.equal(model[0].weight, frozen)


@every_kin
def test_tied_parameters(name):
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    model[1].weight = model[0].weight
    (first, plain), (second, ours) = twins(name, model)
    estimate = estimate_optimizer_state(plain, CONFIG, first)
    assert second[0].weight is second[1].weight
    start = flat(first)
    expected, found = run_steps(first, plain, range(5)) - start, run_steps(second, ours, range(5)) - start
    assert len(ours.state) == 3
    assert state_bytes(ours) == estimate
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]


@every_kin
def test_apply_undo_apply(name):
    model, optimizer, applied = trained_8bit(name)
    applied.undo()
    again = apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(4, 6))
    assert is_8bit(optimizer)
    again.undo()
    run_steps(model, optimizer, range(6, 8))
    assert not is_8bit(optimizer)


def test_step_hooks_run_once():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    applied = apply_optimizer_state(optimizer, CONFIG, model)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    run_steps(model, optimizer, range(1))
    assert calls == ["pre", "post"]
    applied.undo()
    run_steps(model, optimizer, range(1))
    assert calls == ["pre", "post", "pre", "post"]


@pytest.mark.parametrize(
    "config", [CONFIG, OptimizerState(projection="galore", rank=8), OptimizerState(first_moment="4bit")]
)
def test_a_gradient_scaler_unscales_what_the_fused_step_would_not_see(config):
    """torch tells it by an attribute not to; codes of our own go through the fused step, which divides."""
    model = big_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert vars(optimizer)[SCALES_ITSELF]
    applied = apply_optimizer_state(optimizer, config, model)
    assert vars(optimizer).get(SCALES_ITSELF, False) is (config.format == "4bit")
    applied.undo()
    assert vars(optimizer)[SCALES_ITSELF]


def test_counts_are_where_fused_steps_read_them():
    p, q = (nn.Parameter(torch.empty(2, device="meta")) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [p]}, {"params": [q]}])
    optimizer.param_groups[0]["fused"] = True
    optimizer.state.update({each: {"step": torch.tensor(3.0)} for each in (p, q)})
    move_counts(optimizer)
    assert [optimizer.state[each]["step"].device.type for each in (p, q)] == ["meta", "cpu"]


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(100, 64, sparse=True))
    with pytest.raises(ValueError, match=r"optimizer_state.*sparse gradients.*0\.sparse=True"):
        apply_optimizer_state(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), CONFIG, model)


def test_only_the_optimizers_own_parameters_are_checked_for_sparse_gradients():
    model = nn.ModuleDict({"sparse": nn.Embedding(100, 64, sparse=True), "linear": nn.Linear(64, 64)})
    applied = apply_optimizer_state(torch.optim.AdamW(model["linear"].parameters()), CONFIG, model)
    assert "1 of 2" in applied.summary
