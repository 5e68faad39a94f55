"""LR schedulers go on steering an optimizer that has become 8-bit."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memsave.techniques.optimizer_state import (
    apply_optimizer_state,
    is_8bit,
)

from .optimizer_state_subjects import (
    CONFIG,
    PLAIN,
    big_model,
    flat,
    run_steps,
    set_gradients,
)

# ---------------------------------------------------------------------- schedulers
SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12, cycle_momentum=True),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
}


def scheduled(optimizer, model, scheduler_name, when, apply):
    """Learning rate and momentum of 10 steps; `when` says at what moment the optimizer becomes 8-bit."""
    if when == "before":
        apply(optimizer, model)
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    if when == "after":
        apply(optimizer, model)
    seen = []
    for step in range(10):
        if when == "middle" and step == 5:
            apply(optimizer, model)
        set_gradients(model, step)
        optimizer.step()
        scheduler.step(*([1.0] if scheduler_name == "plateau" else []))
        seen.append([(g["lr"], g.get("momentum"), g.get("betas")) for g in optimizer.param_groups])
    return seen


@pytest.mark.parametrize("when", ["before", "after", "middle"])
@pytest.mark.parametrize("scheduler_name", SCHEDULERS)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_schedulers_steer_it_as_before(name, scheduler_name, when):
    (first, plain), (second, ours) = [(m := big_model(), PLAIN[name](m.parameters())) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = scheduled(plain, first, scheduler_name, "never", None)
        found = scheduled(ours, second, scheduler_name, when, lambda o, m: apply_optimizer_state(o, CONFIG, m) and None)
    assert found == expected
    assert len({str(row) for row in found}) > 2
    assert is_8bit(ours)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_schedule_reaches_the_steps(name):
    model = nn.Linear(30, 30)
    second = copy.deepcopy(model)
    plain, ours = PLAIN[name](model.parameters()), PLAIN[name](second.parameters())
    schedulers = [SCHEDULERS["one cycle"](o) for o in (plain, ours)]
    apply_optimizer_state(ours, CONFIG, second)
    start = flat(model)
    for step in range(10):
        run_steps(model, plain, [step])
        run_steps(second, ours, [step])
        for scheduler in schedulers:
            scheduler.step()
    assert (flat(second) - flat(model)).norm() / (flat(model) - start).norm() < 1e-5


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_go_on_after_undo(when):
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    if when == "before":
        applied = apply_optimizer_state(optimizer, CONFIG, model)
    scheduler = SCHEDULERS["cosine"](optimizer)
    if when == "after":
        applied = apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, [0])
    applied.undo()
    # torch warns here when it does not know of the step before.
    scheduler.step()
    run_steps(model, optimizer, [1])
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])


def test_a_scheduler_stepped_too_early_still_warns():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    scheduler = SCHEDULERS["cosine"](optimizer)
    apply_optimizer_state(optimizer, CONFIG, model)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()


def test_a_learning_rate_tensor():
    model = nn.Linear(30, 30)
    second = copy.deepcopy(model)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(second.parameters(), lr=torch.tensor(1e-2))
    apply_optimizer_state(ours, CONFIG, second)
    start = flat(model)
    expected, found = run_steps(model, plain, range(3)) - start, run_steps(second, ours, range(3)) - start
    assert (found - expected).norm() / expected.norm() < 1e-5
