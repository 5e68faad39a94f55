"""What optimizers keep in the shape of a parameter: of torch's known, of others found by a trial."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from lightning_memsave.techniques.optimizer_state import estimate_optimizer_state
from lightning_memsave.techniques.optimizer_state.moment_codecs import QuantizedMoment
from lightning_memsave.techniques.optimizer_state.moment_names import find_moments

from .optimizer_state_subjects import bytes_held, flat, run_steps, through_disk

CODED = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}


class TwoAverages(torch.optim.Optimizer):
    """A fast and a slow average of gradients over a square average, under names of its own (as in AdEMAMix)."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99, 0.999)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fast, slow, square = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["m_fast"], state["m_slow"], state["nu"] = (torch.zeros_like(p) for _ in range(3))
                    state["signs"] = torch.zeros_like(p, dtype=torch.bool)
                state["count"] += 1
                state["m_fast"].lerp_(p.grad, 1 - fast)
                state["m_slow"].lerp_(p.grad, 1 - slow)
                state["nu"].lerp_(p.grad.square(), 1 - square)
                state["signs"].copy_(p.grad > 0)
                correction = 1 - square ** state["count"]
                p.addcdiv_(
                    state["m_fast"] + 5 * state["m_slow"],
                    (state["nu"] / correction).sqrt().add_(1e-8),
                    value=-group["lr"],
                )


class ScheduleFree(torch.optim.Optimizer):
    """SGD on `z`, of which the weights are an average whose weights are counted in the group (Defazio et al., 2024)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["weight_sum"] += group["lr"] ** 2
            part = group["lr"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"], state["square"] = p.clone(), torch.zeros_like(p)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                state["z"].addcdiv_(p.grad, state["square"].sqrt().add_(1e-3), value=-group["lr"] / 10)
                p.lerp_(state["z"], part)
            group["k"] += 1


class CountsNorms(torch.optim.SGD):
    """Keeps in its group what depends on the parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["norm"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        return super().step(closure)


def matrices():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(3)))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1}),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), {"square_avg": 1, "momentum_buffer": 0}),
        (torch.optim.Adamax, {"exp_avg": 0, "exp_inf": 1}),
        (torch.optim.Adadelta, {"square_avg": 1, "acc_delta": 1}),
        (torch.optim.Rprop, {"prev": 0, "step_size": 1}),
        (torch.optim.Muon, {"momentum_buffer": 0}),
        (torch.optim.ASGD, {}),  # an average of the weights alone
        (torch.optim.Adafactor, {}),  # rows and columns
        (TwoAverages, {"m_fast": 0, "m_slow": 0, "nu": 1}),
        (ScheduleFree, {"square": 1}),
        (lambda p: type("OwnSGD", (torch.optim.SGD,), {})(p, 0.1, momentum=0.9), {"momentum_buffer": 0}),
        (lambda p: type("OwnAdamW", (torch.optim.AdamW,), {})(p), {"exp_avg": 0, "exp_avg_sq": 1}),
        (lambda p: type("OwnSGD", (torch.optim.SGD,), {})(p, 0.1), {}),
    ],
)
def test_what_is_kept_and_whether_it_has_a_sign(build, expected):
    optimizer = build(matrices().parameters())
    before = torch.get_rng_state()
    assert find_moments(optimizer).is_positive == {name: bool(value) for name, value in expected.items()}
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


def test_rprop_goes_where_the_plain_one_goes_in_8_bits_and_is_refused_in_4():
    model = matrices()
    second = copy.deepcopy(model)
    plain, ours = (torch.optim.Rprop(each.parameters(), 1e-3) for each in (model, second))
    with pytest.raises(ValueError, match="cannot keep the step sizes of Rprop"):
        apply_optimizer_state(ours, OptimizerState(first_moment="4bit", **CODED), second)
    apply_optimizer_state(ours, OptimizerState(**CODED), second)
    start = flat(model)
    expected, found = run_steps(model, plain, range(20))[-1] - start, run_steps(second, ours, range(20))[-1] - start
    assert 0 < (found - expected).norm() / expected.norm() < 0.1


@pytest.mark.parametrize("state_format", ["8bit", "4bit"])
@pytest.mark.parametrize(
    ("build", "num_moments", "bound"),
    [
        (torch.optim.Muon, 1, {"8bit": 0.05, "4bit": 0.4}),
        (TwoAverages, 3, {"8bit": 0.05, "4bit": 0.4}),
        (ScheduleFree, 1, {"8bit": 0.05, "4bit": 0.4}),
        (lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True), 3, {"8bit": 0.05, "4bit": 0.4}),
        (lambda p: type("OwnAdamW", (torch.optim.AdamW,), {})(p, 1e-2), 2, {"8bit": 0.05, "4bit": 0.4}),
    ],
    ids=["Muon", "two averages", "schedule-free", "amsgrad", "a subclass"],
)
def test_it_goes_where_the_plain_optimizer_goes(build, num_moments, bound, state_format):
    model = matrices()
    second = copy.deepcopy(model)
    plain, ours = build(model.parameters()), build(second.parameters())
    config = OptimizerState(first_moment=state_format, **CODED)
    estimate = estimate_optimizer_state(ours, config, second)
    assert apply_optimizer_state(ours, config, second).loss_class == "changed"
    start = flat(model)
    expected, found = run_steps(model, plain, range(20))[-1] - start, run_steps(second, ours, range(20))[-1] - start
    assert 0 < (found - expected).norm() / expected.norm() < bound[state_format]
    per_element = {"8bit": 256, "4bit": 128}[state_format]
    assert estimate == 3 * num_moments * 9 * (per_element + 4)  # 48 * 48 elements are 9 blocks
    coded = [v for state in ours.state.values() for v in state.values() if isinstance(v, QuantizedMoment)]
    assert len(coded) == 3 * num_moments
    assert sum(t.nbytes for each in coded for t in each) == estimate


def test_copies_of_weights_stay_as_they_are_and_groups_count_once_per_step():
    model = matrices()
    second = copy.deepcopy(model)
    plain, ours = ScheduleFree(model.parameters()), ScheduleFree(second.parameters())
    apply_optimizer_state(ours, OptimizerState(placement="host", **CODED), second)  # exact
    run_steps(model, plain, range(5))
    run_steps(second, ours, range(5))
    assert ours.param_groups[0]["k"] == 5
    assert ours.param_groups[0]["weight_sum"] == plain.param_groups[0]["weight_sum"]
    assert torch.equal(flat(model), flat(second))
    for mine, theirs in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.state[mine]["z"], plain.state[theirs]["z"])


@pytest.mark.parametrize("precision", ["bf16-sr", "bf16+8"])
def test_groups_count_once_per_step_with_short_weights_around(precision):
    model = matrices()
    optimizer = ScheduleFree(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(**CODED), model)
    apply_low_precision(model, optimizer, LowPrecision(format=precision))
    run_steps(model, optimizer, range(4))
    assert optimizer.param_groups[0]["k"] == 4
    assert flat(model).isfinite().all()


def test_a_group_that_depends_on_the_parameters_is_refused():
    model = matrices()
    optimizer = CountsNorms(model.parameters(), 0.1, momentum=0.9)
    apply_optimizer_state(optimizer, OptimizerState(**CODED), model)
    with pytest.raises(ValueError, match="which changes `norm` of its parameter group"):
        run_steps(model, optimizer, range(2))


@pytest.mark.parametrize("build", [TwoAverages, ScheduleFree, torch.optim.Muon])
@pytest.mark.parametrize("checkpoint", ["plain", "compact"])
def test_checkpoints_continue_to_the_bit_and_load_into_the_plain_optimizer(build, checkpoint):
    config = OptimizerState(checkpoint=checkpoint, **CODED)
    model = matrices()
    optimizer = build(model.parameters())
    apply_optimizer_state(optimizer, config, model)
    run_steps(model, optimizer, range(4))
    saved = through_disk(optimizer.state_dict())
    second = copy.deepcopy(model)
    again = build(second.parameters())
    apply_optimizer_state(again, config, second)
    again.load_state_dict(saved)
    assert torch.equal(run_steps(model, optimizer, range(4, 7)), run_steps(second, again, range(4, 7)))
    if checkpoint == "plain":
        third = copy.deepcopy(model)
        plain = build(third.parameters())
        plain.load_state_dict(saved)
        run_steps(third, plain, range(4, 6))
        assert flat(third).isfinite().all()
    broken = copy.deepcopy(saved)
    name = next(
        name
        for name, value in broken["state"][0].items()
        if name in find_moments(build(matrices().parameters())).is_positive
    )
    broken["state"][0][name] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"optimizer_states\[0\].{name}"):
        again.load_state_dict(broken)


def test_bytes_held_equal_the_estimate_of_another_class():
    model = matrices()
    optimizer = TwoAverages(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(second_moment="8bit", **CODED), model)
    run_steps(model, optimizer, range(1))
    flags = sum(state["signs"].nbytes for state in optimizer.state.values())
    estimate = estimate_optimizer_state(TwoAverages(matrices().parameters()), OptimizerState(**CODED), matrices())
    for state in optimizer.state.values():
        del state["count"]
    assert bytes_held(optimizer) == estimate + flags


class TurnsNegative(TwoAverages):
    """Its square average is subtracted from after six steps."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            if state["count"] > 6:
                state["nu"] -= state["nu"].max()


def test_a_moment_that_turns_negative_is_an_error_with_its_name():
    model = matrices()
    optimizer = TurnsNegative(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(**CODED), model)
    run_steps(model, optimizer, range(6))
    with pytest.raises(ValueError, match=r"was never negative in a trial .*nu of TurnsNegative"):
        run_steps(model, optimizer, range(6, 8))


class CountsItself(torch.optim.Optimizer):
    """Counts its steps in an attribute, or in a tensor of its group, by which it divides."""

    def __init__(self, params, where):
        super().__init__(params, {"lr": 0.1, "count": torch.zeros(())})
        self.where, self.count = where, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["count"] += 1
            count = self.count if self.where == "itself" else float(group["count"])
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(buffer, alpha=group["lr"] / count)


@pytest.mark.parametrize("where", ["itself", "its group"])
def test_an_optimizer_that_counts_its_calls_is_refused_and_left_as_it_is(where):
    model = matrices()
    optimizer = CountsItself(model.parameters(), where)
    with pytest.raises(ValueError, match="steps each parameter by itself"):
        apply_optimizer_state(optimizer, OptimizerState(**CODED), model)
    with pytest.raises(ValueError, match="steps each parameter by itself"):
        apply_low_precision(model, optimizer, LowPrecision())
    assert optimizer.count == 0
    assert float(optimizer.param_groups[0]["count"]) == 0


class DualAverage(torch.optim.Optimizer):
    """Keeps a sum of gradients, which has a sign, under a name of Adagrad's."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(total, alpha=group["lr"])


def test_a_name_of_torchs_says_nothing_about_another_class():
    assert find_moments(DualAverage(matrices().parameters())).is_positive == {"sum": False}
    own = type("AdamW", (TwoAverages,), {})
    assert list(find_moments(own(matrices().parameters())).is_positive) == ["m_fast", "m_slow", "nu"]


class AuxiliaryAdam(torch.optim.Optimizer):
    """Another rule for each group, as Muon with an auxiliary Adam has."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.01, "has_squares": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                update = state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                if group["has_squares"]:
                    square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 0.01)
                    update = update / (square.sqrt() + 1e-6)
                p.sub_(update, alpha=group["lr"])


def test_each_group_has_a_trial_of_its_own():
    model = matrices()
    first, *others = model.parameters()
    optimizer = AuxiliaryAdam([{"params": [first]}, {"params": others, "has_squares": True}])
    config = OptimizerState(**CODED)
    estimate = estimate_optimizer_state(optimizer, config, model)
    assert estimate == (1 + 2 * 2) * 9 * 260  # bytes of a block of 256 and its scale
    apply_optimizer_state(optimizer, config, model)
    run_steps(model, optimizer, range(2))
    assert bytes_held(optimizer) == estimate
    again = AuxiliaryAdam([{"params": [first]}, {"params": others, "has_squares": True}])
    apply_optimizer_state(again, config, model)
    again.load_state_dict(through_disk(optimizer.state_dict()))


def test_group_values_that_equal_nothing_are_no_change():
    model = matrices()
    optimizer = torch.optim.NAdam(model.parameters())
    optimizer.param_groups[0] |= {"best": float("nan"), "shape": np.zeros(3)}
    apply_optimizer_state(optimizer, OptimizerState(**CODED), model)
    run_steps(model, optimizer, range(2))
    assert flat(model).isfinite().all()
