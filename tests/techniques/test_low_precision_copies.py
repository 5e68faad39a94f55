"""Low precision on disk, in copies and schedulers, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import Ledger, LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from tests.techniques.low_precision_subjects import (
    DTYPES,
    ERRORS,
    OPTIMIZERS,
    WITH_CORRECTION,
    error_of,
    every_format,
    factor_of,
    lowered,
    network,
    parameter,
    run,
    through_disk,
    whole,
)


# ------------------------------------------------------------------------------- on disk
@every_format
def test_the_plain_module_and_optimizer_load_it(weight_format):
    model, optimizer, _ = lowered(weight_format)
    run(model, optimizer, range(4))
    plain = network()
    plain.load_state_dict(through_disk(model.state_dict()))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(whole(plain), whole(model))
    dtypes = {value.dtype for value in model.state_dict().values()}
    assert dtypes == ({torch.float32} if weight_format in WITH_CORRECTION else {torch.float32, DTYPES[weight_format]})
    plain_optimizer = OPTIMIZERS["AdamW"](list(plain.parameters()))
    plain_optimizer.load_state_dict(through_disk(optimizer.state_dict()))
    run(plain, plain_optimizer, range(4, 6))
    run(model, optimizer, range(4, 6))
    assert ((whole(plain) - whole(model)).abs() <= 3 * error_of(weight_format, whole(plain), 0.02)).all()


@every_format
def test_a_checkpoint_continues_bit_for_bit(weight_format):
    model, optimizer, _ = lowered(weight_format)
    run(model, optimizer, range(4))
    for load_first in (True, False):
        saved = through_disk((model.state_dict(), optimizer.state_dict()))
        second = network()
        if load_first:
            second.load_state_dict(saved[0])
        _, resumed, _ = lowered(weight_format, model=second)
        if not load_first:
            second.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert resumed.state[parameter(second[0])]["exp_avg"].dtype == torch.float32
        assert {p.dtype for p in second.parameters()} == {p.dtype for p in model.parameters()} > {torch.float32}
        straight, copied = copy.deepcopy((model, optimizer))
        run(straight, copied, range(4, 8))
        run(second, resumed, range(4, 8))
        assert torch.equal(whole(straight), whole(second))
        assert all(torch.equal(a, b) for a, b in zip(straight.buffers(), second.buffers(), strict=True))


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_a_float32_state_dict_keeps_more_than_bfloat16_when_loaded(weight_format):
    model, _, _ = lowered(weight_format)
    other = network().state_dict()
    model.load_state_dict(other)
    assert other["0.weight"].dtype == torch.float32
    expected = torch.cat([value.flatten() for value in other.values()])
    assert ((whole(model) - expected).abs() <= ERRORS[weight_format] * expected.abs()).all()
    assert (whole(model) - expected).abs().max() > 0


def test_a_state_dict_inside_of_a_larger_one():
    inner, _, _ = lowered("bf16+8")
    outer = nn.ModuleDict({"net": inner})
    saved = outer.state_dict()
    assert saved["net.0.weight"].dtype == torch.float32
    second, _, _ = lowered("bf16+8")
    nn.ModuleDict({"net": second}).load_state_dict(saved)
    assert torch.equal(whole(second), whole(inner))


@every_format
def test_reading_a_checkpoint_takes_the_temporaries_of_one_parameter(weight_format):
    def extra(num_layers):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(num_layers)))
        _, optimizer, _ = lowered(weight_format, model=model)
        run(model, optimizer, range(2))
        saved = through_disk((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        with Ledger().watching(model, [optimizer], saved) as ledger:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return ledger.measurement.peak_bytes - ledger.measurement.held_bytes

    assert extra(2) <= extra(8) <= extra(2) + 8 * 64  # tensors of one element for each parameter
    assert extra(8) <= 20 * 64 * 64


# ------------------------------------------------------------------------------- the same objects, and back
@every_format
def test_undo_gives_back_what_was(weight_format):
    model = network()
    buffers, names = list(model.buffers()), list(model.state_dict())
    objects = list(model.parameters())
    _, optimizer, applied = lowered(weight_format, model=model)
    run(model, optimizer, range(3))
    values = whole(model)
    assert list(model.state_dict()) == names
    applied.undo()
    assert type(optimizer) is torch.optim.AdamW
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(whole(model), values)
    assert list(model.buffers()) == buffers
    assert "memsave_low_precision" not in optimizer.state_dict()
    applied.undo()
    run(model, optimizer, range(3, 5))
    model.load_state_dict(network().state_dict())


@every_format
def test_copies_are_independent(weight_format):
    model, optimizer, _ = lowered(weight_format)
    run(model, optimizer, range(2))
    second, copied = copy.deepcopy((model, optimizer))
    before = whole(model)
    run(second, copied, range(2, 4))
    assert torch.equal(whole(model), before)
    run(model, optimizer, range(2, 4))
    assert torch.equal(whole(second), whole(model))


def test_schedulers_closures_and_hooks():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    apply_low_precision(model, optimizer, LowPrecision())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, 24)).float().square().mean()
        loss.backward()
        return loss

    before = whole(model)
    assert optimizer.step(closure).requires_grad
    scheduler.step()  # torch warns when it does not know of the step before
    assert calls == ["pre", "post"]
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(whole(model), before)


@every_format
def test_with_8bit_state(weight_format):
    config = OptimizerState(min_size=1000, backend="bitsandbytes")
    model, plain = network(), network()
    for p in (*model.parameters(), *plain.parameters()):
        p.data = p.data.bfloat16().float()
    plain.load_state_dict(model.state_dict())
    ours, reference = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, plain))
    apply_optimizer_state(ours, config, model)
    apply_optimizer_state(reference, config, plain)
    scale = {"initial_scale": 2.0**8} if weight_format == "fp16-scaled" else {}
    apply_low_precision(model, ours, LowPrecision(format=weight_format, **scale))
    run(model, ours, range(3))
    run(plain, reference, range(3))
    assert ours.state[parameter(model[0])]["state1"].dtype == torch.uint8
    assert ours.state[parameter(model[3])]["state1"].dtype == torch.float32
    error = (whole(model) - whole(plain)).abs()
    assert (error <= 4 * error_of(weight_format, whole(plain), 0.02) + 1e-7).all()


def test_8bit_state_afterwards_is_refused():
    model, optimizer, _ = lowered()
    with pytest.raises(ValueError, match="AdamWInFloat32"):
        apply_optimizer_state(optimizer, OptimizerState(), model)


@every_format
def test_tied_frozen_and_channels_last(weight_format):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Conv2d(4, 6, 3), "f": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    model["c"].to(memory_format=torch.channels_last)
    model["f"].requires_grad_(False)
    frozen = model["f"].weight.detach().clone()
    _, optimizer, _ = lowered(weight_format, model=model)
    for p in model.parameters():
        p.grad = torch.ones_like(p, dtype=p.grad_dtype) * factor_of(optimizer) if p.requires_grad else None
    before = model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    optimizer.step()
    after = model.state_dict()
    assert torch.equal(after["a.weight"], after["b.weight"])
    assert model["c"].weight.is_contiguous(memory_format=torch.channels_last)
    for name in ("a.weight", "c.weight"):
        step = (before[name].float() - after[name].float()).mean()
        assert step == pytest.approx(1e-3, rel=0.3)
    assert torch.equal(after["f.weight"], frozen)


def test_bfloat16_parameters_are_taken_as_well():
    model = network().bfloat16()
    model[1].float()
    _, optimizer, applied = lowered("bf16+8", model=model)
    run(model, optimizer, range(2))
    assert model.state_dict()["0.weight"].dtype == torch.float32
    applied.undo()
    assert model[0].weight.dtype == torch.bfloat16


class Delegates(torch.optim.Optimizer):
    """As `ZeroRedundancyOptimizer`: the groups that step are another one's."""

    def __init__(self, params):
        super().__init__(params, {})
        self.optim = torch.optim.AdamW(self.param_groups[0]["params"])

    def step(self, closure=None):
        self.optim.step()


def test_an_optimizer_that_steps_by_another_is_refused():
    model = network()
    with pytest.raises(ValueError, match=r"only calls the steps of those that it holds, got 'Delegates'"):
        apply_low_precision(model, Delegates(model.parameters()), LowPrecision())


def test_moments_lie_as_their_weights_do_after_loading():
    """Fused kernels go through both without a look at their strides."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3)).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
        apply_optimizer_state(optimizer, OptimizerState(first_moment="4bit"), model)  # the first keeps 32 bits
        apply_low_precision(model, optimizer, LowPrecision())
        return model, optimizer

    model, optimizer = build()
    run(model, optimizer, range(2))
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    second, resumed = build()
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.state[parameter(second[0])]["exp_avg"].stride() == second[0].weight.stride()
    for m, o in ((model, optimizer), (second, resumed)):
        run(m, o, range(2, 5))
    assert torch.equal(whole(model), whole(second))
