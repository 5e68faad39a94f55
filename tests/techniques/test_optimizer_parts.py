"""Large parameters step part by part: the same numbers, and temporaries of one part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_memsave import Ledger, LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from lightning_memsave.numerics.kernels import native
from lightning_memsave.techniques.optimizer_state import estimate_optimizer_state
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.torch_internals import optimizer_class

from .optimizer_state_subjects import Lamb, flat, through_disk

PART = 512
WIDTH = 47  # 47 * 47 is no multiple of a part or a block
ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
ELEMENTWISE = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
}
OTHERS = {"Adafactor": torch.optim.Adafactor, "LAMB": Lamb}


@pytest.fixture
def in_small_parts(monkeypatch):
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", PART)
    cut = []
    stand_in = optimizer_class.stand_in

    def noted(p, values):
        cut.append(values.numel() < p.numel())
        return stand_in(p, values)

    monkeypatch.setattr(optimizer_class, "stand_in", noted)
    return cut


def subject(make, precision=None, **state):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    optimizer = make(model.parameters())
    if state:
        apply_optimizer_state(optimizer, OptimizerState(**(ALL | state)), model)
    if precision is not None:
        apply_low_precision(model, optimizer, LowPrecision(format=precision))
    return model, optimizer


def run(model, optimizer, steps, parts=1):
    dtype = model[0].weight.dtype
    for step in steps:
        for part in range(parts):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + part))
            with torch.autocast(
                "cpu", dtype if dtype != torch.float32 else torch.bfloat16, enabled=dtype != torch.float32
            ):
                loss = model(x).float().square().mean()
            getattr(optimizer, "scale_loss", lambda loss: loss)(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def both(monkeypatch, *args, parts=1, **settings):
    """Weights after some steps whole, and in small parts."""
    whole = run(*subject(*args, **settings), range(4), parts)
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", PART)
    return whole, run(*subject(*args, **settings), range(4), parts)


@pytest.mark.parametrize("precision", ["bf16+8", "bf16-kahan", "bf16-gradients"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_steps_in_float32_are_the_same_bits(monkeypatch, name, precision):
    whole, cut = both(monkeypatch, ELEMENTWISE[name], precision)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize(("name", "parts"), [("SGD", 3), ("AdamW", 1)])
def test_gradients_into_32bit_state_are_the_same_bits(monkeypatch, name, parts):
    """Of several, Adam's second moment is estimated part by part: `test_optimizer_state_into_state.py`."""
    plain = {"SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "AdamW": ELEMENTWISE["AdamW"]}[name]
    whole, cut = both(monkeypatch, plain, first_moment="32bit", gradients="into-state", parts=parts)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("settings", [{"projection": "galore", "rank": 4}, {"placement": "host"}])
def test_state_that_is_of_a_whole_parameter_is_not_cut(in_small_parts, settings):
    run(*subject(ELEMENTWISE["AdamW"], **settings), range(2))
    assert not any(in_small_parts)


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_that_look_at_a_whole_parameter_are_not_cut(in_small_parts, name):
    run(*subject(OTHERS[name], "bf16+8"), range(2))
    assert not any(in_small_parts)


def test_parameters_that_are_not_contiguous_are_not_cut(in_small_parts):
    model = nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(backend="own", **ALL), model)
    model(torch.randn(2, 32, 4, 4)).sum().backward()
    optimizer.step()
    assert not any(in_small_parts)


def test_a_step_that_fails_in_a_part_leaves_no_stand_in(in_small_parts):
    model, optimizer = subject(ELEMENTWISE["AdamW"], "bf16+8", first_moment="fp8")
    run(model, optimizer, range(1))
    names = list(optimizer.state_dict()["state"])
    optimizer.param_groups[0]["betas"] = None  # fails in torch's own step
    with pytest.raises(TypeError):
        run(model, optimizer, range(1, 2))
    assert set(optimizer.state) <= set(model.parameters())
    assert list(optimizer.state_dict()["state"]) == names


def test_an_optimizer_without_state_gets_none(in_small_parts):
    model, optimizer = subject(lambda p: torch.optim.SGD(p, 0.1), "bf16+8")
    run(model, optimizer, range(2))
    assert any(in_small_parts)
    assert not optimizer.state


def test_sparse_gradients_are_not_cut(in_small_parts):
    table = nn.Embedding(100, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    apply_low_precision(table, optimizer, LowPrecision(format="bf16+8"))
    before = table.weight.detach().clone()
    table(torch.tensor([3, 5])).float().sum().backward()
    optimizer.step()
    assert not any(in_small_parts)
    assert (table.weight != before).any(1).nonzero().view(-1).tolist() == [3, 5]


MEANS = ("factored", "4bit-factored", "5bit-factored")


@pytest.mark.parametrize("gradients", ["keep", "into-state"])
@pytest.mark.parametrize("state_format", MEANS)
def test_means_of_rows_in_parts_are_those_of_the_whole(in_small_parts, monkeypatch, state_format, gradients):
    def means_after_steps(part_numel):
        monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", part_numel)
        weight = nn.Parameter(torch.zeros(21, 2, 32))  # parts of 8 rows, the last of 5
        optimizer = torch.optim.AdamW([weight])
        config = OptimizerState(**BY_NAME[state_format], gradients=gradients, **ALL)
        apply_optimizer_state(optimizer, config, nn.ParameterList([weight]))
        sizes = torch.linspace(0.1, 3, 21).view(-1, 1, 1)  # parts must not take their own mean for the whole's
        for step in range(3):
            noise = torch.randn(21, 2, 32, generator=torch.Generator().manual_seed(step))
            (weight * noise * sizes).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.state[weight]["exp_avg_sq"]

    whole, cut = means_after_steps(2**20), means_after_steps(PART)
    # Steps, parts; into the state in smaller parts, of 4 rows, for the moments and then for the weights.
    assert sum(in_small_parts) == (3 * 3 if gradients == "keep" else 3 * 6 * 2)
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


def test_rows_that_are_whole_blocks_only_in_more_than_a_part_are_not_cut(in_small_parts):
    run(*subject(ELEMENTWISE["AdamW"], second_moment="factored"), range(2))  # of 47 values: 256 of them
    assert not any(in_small_parts)


def rows_of_32(state_format, precision=None, gradients="keep"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 21, 2), nn.Flatten(), nn.Linear(21, 7))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = OptimizerState(**BY_NAME[state_format], gradients=gradients, **ALL)
    applied = apply_optimizer_state(optimizer, config, model)
    if precision is not None:
        apply_low_precision(model, optimizer, LowPrecision(format=precision))
    return model, optimizer, applied


def train_rows(model, optimizer, steps):
    dtype = model[0].weight.dtype
    for step in steps:
        x = torch.randn(4, 8, 2, 2, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("gradients", ["keep", "release", "into-state"])
@pytest.mark.parametrize("precision", [None, "bf16-sr", "bf16+8"])
@pytest.mark.parametrize("state_format", MEANS)
def test_means_in_parts_resume_to_the_bit(in_small_parts, state_format, precision, gradients):
    model, optimizer, _ = rows_of_32(state_format, precision, gradients)
    train_rows(model, optimizer, range(3))
    assert any(in_small_parts)
    again, other, _ = rows_of_32(state_format, precision, gradients)
    again.load_state_dict(through_disk(model.state_dict()))
    other.load_state_dict(through_disk(optimizer.state_dict()))
    assert torch.equal(train_rows(model, optimizer, range(3, 5)), train_rows(again, other, range(3, 5)))


@pytest.mark.parametrize("state_format", ["8bit", *MEANS])
def test_a_step_that_ends_after_some_parts_leaves_state_that_goes_on(in_small_parts, monkeypatch, state_format):
    model, optimizer, _ = rows_of_32(state_format)
    weight = model[0].weight
    plain_step, num_steps = torch.optim.AdamW.step, 0

    def interrupted(self, closure=None):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            raise KeyboardInterrupt
        return plain_step.__wrapped__(self, closure)

    for first in (0, 1):  # without state, and with
        num_steps = 0
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_rows(model, optimizer, range(first, first + 1))
        optimizer.zero_grad()
        assert set(optimizer.state) <= set(model.parameters())
        state = optimizer.state.get(weight, {})
        assert all(leaf.isfinite().all() for leaf in tree_leaves(state) if leaf.is_floating_point())
        if state and state_format in MEANS:
            assert (state["exp_avg_sq"].rows > 0).all()
        before = weight.detach().clone()
        train_rows(model, optimizer, range(10 + first, 11 + first))
        assert (weight - before).abs().max() < 0.1  # ten times the learning rate


FORMATS = ("8bit", "4bit", "fp8")


@pytest.mark.parametrize(
    ("state_format", "precision"), [("8bit", "fp16-scaled"), *((f, p) for f in FORMATS for p in (None, "bf16-sr"))]
)
def test_codes_in_parts_are_of_the_same_size_and_resume_to_the_bit(in_small_parts, state_format, precision):
    settings = {**BY_NAME[state_format], "backend": "own" if state_format == "8bit" else "auto"}
    make = ELEMENTWISE["AdamW"]
    model, optimizer = subject(make, precision, **settings)
    run(model, optimizer, range(3))
    assert any(in_small_parts)
    plain_model, plain = subject(make)
    estimate = estimate_optimizer_state(plain, OptimizerState(**(ALL | settings)), plain_model)
    held = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if leaf.dim()]
    assert sum(leaf.nbytes for leaf in held) == estimate
    again, other = subject(make, precision, **settings)
    again.load_state_dict(through_disk(model.state_dict()))
    other.load_state_dict(through_disk(optimizer.state_dict()))
    assert torch.equal(run(model, optimizer, range(3, 5)), run(again, other, range(3, 5)))


@pytest.mark.parametrize("state_format", ["8bit", "4bit", "fp8"])
def test_noise_of_parts_differs(in_small_parts, state_format):
    values = nn.Parameter(torch.zeros(2 * PART))
    optimizer = torch.optim.AdamW([values])
    config = OptimizerState(**BY_NAME[state_format], backend="own" if state_format == "8bit" else "auto", **ALL)
    apply_optimizer_state(optimizer, config, nn.ParameterList([values]))
    values.grad = torch.randn(PART).repeat(2)
    optimizer.step()
    codes = optimizer.state[values]["exp_avg"].codes
    first, second = codes.view(2, -1)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("state_format", ["8bit", *MEANS])
@pytest.mark.parametrize(("precision", "bytes_per_element"), [(None, 16), ("bf16-sr", 24)])
def test_temporaries_are_those_of_one_part_however_large_the_parameter(
    monkeypatch, precision, bytes_per_element, state_format
):
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", 2**14)

    def temporaries(num_parts):
        model = nn.Linear(128, 128 * num_parts, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        apply_optimizer_state(optimizer, OptimizerState(**BY_NAME[state_format], **ALL), model)
        if precision is not None:
            apply_low_precision(model, optimizer, LowPrecision(format=precision))
        for _ in range(2):
            model.weight.grad = torch.randn_like(model.weight)
            with Ledger().watching(model, [optimizer]) as ledger:
                optimizer.step()
        return ledger.measurement.peak_bytes - ledger.measurement.held_bytes

    if state_format == "8bit" and native.library() is not None:
        bytes_per_element = 0  # one kernel does all of it
    counts = 0 if state_format in MEANS else 8  # the parameter's own and the part's; they go before means are made
    for num_parts in (2, 5):
        # Means: the new ones of all rows, beside the old; of columns the new ones, and a part's old and new.
        means = 4 * 128 * num_parts + 5 * 4 * 128 if state_format in MEANS else 0
        assert temporaries(num_parts) == bytes_per_element * 2**14 + counts + means
