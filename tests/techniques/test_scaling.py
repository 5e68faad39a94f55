"""Dynamic loss scaling of float16 gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, apply_low_precision
from lightning_memsave.techniques.low_precision import LossScaling
from lightning_memsave.techniques.low_precision.stepping import _unscale
from tests.techniques.low_precision_subjects import (
    factor_of,
    give_gradients,
    lowered,
    network,
    run,
    through_disk,
    whole,
)


def scaled(factor=2.0**8, growth_interval=2000, optimizer="SGD"):
    model, optimizer, _ = lowered("fp16-scaled", optimizer, initial_scale=factor, growth_interval=growth_interval)
    return model, optimizer


def test_the_scale_does_not_change_what_is_learnt():
    after = []
    for factor in (2.0**2, 2.0**12):
        torch.manual_seed(0)
        model, optimizer = scaled(factor)
        assert factor_of(optimizer) == factor
        for step in range(4):
            give_gradients(model, step, factor * 2.0**-6)
            optimizer.step()
        after.append(whole(model))
    assert torch.equal(*after)


def test_a_gradient_too_small_for_float16_is_learnt_from():
    p = nn.Parameter(torch.zeros(1000))
    model = nn.ParameterList([p])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    apply_low_precision(model, optimizer, LowPrecision(format="fp16-scaled"))
    loss = (p.float() * 1e-9).sum()
    assert float(torch.tensor(1e-9).half()) == 0
    optimizer.scale_loss(loss).backward()
    assert p.grad.dtype == torch.float16
    optimizer.step()
    assert float(p.detach().double().mean()) == pytest.approx(-1e-9, rel=0.5)  # its spacing at zero is 6e-8


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_that_overflows_is_skipped_and_halves_the_scale(bad):
    model, optimizer = scaled()
    run(model, optimizer, range(2))
    weights, state = whole(model), copy.deepcopy(optimizer.state_dict()["state"])
    give_gradients(model, 2, factor_of(optimizer))
    model[3].weight.grad[0, 0] = bad
    optimizer.step()
    assert torch.equal(whole(model), weights)
    for number, before in state.items():
        assert torch.equal(optimizer.state_dict()["state"][number]["momentum_buffer"], before["momentum_buffer"])
    assert factor_of(optimizer) == 2.0**7
    run(model, optimizer, range(2, 3))
    assert not torch.equal(whole(model), weights)


def test_an_overflow_of_a_float32_parameter_skips_as_well():
    model, optimizer = scaled()
    weights = whole(model)
    give_gradients(model, 0, factor_of(optimizer))
    model[1].weight.grad[0] = float("inf")
    optimizer.step()
    assert torch.equal(whole(model), weights)


def test_good_steps_double_the_scale_as_torchs_scaler_does():
    model, optimizer = scaled(growth_interval=3)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    p = nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([p], 0.1)
    for step in range(12):
        overflows = step in (2, 8, 9)
        give_gradients(model, step, factor_of(optimizer))
        reference.scale(p.sum()).backward()
        if overflows:
            model[0].weight.grad[0, 0] = p.grad[0] = float("inf")
        optimizer.step()
        reference.step(plain)
        reference.update()
        plain.zero_grad()
        assert factor_of(optimizer) == reference.get_scale(), step
    assert reference.get_scale() == 2.0**6


def test_a_loss_that_was_not_scaled_is_noticed():
    model, optimizer, _ = lowered("fp16-scaled")
    give_gradients(model, 0)
    with pytest.raises(RuntimeError, match=r"optimizer.scale_loss\(loss\).backward\(\)"):
        optimizer.step()


def test_weights_beyond_float16_are_refused():
    model = network()
    model[0].weight.data[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"`precision` can hold weights up to 65,504 in float16, got '0.weight with"):
        lowered("fp16-scaled", model=model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_is_of_gradients_without_the_factor(max_norm):
    model, plain = network(), network()
    lowered("fp16-scaled", "SGD", model)
    scaling = LossScaling(2.0**8, 2000)
    scaling.scale(torch.ones(()))
    give_gradients(model, 0, 2.0**8)
    give_gradients(plain, 0)
    norm = scaling.clip_by_norm(model.parameters(), max_norm)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    assert float(norm) == pytest.approx(float(expected), rel=1e-3)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(scaling.unscaled(p), q.grad, rtol=2e-3, atol=1e-7)
    scaling.clip_by_value(model.parameters(), 0.003)
    nn.utils.clip_grad_value_(plain.parameters(), 0.003)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(scaling.unscaled(p), q.grad, rtol=2e-3, atol=1e-7)
    model[0].weight.grad[0, 0] = float("inf")
    scaling.clip_by_value(model.parameters(), 0.003)
    assert model[0].weight.grad[0, 0].isinf()


def test_a_bound_beyond_float16_clips_nothing():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    p.grad = torch.tensor([60_000.0, float("inf")], dtype=torch.float16)
    scaling = LossScaling(2.0**16, 2000)
    scaling.scale(torch.ones(()))
    scaling.clip_by_value([p], 1.0)
    assert p.grad[0] == 60_000.0
    assert p.grad[1].isinf()


def test_small_gradients_survive_clipping():
    """A float16 gradient of 2**-10 times a factor of 2**-16 would be zero; its step multiplies in float32."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    p.grad = torch.tensor([2.0**-10, 2.0**10], dtype=torch.float16)
    scaling = LossScaling(1.0, 2000)
    scaling.scale(torch.ones(()))
    scaling.clip_by_norm([p], 2.0**-6)
    assert torch.equal(p.grad, torch.tensor([2.0**-10, 2.0**10], dtype=torch.float16))
    torch.testing.assert_close(scaling.unscaled(p), torch.tensor([2.0**-26, 2.0**-6]))
    scaling.scale(torch.ones(()))  # another backward: what was clipped stays so
    assert float(p.grad[1]) == 2.0**-6
    assert torch.equal(scaling.unscaled(p), p.grad.float())


class Only:
    """Stands for `Weights` with one parameter."""

    def __init__(self, scaling, p):
        self.scaling_now, self._p = scaling, p

    def __contains__(self, p):
        return p is self._p


def test_float16_gradients_of_parameters_that_are_kept_are_clipped():
    kept, other = (nn.Parameter(torch.zeros(1, dtype=torch.float16)) for _ in range(2))
    scaling = LossScaling(1.0, 2000)
    scaling.scale(torch.ones(()))
    kept.grad, other.grad = (torch.full((1,), 3.0, dtype=torch.float16) for _ in range(2))
    scaling.clip_by_norm([kept, other], 1.0)
    assert _unscale(Only(scaling, other), [{"params": [kept, other]}])
    assert float(kept.grad) == pytest.approx(0.5**0.5, rel=1e-3)
    assert float(scaling.unscaled(other)) == pytest.approx(0.5**0.5, rel=1e-3)


def test_a_small_momentum_decays():
    """Rounded to the nearest, four times float16's smallest number would stay what it is when a tenth of it goes."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    apply_low_precision(model, optimizer, LowPrecision(format="fp16-scaled"))
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"] = torch.full_like(model[0].weight, 4 * 2.0**-24)
    for _ in range(10):
        optimizer.scale_loss(torch.zeros(()))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert state["momentum_buffer"].dtype == torch.float16
    assert float(state["momentum_buffer"].float().mean()) == pytest.approx(4 * 2.0**-24 * 0.9**10, rel=0.15)


def test_the_momentum_of_sgd_is_float16_and_float32_once_undone():
    model, optimizer, applied = lowered("fp16-scaled", "SGD")
    run(model, optimizer, range(2))
    state = optimizer.state[model[0].weight]
    assert state["momentum_buffer"].dtype == torch.float16
    assert optimizer.state[model[1].weight]["momentum_buffer"].dtype == torch.float32
    applied.undo()
    assert optimizer.state[model[0].weight]["momentum_buffer"].dtype == torch.float32
    give_gradients(model, 2)
    optimizer.step()


def test_the_scale_is_resumed():
    model, optimizer = scaled(growth_interval=3)
    run(model, optimizer, range(4))
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    assert saved[1]["memsave_low_precision"]["loss_scaling"]["scale"] == 2.0**9
    second, resumed = scaled(growth_interval=3)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, its_optimizer in ((model, optimizer), (second, resumed)):
        run(each, its_optimizer, range(4, 9))
    assert factor_of(resumed) == factor_of(optimizer) == 2.0**11
    assert torch.equal(whole(model), whole(second))
