"""Optimizers that become those of bitsandbytes: the same steps, the same object, and the way back."""

import copy
import gc
import pickle
import weakref

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memsave import LowPrecision, apply_low_precision
from lightning_memsave.techniques.optimizer_state import (
    apply_optimizer_state,
    estimate_optimizer_state,
    is_8bit,
    to_plain,
)
from lightning_memsave.techniques.optimizer_state.bitsandbytes_backend import become_8bit, become_plain
from lightning_memsave.techniques.optimizer_state.optimizer_mapping import OPTIMIZER_MAPPINGS, find_mapping

from .optimizer_state_subjects import (
    ALL_32BIT,
    BOUNDS_8BIT,
    CONFIG,
    PLAIN,
    big_model,
    every_kin,
    flat,
    run_steps,
    state_bytes,
    state_dtypes,
    trained_8bit,
    twins,
)


@every_kin
def test_8bit_state_tracks_the_plain_optimizer(name):
    (first, plain), (second, ours) = twins(name)
    start = flat(first)
    expected, found = run_steps(first, plain, range(10)) - start, run_steps(second, ours, range(10)) - start
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < BOUNDS_8BIT[name]


@every_kin
def test_32bit_state_equals_the_plain_optimizer(name):
    model = nn.Sequential(nn.Linear(63, 64), nn.Linear(64, 5))  # 4032 elements: just below the threshold
    (first, plain), (second, ours) = twins(name, model)
    start = flat(first)
    expected, found = run_steps(first, plain, range(10)) - start, run_steps(second, ours, range(10)) - start
    assert all(state_dtypes(ours, p) == {torch.float32} for p in second.parameters())
    assert (found - expected).norm() / expected.norm() < 1e-5


@every_kin
def test_bfloat16_parameters(name):
    model = big_model(torch.bfloat16)
    optimizer = PLAIN[name](model.parameters())
    reference_model = copy.deepcopy(model).float()
    reference = PLAIN[name](reference_model.parameters())
    estimate = estimate_optimizer_state(optimizer, CONFIG, model)
    apply_optimizer_state(optimizer, CONFIG, model)
    start = flat(model)
    found = run_steps(model, optimizer, range(10))
    expected = run_steps(reference_model, reference, range(10))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert state_bytes(optimizer) == estimate
    assert bool(found.isfinite().all())
    # bf16 keeps 8 bits of the weight, and steps are small next to the weights.
    assert (found - expected)[-1].norm() < 0.5 * (expected[-1] - start).norm()


@every_kin
def test_channels_last_parameters(name):
    model = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)  # 4608 elements
    (first, plain), (second, ours) = twins(name, model)
    start = flat(first)
    expected, found = run_steps(first, plain, range(5)) - start, run_steps(second, ours, range(5)) - start
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]
    buffers = [v for v in ours.state[second.weight].values() if isinstance(v, torch.Tensor)]
    assert all(buffer.is_contiguous() for buffer in buffers)  # CUDA's kernels walk the memory
    for moment, value in plain.state[first.weight].items():
        if moment != "step":  # each element's own, in a checkpoint as well
            error = ours.state_dict()["state"][0][moment].reshape(-1) - value.reshape(-1)
            assert error.norm() < 0.1 * value.norm()


@every_kin
def test_param_groups_keep_their_own_settings(name):
    model = big_model()
    second = copy.deepcopy(model)

    def build(m):
        decays = {} if name == "Adam" else {"weight_decay": 0.3}
        return PLAIN[name](
            [{"params": m[0].parameters(), "lr": 0.02, **decays}, {"params": m[2].parameters(), "lr": 1e-4}]
        )

    plain, ours = build(model), build(second)
    apply_optimizer_state(ours, ALL_32BIT, second)
    keys = [set(g) for g in plain.param_groups]
    starts = [flat(m) for m in model if isinstance(m, nn.Linear)]
    run_steps(model, plain, range(5))
    run_steps(second, ours, range(5))
    for expected, found, start in zip((model[0], model[2]), (second[0], second[2]), starts, strict=True):
        assert (flat(found) - flat(expected)).norm() / (flat(expected) - start).norm() < 1e-4
    assert [set(g) for g in ours.param_groups] == keys


@every_kin
def test_apply_keeps_the_object_and_undo_restores_it(name):
    model = big_model()
    optimizer = PLAIN[name](model.parameters())
    plain_class, keys = type(optimizer), [set(g) for g in optimizer.param_groups]
    attributes, groups, state = set(vars(optimizer)), optimizer.param_groups, optimizer.state
    applied = apply_optimizer_state(optimizer, CONFIG, model)
    assert is_8bit(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, getattr(bitsandbytes.optim, f"{name}8bit"))
    assert optimizer.param_groups is groups
    assert [set(g) for g in optimizer.param_groups] == keys
    assert applied.technique == "optimizer_state"
    assert applied.loss_class == "changed"
    assert name in applied.summary
    assert "1 of 4" in applied.summary
    run_steps(model, optimizer, range(3))
    assert [set(g) for g in optimizer.param_groups] == keys

    applied.undo()
    assert not is_8bit(optimizer)
    assert type(optimizer) is plain_class
    assert set(vars(optimizer)) == attributes
    assert optimizer.state is state
    assert set(optimizer.state[model[0].weight]) >= set(OPTIMIZER_MAPPINGS[name].moments)
    before = flat(model)
    applied.undo()
    assert type(optimizer) is plain_class
    run_steps(model, optimizer, range(3, 5))
    assert not torch.equal(flat(model), before)


@every_kin
def test_undo_continues_from_the_converted_state(name):
    model = nn.Linear(40, 40)  # 32-bit state, so that nothing is lost
    first, second = model, copy.deepcopy(model)
    plain, ours = PLAIN[name](first.parameters()), PLAIN[name](second.parameters())
    applied = apply_optimizer_state(ours, CONFIG, second)
    run_steps(first, plain, range(4))
    run_steps(second, ours, range(4))
    applied.undo()
    start = flat(first)
    expected, found = run_steps(first, plain, range(4, 8)) - start, run_steps(second, ours, range(4, 8)) - start
    assert (found - expected).norm() / expected.norm() < 1e-4


@every_kin
def test_undo_with_bfloat16_parameters_steps_on(name):
    model = big_model(torch.bfloat16)
    _, optimizer, applied = trained_8bit(name, model)
    applied.undo()
    run_steps(model, optimizer, range(2))
    assert bool(flat(model).isfinite().all())


@every_kin
def test_apply_in_the_middle_converts_the_state(name):
    model = big_model()
    second = copy.deepcopy(model)
    plain, ours = PLAIN[name](model.parameters()), PLAIN[name](second.parameters())
    run_steps(model, plain, range(5))
    run_steps(second, ours, range(5))
    apply_optimizer_state(ours, CONFIG, second)
    moments = to_plain(ours)["state"]
    for number, p in enumerate(model.parameters()):
        for key in OPTIMIZER_MAPPINGS[name].moments:
            exact = plain.state[p][key]
            assert (moments[number][key] - exact).norm() < 0.05 * exact.norm()
    if OPTIMIZER_MAPPINGS[name].has_step:
        assert {float(s["step"]) for s in moments.values()} == {5.0}
    start = flat(model)
    expected, found = run_steps(model, plain, range(5, 10)) - start, run_steps(second, ours, range(5, 10)) - start
    assert (found - expected).norm() / expected.norm() < BOUNDS_8BIT[name]


def test_other_optimizers_of_the_class_stay_plain():
    model, other_model = big_model(), big_model()
    other = PLAIN["AdamW"](other_model.parameters())
    optimizer = PLAIN["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(other_model, other, range(2))
    assert type(other) is torch.optim.AdamW
    assert set(other.state[other_model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("with_scheduler", [False, True])
def test_an_8bit_optimizer_dies_without_the_garbage_collector(with_scheduler):
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10) if with_scheduler else None
    applied = apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(1))
    state = weakref.ref(optimizer.state[model[0].weight]["state1"])
    gc.collect()
    gc.disable()
    try:
        del optimizer, scheduler, applied
        assert state() is None
    finally:
        gc.enable()


@every_kin
def test_small_and_kept_parameters_have_float32_state(name):
    model = big_model()
    optimizer = PLAIN[name](model.parameters())
    large, small = model[0].weight, model[2].weight
    become_8bit(optimizer, find_mapping(optimizer), {model[0].weight}, min_size=small.numel())
    run_steps(model, optimizer, range(2))
    assert state_dtypes(optimizer, large) == {torch.float32}, "kept by name"
    assert state_dtypes(optimizer, small) == {torch.uint8}, "at the threshold"
    assert state_dtypes(optimizer, model[0].bias) == {torch.float32}, "below it"


def test_a_change_beneath_another_is_not_undone():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    become_8bit(optimizer, find_mapping(optimizer), set())
    apply_low_precision(model, optimizer, LowPrecision())
    with pytest.raises(RuntimeError, match="was changed again after what is being undone"):
        become_plain(optimizer)


def test_a_pickle_and_a_copy_step_as_the_optimizer():
    model, optimizer, _ = trained_8bit("AdamW")
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other_model, other = copied((model, optimizer))
        assert type(other) is type(optimizer)
        run_steps(other_model, other, range(4, 6))
        again_model, again = copy.deepcopy((model, optimizer))
        assert torch.equal(run_steps(again_model, again, range(4, 6))[-1], flat(other_model))


def test_the_rate_of_a_scheduler_is_the_rate_of_the_kernel():
    (first, plain), (second, ours) = twins("AdamW", config=ALL_32BIT)
    schedulers = [lr_scheduler.StepLR(optimizer, 1, 0.1) for optimizer in (plain, ours)]
    start = flat(first)
    for step in range(4):
        expected, found = run_steps(first, plain, [step])[-1], run_steps(second, ours, [step])[-1]
        for scheduler in schedulers:
            scheduler.step()
    assert (found - expected).norm() / (expected - start).norm() < 1e-5
