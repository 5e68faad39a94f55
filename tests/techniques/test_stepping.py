"""Low precision over low-bit state: two layers of one optimizer, each with noise of every step."""

import pytest
import torch
from torch import nn

from lightning_memsave import (
    LowPrecision,
    OptimizerState,
    apply_low_precision,
    apply_optimizer_state,
)
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.torch_internals.optimizer_class import Counts

FORMATS = ("8bit", "4bit", "fp8", "factored", "4bit-factored", "5bit-factored", "lowrank", "apollo", "offload")


def model_of(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def prepared(model, state, precision=None):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    apply_optimizer_state(optimizer, state, model)
    if precision is not None:
        apply_low_precision(model, optimizer, LowPrecision(format=precision))
    return optimizer


@pytest.mark.parametrize("gradients", ["keep", "release", "into-state"])
@pytest.mark.parametrize("state_format", FORMATS)
def test_every_layer_counts_every_step(state_format, gradients):
    if state_format in ("lowrank", "apollo") and gradients == "into-state":
        pytest.skip("refused")
    model, rank = model_of(), {"rank": 8} if state_format in ("lowrank", "apollo") else {}
    state = OptimizerState(**BY_NAME[state_format], gradients=gradients, min_size=1, **rank)
    optimizer = prepared(model, state, "bf16-sr")
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = [each.num_steps for each in vars(optimizer).values() if isinstance(each, Counts)]
    assert counts == [3, 3]


@pytest.mark.parametrize("state_format", ["8bit", "4bit", "fp8"])
def test_errors_of_the_state_do_not_add_up_under_a_precision(state_format):
    def trained(state_format, precision):
        model = model_of()
        if state_format is None:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        else:
            state = OptimizerState(
                **BY_NAME[state_format], min_size=1, backend="own" if state_format == "8bit" else "auto"
            )
            optimizer = prepared(model, state, precision)
        generator = torch.Generator().manual_seed(1)
        for _ in range(100):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.grad_dtype or p.dtype)
            optimizer.step()
        return torch.cat([p.detach().float().flatten() for p in model.parameters()])

    exact = trained(None, None)
    alone, under = (trained(state_format, precision) - exact for precision in (None, "bf16-gradients"))
    assert float(under.norm()) < 1.5 * float(alone.norm())


@pytest.mark.parametrize("gradients", ["release", "into-state"])
def test_scaled_losses_refuse_gradients_that_end_in_backward(gradients):
    model = model_of()
    optimizer = prepared(model, OptimizerState(gradients=gradients, min_size=1))
    with pytest.raises(ValueError, match=r'scales the loss needs `OptimizerState\(gradients="keep"\)`'):
        apply_low_precision(model, optimizer, LowPrecision(format="fp16-scaled"))


def test_an_optimizer_that_was_scaled_steps_plainly_afterwards():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    applied = apply_low_precision(model, optimizer, LowPrecision(format="fp16-scaled"))
    applied.undo()
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(old - 1, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("saved", "own"), [(8, 16), (16, 8), (8, 64)])
def test_a_subspace_of_another_rank_is_refused(saved, own):
    def optimizer_of(rank):
        model = model_of()
        optimizer = prepared(model, OptimizerState(projection="galore", rank=rank, min_size=1))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    with pytest.raises(ValueError, match=rf"must be that of the checkpoint, got {own}.*rank={saved}"):
        optimizer_of(own).load_state_dict(optimizer_of(saved).state_dict())


@pytest.mark.parametrize(("state_format", "width"), [("lowrank", 64), ("8bit", 8)])
def test_a_format_that_nothing_is_large_enough_for_says_so(state_format, width):
    model = model_of(width)
    optimizer = torch.optim.AdamW(model.parameters())
    applied = apply_optimizer_state(optimizer, OptimizerState(**BY_NAME[state_format]), model)
    assert applied.loss_class == "exact"
    assert "for 0 of 4 parameters" in applied.summary


def test_the_lower_layer_cannot_be_undone_first():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = apply_optimizer_state(optimizer, OptimizerState(first_moment="fp8", min_size=1), model)
    precision = apply_low_precision(model, optimizer, LowPrecision(format="bf16-sr"))
    before = type(optimizer)
    with pytest.raises(RuntimeError, match=r"AdamWCodedInFloat32 was changed again .* Undo the latest change first"):
        state.undo()
    assert type(optimizer) is before
    precision.undo()
    state.undo()  # the way back was not lost
    assert type(optimizer) is torch.optim.AdamW


def test_a_format_cannot_change_beneath_a_precision():
    model = model_of()
    optimizer = prepared(model, OptimizerState(first_moment="fp8", min_size=1), "bf16-sr")
    with pytest.raises(ValueError, match=r"cannot change .* got '4bit instead of fp8'.*new optimizer"):
        apply_optimizer_state(optimizer, OptimizerState(first_moment="4bit", min_size=1), model)
    assert type(optimizer).__qualname__ == "AdamWCodedInFloat32"
