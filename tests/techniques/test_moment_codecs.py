"""4-bit optimizer state: the same optimizer, with moments that are codes between its steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_memsave import Ledger, LowPrecision, apply_low_precision
from lightning_memsave.core.errors import NoEffectWarning
from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state, estimate_optimizer_state
from lightning_memsave.techniques.optimizer_state.moment_codecs import QuantizedMoment
from lightning_memsave.techniques.optimizer_state.moment_names import KNOWN

from .optimizer_state_subjects import PLAIN, Lion, big_model, flat, run_steps, set_gradients, through_disk

CONFIG = OptimizerState(first_moment="4bit")
ALL = OptimizerState(first_moment="4bit", min_size=0, keep_embeddings_32bit=False, keep_norms_32bit=False)
OPTIMIZERS = {
    "AdamW": PLAIN["AdamW"],
    "Adam": lambda p, **kw: torch.optim.Adam(p, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "NAdam": lambda p, **kw: torch.optim.NAdam(p, **{"lr": 1e-2, **kw}),
    "RAdam": lambda p, **kw: torch.optim.RAdam(p, **{"lr": 1e-2, **kw}),
    "SGD": lambda p, **kw: torch.optim.SGD(p, **{"lr": 0.1, "momentum": 0.9, "nesterov": True, **kw}),
    "Lion": PLAIN["Lion"],
    "RMSprop": lambda p, **kw: torch.optim.RMSprop(p, **{"lr": 1e-3, "momentum": 0.5, **kw}),
    "Adagrad": PLAIN["Adagrad"],
    "Adamax": lambda p, **kw: torch.optim.Adamax(p, **{"lr": 1e-2, **kw}),
    "Adadelta": lambda p, **kw: torch.optim.Adadelta(p, **{"lr": 1.0, **kw}),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def changed(name, model=None, config=ALL, **settings):
    model = big_model() if model is None else model
    optimizer = OPTIMIZERS[name](model.parameters(), **settings)
    return model, optimizer, apply_optimizer_state(optimizer, config, model)


def state_bytes(optimizer):
    steps = ("step", "mu_product", "eta")
    moments = (v for state in optimizer.state.values() for k, v in state.items() if k not in steps)
    return sum(sum(t.nbytes for t in v) if isinstance(v, QuantizedMoment) else v.nbytes for v in moments)


def assert_same(model, optimizer, other_model, other):
    assert torch.equal(flat(model), flat(other_model))
    first, second = optimizer.state_dict(), other.state_dict()
    for number, state in first["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second["state"][number][name])), name


def test_every_known_optimizer_is_tested():
    assert set(OPTIMIZERS) == set(KNOWN) - {"Muon", "Rprop"}  # matrices alone, and no 4 bits: `test_moment_names.py`


@every_optimizer
def test_it_goes_where_the_plain_optimizer_goes(name):
    model = big_model()
    second = copy.deepcopy(model)
    plain = OPTIMIZERS[name](model.parameters())
    _, ours, _ = changed(name, second)
    start = flat(model)
    expected, found = run_steps(model, plain, range(20)) - start, run_steps(second, ours, range(20)) - start
    error = (found - expected)[-1].norm() / expected[-1].norm()
    assert 0 < error < 0.4


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_another_dtype(name, dtype):
    model = big_model(dtype)
    before = flat(model)
    _, optimizer, applied = changed(name, model)
    run_steps(model, optimizer, range(3))
    saved = through_disk(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    run_steps(model, optimizer, range(3, 5))
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert flat(model).isfinite().all()
    assert not torch.equal(flat(model), before)
    applied.undo()
    run_steps(model, optimizer, range(5, 7))


@every_optimizer
def test_bytes_equal_the_estimate(name):
    model = big_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    estimate = estimate_optimizer_state(optimizer, CONFIG, model)
    apply_optimizer_state(optimizer, CONFIG, model)
    run_steps(model, optimizer, range(2))
    assert state_bytes(optimizer) == estimate
    coded = [isinstance(optimizer.state[p][KNOWN[name][0]], QuantizedMoment) for p in model.parameters()]
    assert coded == [True, False, False, False]


def test_bytes_per_parameter_of_the_docstring():
    model = nn.Linear(1024, 1024, bias=False)
    for name, expected in (("AdamW", 1.03125), ("SGD", 0.515625)):
        assert estimate_optimizer_state(OPTIMIZERS[name](model.parameters()), CONFIG, model) / 1024**2 == expected


def test_the_transient_is_of_one_parameter():
    def transient(num_layers):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(num_layers)))
        _, optimizer, _ = changed("AdamW", model)
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            with Ledger().watching(model, [optimizer]) as ledger:
                optimizer.step()
        return ledger.measurement.peak_bytes - ledger.measurement.held_bytes

    assert transient(2) == transient(8)


def test_a_moment_without_gradient_decays():
    model = nn.Linear(256, 64, bias=False)
    _, optimizer, _ = changed("SGD", model)
    for step in range(60):
        model.weight.grad = torch.ones_like(model.weight)
        if step >= 10:
            model.weight.grad[:, ::2] = 0
        optimizer.step()
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert momentum[:, 1::2].mean() == pytest.approx(10 * (1 - 0.9**60), rel=0.01)
    assert momentum[:, ::2].mean() < 0.1  # to the nearest it would stay where the next code is out of reach


def test_a_second_moment_follows():
    model = nn.Linear(256, 64, bias=False)
    _, optimizer, _ = changed("AdamW", model)
    for step in range(400):
        model.weight.grad = torch.ones_like(model.weight)
        if step < 50:
            model.weight.grad[:, ::2] = 0.3
        optimizer.step()
    second = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    expected = 0.09 * (1 - 0.999**50) * 0.999**350 + (1 - 0.999**350)
    # Codes are 0.067 apart there. Noise that is spread evenly over steps leaves a part of that, always the same way.
    assert second[:, ::2].mean() == pytest.approx(expected, abs=0.067 / 4)


# ------------------------------------------------------------------------------- checkpoints
@every_optimizer
@pytest.mark.parametrize("lowered", [False, True])
def test_a_checkpoint_continues_bit_for_bit(name, lowered):
    def build(model):
        _, optimizer, _ = changed(name, model, lr=0.01)
        if lowered:
            apply_low_precision(model, optimizer, LowPrecision(format="bf16+8"))
        return optimizer

    model = big_model()
    optimizer = build(model)
    run_steps(model, optimizer, range(4))
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    second = big_model()
    second.load_state_dict(saved[0])
    resumed = build(second)
    resumed.load_state_dict(saved[1])
    assert any(isinstance(v, QuantizedMoment) for state in resumed.state.values() for v in state.values())
    run_steps(model, optimizer, range(4, 8))
    run_steps(second, resumed, range(4, 8))
    assert_same(model, optimizer, second, resumed)


@every_optimizer
def test_checkpoints_load_into_the_plain_optimizer_and_back(name):
    model, optimizer, _ = changed(name)
    run_steps(model, optimizer, range(4))
    plain_model = copy.deepcopy(model)
    plain = OPTIMIZERS[name](plain_model.parameters())
    plain.load_state_dict(through_disk(optimizer.state_dict()))
    saved = plain.state_dict()
    assert {k for state in saved["state"].values() for k in state} >= set(KNOWN[name])
    assert all(v.dtype == torch.float32 for s in saved["state"].values() for v in s.values() if torch.is_tensor(v))
    back_model, back, _ = changed(name, copy.deepcopy(model))
    back.load_state_dict(through_disk(saved))
    first, second = optimizer.state_dict()["state"], back.state_dict()["state"]
    assert all(torch.equal(first[n][m], second[n][m]) for n in first for m in KNOWN[name])
    run_steps(plain_model, plain, range(4, 9))
    run_steps(back_model, back, range(4, 9))
    assert flat(back_model).isfinite().all()
    assert (flat(back_model) - flat(plain_model)).norm() < 0.4 * (flat(plain_model) - flat(model)).norm()


def test_between_4_and_8_bits():
    model, optimizer, _ = changed("AdamW")
    run_steps(model, optimizer, range(4))
    from lightning_memsave.techniques.optimizer_state import from_plain, to_plain

    other_model = copy.deepcopy(model)
    other = PLAIN["AdamW"](other_model.parameters())
    apply_optimizer_state(other, OptimizerState(backend="bitsandbytes"), other_model)
    from_plain(other, through_disk(optimizer.state_dict()))
    run_steps(other_model, other, range(4, 6))
    optimizer.load_state_dict(through_disk(to_plain(other)))
    run_steps(model, optimizer, range(6, 8))
    assert flat(model).isfinite().all()


# ------------------------------------------------------------------------------- the same object
@every_optimizer
def test_undo_and_schedulers(name):
    model = big_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
    attributes, plain_class = set(vars(optimizer)), type(optimizer)
    applied = apply_optimizer_state(optimizer, ALL, model)
    assert applied.loss_class == "changed"
    assert "4-bit state for 4 of 4" in applied.summary
    for step in range(3):
        run_steps(model, optimizer, [step])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(scheduler.get_last_lr()[0])
    applied.undo()
    applied.undo()
    assert type(optimizer) is plain_class
    assert set(vars(optimizer)) - {"_opt_called"} == attributes - {"_opt_called"}
    assert not any(isinstance(v, QuantizedMoment) for state in optimizer.state.values() for v in state.values())
    run_steps(model, optimizer, range(3, 5))


@every_optimizer
def test_copies_are_independent(name):
    model, optimizer, _ = changed(name)
    run_steps(model, optimizer, range(3))
    second, copied = copy.deepcopy((model, optimizer))
    before = flat(model)
    run_steps(second, copied, range(3, 5))
    assert torch.equal(flat(model), before)
    run_steps(model, optimizer, range(3, 5))
    assert_same(model, optimizer, second, copied)


def test_the_global_generator_is_left_alone():
    model, optimizer, _ = changed("AdamW")
    set_gradients(model, 0)
    before = torch.get_rng_state()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


def test_apply_in_the_middle_codes_what_is_there():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    run_steps(model, optimizer, range(3))
    exact = {p: dict(state) for p, state in optimizer.state.items()}
    apply_optimizer_state(optimizer, ALL, model)
    for number, p in enumerate(model.parameters()):
        found = optimizer.state_dict()["state"][number]["exp_avg"]
        assert (found - exact[p]["exp_avg"]).norm() < 0.3 * exact[p]["exp_avg"].norm()


def test_twice_warns():
    model, optimizer, _ = changed("AdamW")
    with pytest.warns(NoEffectWarning, match="low-bit optimizer already"):
        apply_optimizer_state(optimizer, ALL, model)


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda p: torch.optim.RMSprop(p, centered=True), "centered"),
        (lambda p: torch.optim.SGD(p, 0.1), "momentum"),
        (lambda p: torch.optim.Adafactor(p), "keeps something for each parameter in its shape"),
        (lambda p: torch.optim.LBFGS(p), "steps each parameter by itself"),
    ],
)
def test_what_cannot_be_kept_is_refused(build, word):
    model = big_model()
    optimizer = build(list(model.parameters()))
    plain_class = type(optimizer)
    with pytest.raises(ValueError, match=word):
        apply_optimizer_state(optimizer, CONFIG, model)
    assert type(optimizer) is plain_class


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(100, 64, sparse=True))
    with pytest.raises(ValueError, match=r"sparse gradients.*0\.sparse=True"):
        apply_optimizer_state(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), CONFIG, model)


def test_lion_of_the_tests_is_known():
    assert Lion.__name__ in KNOWN
