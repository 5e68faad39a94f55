"""Steps on coded moments in one kernel, beside the general way: decode, torch's own step, encode."""

from __future__ import annotations

import copy
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import (
    Ledger,
    LowPrecision,
    MemSave,
    OptimizerState,
    apply_low_precision,
    apply_optimizer_state,
    predict,
)
from lightning_memsave.numerics.kernels import native
from lightning_memsave.techniques.optimizer_state import quantized
from lightning_memsave.techniques.optimizer_state.moment_codecs import QuantizedMoment
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS
from lightning_memsave.torch_internals import optimizer_class

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

MULTIPLIES_AND_ADDS_AT_ONCE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
SHAPES = [(300, 17), (256,), (1,), (5, 3, 7), (64, 64), (1000,)]
RULES = {
    "AdamW": lambda p: torch.optim.AdamW(p, 3e-3, betas=(0.8, 0.95), weight_decay=0.1),
    "AdamW, no decay": lambda p: torch.optim.AdamW(p, 3e-3, eps=1e-3, weight_decay=0.0),
    "Adam": lambda p: torch.optim.Adam(p, 3e-3, weight_decay=0.05),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SGD, nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    "SGD, dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
}


def subject(make, state_format="8bit", shapes=SHAPES, **settings):
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
    optimizer = make(model.parameters())
    settings = {"min_size": 0, **FORMATS[state_format], **settings}
    apply_optimizer_state(optimizer, OptimizerState(**(settings | {"first_moment": state_format[:4]})), model)
    return model, optimizer


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model:
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** torch.randint(-6, 2, (), generator=generator)


def generally(optimizer, monkeypatch):
    """Step the general way."""
    with monkeypatch.context() as patch:
        patch.setattr(quantized, "step_fused", lambda optimizer, memory, group, parameters, *_: list(parameters))
        optimizer.step()


@pytest.fixture
def calls(monkeypatch):
    """The numbers of parts that the kernel is given."""
    found = []
    run = native.run

    def noted(name, *arguments, num_units, per_unit):
        if name == "step_parts":
            found.append(num_units)
        return run(name, *arguments, num_units=num_units, per_unit=per_unit)

    monkeypatch.setattr(native, "run", noted)
    return found


def moments_of(optimizer, p):
    return [each for each in optimizer.state[p].values() if isinstance(each, QuantizedMoment)]


@pytest.mark.skipif(not MULTIPLIES_AND_ADDS_AT_ONCE, reason="torch's kernels round otherwise on this processor")
@pytest.mark.parametrize("state_format", ["8bit", "4bit", "fp8"])
@pytest.mark.parametrize("rule", RULES)
def test_codes_equal_those_of_the_general_way_to_the_bit(rule, state_format, monkeypatch, calls):
    (fused, one), (general, other) = (subject(RULES[rule], state_format) for _ in range(2))
    for step in range(6):
        give_gradients(fused, step)
        give_gradients(general, step)
        one.step()
        generally(other, monkeypatch)
        for p, expected in zip(fused, general, strict=True):
            for found, reference in zip(moments_of(one, p), moments_of(other, expected), strict=True):
                assert torch.equal(found.codes, reference.codes)
                assert torch.equal(found.absmax, reference.absmax)
            if "SGD" in rule:
                assert torch.equal(p, expected)
            # torch's square root may be off by a unit in the last place, which moves a step by as much of itself
            longest_step = 3e-3 * 60
            difference = (p - expected).detach().abs().max()
            assert float(difference) <= longest_step * 2**-22 + float(expected.detach().abs().max()) * 2**-23
            p.data.copy_(expected)
    assert calls == [len(SHAPES)] * 5  # the first step makes the state


@pytest.mark.parametrize("rule", ["AdamW", "SGD, nesterov"])
def test_it_follows_the_rule_in_float64(rule):
    model, optimizer = subject(RULES[rule], "8bit")
    give_gradients(model, 0)
    optimizer.step()
    for step in (1, 2, 3):
        give_gradients(model, step)
        plain = RULES[rule]([nn.Parameter(p.detach().double()) for p in model])
        for p, reference in zip(model, plain.param_groups[0]["params"], strict=True):
            state = optimizer.state[p]
            names = [name for name, value in state.items() if isinstance(value, QuantizedMoment)]
            decoded = {name: quantized._decoded(quantized.memory_of(optimizer), name, state[name], p) for name in names}
            plain.state[reference] = {name: value.double() for name, value in decoded.items()}
            if "step" in state:
                plain.state[reference]["step"] = state["step"].clone()
            reference.grad = p.grad.double()
        plain.step()
        optimizer.step()
        for p, reference in zip(model, plain.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(p.double(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", [512, 2**20])
def test_parts_are_divided_among_threads(part, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(native, "_MIN_PER_THREAD", 256)
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", part)
    divided = []
    pool = native._pool
    monkeypatch.setattr(native, "_pool", lambda wanted: divided.append(wanted) or pool(wanted))
    try:
        found = []
        for threads in (4, 1):
            torch.set_num_threads(threads)
            model, optimizer = subject(RULES["AdamW"], shapes=[*SHAPES, (16, 16), (300,), (40, 20)])
            for step in range(3):
                give_gradients(model, step)
                optimizer.step()
            found.append(torch.cat([p.detach().view(-1) for p in model]))
            assert (max(divided, default=1) > 1) == (threads > 1)
            divided.clear()
    finally:
        torch.set_num_threads(before)
        pool.cache_clear()
    assert torch.equal(*found)


def test_a_step_needs_no_memory_but_a_count_of_steps_of_a_part(monkeypatch):
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", 2**14)
    for shape, expected in (((128, 128), 0), ((128, 256), 8)):  # in one part: none; in two: the counts of a part
        model, optimizer = subject(RULES["AdamW"], shapes=[shape])
        for step in range(2):
            give_gradients(model, step)
            with Ledger().watching(model, [optimizer]) as ledger:
                optimizer.step()
        assert ledger.measurement.peak_bytes - ledger.measurement.held_bytes == expected


def strided(p):
    p.grad = torch.randn(*p.shape[:-1], 2 * p.shape[-1])[..., ::2]


def negated(p):
    p.grad = torch.complex(torch.zeros(p.shape), torch.randn(p.shape)).conj().imag  # with torch's negative bit
    assert p.grad.is_neg()


def of_16_bits(p):
    p.grad = None
    p.grad_dtype = torch.bfloat16
    p.grad = torch.randn(p.shape).bfloat16()


@pytest.mark.parametrize(
    ("make", "spoil"),
    [
        (lambda p: torch.optim.AdamW(p, maximize=True), None),
        (lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)), None),
        (lambda p: torch.optim.AdamW(p, betas=(0.4, 0.9)), None),
        (lambda p: torch.optim.AdamW(p, fused=True), None),
        (lambda p: torch.optim.NAdam(p), None),
        (lambda p: type("SGD", (torch.optim.SGD,), {})(p, 0.1, momentum=0.9), None),
        (RULES["AdamW"], strided),
        (RULES["AdamW"], negated),
        (RULES["SGD"], of_16_bits),
    ],
    ids=["maximize", "tensor lr", "betas", "fused", "NAdam", "subclass", "strided", "negative bit", "16-bit gradient"],
)
def test_what_the_kernel_does_not_know_goes_the_general_way(make, spoil, monkeypatch, calls):
    found = [subject(make, shapes=[(64, 64)]) for _ in range(2)]
    for step in range(3):
        for model, _ in found:
            torch.manual_seed(step)
            if spoil is None:
                give_gradients(model, step)
            else:
                spoil(model[0])
        found[0][1].step()
        generally(found[1][1], monkeypatch)
    assert torch.equal(found[0][0][0], found[1][0][0])
    assert calls == []


def test_another_step_in_the_place_of_torchs_is_called(monkeypatch, calls):
    plain, called = torch.optim.AdamW.step, []

    def step(self, closure=None):
        called.append(len(self.param_groups[0]["params"]))
        return plain(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    model, optimizer = subject(RULES["AdamW"])
    for number in range(2):
        give_gradients(model, number)
        optimizer.step()
    assert called == [1] * len(SHAPES) * 2
    assert calls == []


def test_a_graph_of_weights_that_have_stepped_since_raises_as_in_torch():
    model, optimizer = subject(RULES["AdamW"], shapes=[(8, 8)])
    give_gradients(model, 0)
    optimizer.step()
    give_gradients(model, 1)
    x = torch.randn(8, 8, requires_grad=True)
    loss = (x @ model[0]).square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_call_for_all_parameters_of_a_group_and_a_rule_for_each_count_of_steps(calls):
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(40))
    optimizer = torch.optim.AdamW([{"params": list(model)[:25]}, {"params": list(model)[25:], "lr": 1e-2}])
    apply_optimizer_state(optimizer, OptimizerState(first_moment="8bit", min_size=0), model)
    expected = copy.deepcopy(model), None
    plain = torch.optim.AdamW([{"params": list(expected[0])[:25]}, {"params": list(expected[0])[25:], "lr": 1e-2}])
    for step in range(4):
        for each in (model, expected[0]):
            give_gradients(each, step)
            each[3].grad = None if step % 2 else each[3].grad  # it steps half as often as the others
        optimizer.step()
        plain.step()
    assert calls == [24, 15, 25, 15, 24, 15]
    counts = {float(optimizer.state[p]["step"]) for p in model}
    assert counts == {2.0, 4.0}
    for p, reference in zip(model, expected[0], strict=True):
        torch.testing.assert_close(p, reference, rtol=0, atol=4e-3)  # 8 bits are close, not equal


def test_parameters_whose_state_stays_float32_step_together_and_as_in_torch(monkeypatch):
    called = []
    together = quantized.step_together

    def noted(step, optimizer, group, parameters):
        called.append(len(parameters))
        together(step, optimizer, group, parameters)

    monkeypatch.setattr(quantized, "step_together", noted)
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", 600)
    shapes = [(300,), (256,), (44,), (500,), (599,), (64, 64)]
    model, optimizer = subject(RULES["AdamW"], shapes=shapes, min_size=4096)
    reference, _ = subject(RULES["AdamW"], shapes=shapes)
    plain = RULES["AdamW"](reference.parameters())
    for step in range(3):
        give_gradients(model, step)
        give_gradients(reference, step)
        optimizer.step()
        plain.step()
    assert called == [3, 1, 1] * 3  # never more than 600 elements
    assert all(torch.equal(a, b) for a, b in list(zip(model, reference, strict=True))[:-1])


@pytest.mark.skipif(not MULTIPLIES_AND_ADDS_AT_ONCE, reason="torch's kernels round otherwise on this processor")
@pytest.mark.parametrize("precision", ["bf16-sr", "bf16+8"])
@pytest.mark.parametrize("rule", ["AdamW", "SGD, nesterov"])
def test_16_bit_weights_step_in_the_same_kernel(rule, precision, monkeypatch, calls):
    found = []
    for _ in range(2):
        model, optimizer = subject(RULES[rule])
        applied = apply_low_precision(model, optimizer, LowPrecision(format=precision))
        found.append((model, optimizer, applied))
    for step in range(6):
        for model, _, _ in found:
            give_gradients_of_16_bits(model, step)
        found[0][1].step()
        generally(found[1][1], monkeypatch)
        for p, expected in zip(*(model for model, _, _ in found), strict=True):
            assert p.dtype == torch.bfloat16
            for one, other in zip(moments_of(found[0][1], p), moments_of(found[1][1], expected), strict=True):
                assert torch.equal(one.codes, other.codes)
    assert calls == [len(SHAPES)] * 5
    for _, _, applied in found:
        applied.undo()
    for p, expected in zip(*(model for model, _, _ in found), strict=True):
        if "SGD" in rule:
            assert torch.equal(p, expected)
        else:  # a square root may be off by a unit in the last place, and a rounding go the other way
            assert float((p != expected).float().mean()) < 0.02
            torch.testing.assert_close(p, expected, rtol=2**-6, atol=1e-5)


def give_gradients_of_16_bits(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()


@pytest.mark.parametrize("precision", ["bf16-sr", "bf16+8"])
def test_16_bit_weights_that_are_not_finite_stay_so(precision):
    model, optimizer = subject(RULES["SGD"], shapes=[(600,)])
    apply_low_precision(model, optimizer, LowPrecision(format=precision))
    for step in range(3):
        give_gradients_of_16_bits(model, step)
        if step == 1:
            model[0].grad[7], model[0].grad[300] = float("nan"), float("inf")
        optimizer.step()
    assert not model[0].isfinite()[7]
    assert not model[0].isfinite()[300]
    assert model[0].isfinite()[512:].all()  # another block


@pytest.mark.parametrize("precision", ["bf16-sr", "bf16+8"])
def test_parameters_of_another_dtype_step_beside_short_ones(precision):
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32).double())])
    model.append(nn.Parameter(torch.randn(32, 32, dtype=torch.complex64)))
    optimizer = RULES["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, OptimizerState(min_size=0), model)
    apply_low_precision(model, optimizer, LowPrecision(format=precision))
    before = [p.detach().clone() for p in model]
    for _ in range(2):
        for p in model:
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model, before, strict=True))


def test_momentum_that_is_off_for_a_step_leaves_the_buffer(monkeypatch):
    found = [subject(RULES["SGD"]) for _ in range(2)]
    for step, momentum in enumerate((0.9, 0.9, 0.0, 0.9)):
        for (model, optimizer), take in zip(found, (optimizer_step, generally), strict=True):
            optimizer.param_groups[0]["momentum"] = momentum
            give_gradients(model, step)
            take(optimizer, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))


def optimizer_step(optimizer, monkeypatch):
    optimizer.step()


@pytest.mark.parametrize("spoil", ["larger weights", "shorter scales"])
def test_memory_of_another_size_is_never_read(spoil, calls):
    model, optimizer = subject(RULES["AdamW"], shapes=[(64, 64)])
    give_gradients(model, 0)
    optimizer.step()
    give_gradients(model, 1)
    if spoil == "larger weights":
        model[0].data, model[0].grad = torch.randn(512, 64), torch.randn(512, 64)
    else:
        moment = optimizer.state[model[0]]["exp_avg"]
        optimizer.state[model[0]]["exp_avg"] = moment._replace(absmax=moment.absmax[:3])
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.step()
    assert calls == []


def test_a_parameter_that_stands_twice_in_a_group_steps_as_in_torch(calls):
    p = nn.Parameter(torch.randn(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW([p, p])
    apply_optimizer_state(optimizer, OptimizerState(min_size=0), nn.ParameterList([p]))
    for _ in range(3):
        p.grad = torch.randn(16, 16)
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 6
    assert all(each == 1 for each in calls)


@pytest.mark.parametrize("precision", [None, "bf16-sr", "bf16+8"])
@pytest.mark.parametrize("settings", [{}, {"first_moment": "4bit"}, {"gradients": "release"}])
@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_a_prediction_is_what_is_measured_where_the_step_is_the_peak(rule, settings, precision):
    class Wide(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(256, 500), nn.Tanh(), nn.Linear(500, 256))

        def training_step(self, batch):
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self):
            return RULES[rule](self.parameters())

    slots = {"optimizer_state": OptimizerState(**settings), "precision": precision or False}
    batch = (torch.randn(2, 256),)
    predicted = predict(Wide(), batch, MemSave(**slots)).peak_bytes
    memsave = MemSave(**slots, summary=False)
    trainer = L.Trainer(
        callbacks=[memsave], max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(8, 256)), batch_size=2))
    assert predicted == memsave.report.peak_bytes
