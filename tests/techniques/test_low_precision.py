from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import Ledger, LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from lightning_memsave.techniques.low_precision import LossScaling, Weights, estimate_low_precision
from tests.contracts.spec import Spec

SPEC = Spec(config=LowPrecision(), loss_class="changed", trainer_precision="32-true", tips_by=3e-2, shrinks="weights")
FORMATS = ("bf16-sr", "bf16+8", "bf16-kahan", "fp16-scaled")
WITH_CORRECTION = ("bf16+8", "bf16-kahan")
# Of a weight, by one rounding.
ERRORS = {"bf16-sr": 2.0**-7, "bf16+8": 2.0**-15, "bf16-kahan": 2.0**-17, "fp16-scaled": 2.0**-10}
DTYPES = {name: torch.float16 if name == "fp16-scaled" else torch.bfloat16 for name in FORMATS}
every_format = pytest.mark.parametrize("weight_format", FORMATS)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
}


def network():
    return nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 8))


def lowered(weight_format="bf16-sr", optimizer="AdamW", model=None, **settings):
    model = network() if model is None else model
    optimizer = OPTIMIZERS[optimizer](list(model.parameters()))
    if weight_format == "fp16-scaled":
        settings = {"initial_scale": 2.0**8, **settings}
    return model, optimizer, apply_low_precision(model, optimizer, LowPrecision(format=weight_format, **settings))


def give_gradients(model, step, factor=1.0):
    """Numbers that bfloat16 and, small enough, float16 hold, so that each format sees the same."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator).bfloat16() * factor).to(p.dtype)


def factor_of(optimizer):
    """What gradients are multiplied with, as that of a scaled loss."""
    return float(optimizer.scale_loss(torch.ones(()))) if hasattr(optimizer, "scale_loss") else 1.0


def run(model, optimizer, steps):
    for step in steps:
        give_gradients(model, step, factor_of(optimizer))
        optimizer.step()


def whole(model):
    """The weights as `state_dict` writes them, in float32."""
    return torch.cat([value.float().flatten() for value in model.state_dict().values()])


def through_disk(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ------------------------------------------------------------------------------- the same steps
@pytest.mark.parametrize("name", OPTIMIZERS)
@every_format
def test_any_optimizer_steps_in_float32(weight_format, name):
    model = network()
    for p in model.parameters():
        p.data = p.data.bfloat16().float()  # so that both start from the same weights
    plain = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](list(plain.parameters()))
    _, ours, _ = lowered(weight_format, name, model)
    num_steps = 5
    run(plain, optimizer, range(num_steps))
    run(model, ours, range(num_steps))
    assert model[0].weight.dtype == model[3].bias.dtype == DTYPES[weight_format]
    assert model[1].weight.dtype == torch.float32
    tensors = [v for v in ours.state[model[0].weight].values() if torch.is_tensor(v) and v.is_floating_point()]
    is_short = weight_format == "fp16-scaled" and name == "SGD"
    assert {v.dtype for v in tensors} <= {torch.float16 if is_short else torch.float32}
    expected = whole(plain)
    error = (whole(model) - expected).abs()
    # Each step rounds once; the second term is for what weight decay and parameter scales make of such differences.
    assert (error <= 1.1 * num_steps * ERRORS[weight_format] * (expected.abs() + 0.02) + 1e-7).all(), error.max()


def loss_after(weight_format, lr=1e-4, num_steps=150):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    x = torch.randn(256, 32)
    y = torch.sin(x[:, :4] * 2)
    if weight_format == "plain bf16":
        model.bfloat16()
    elif weight_format:
        apply_low_precision(model, optimizer, LowPrecision(format=weight_format))
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPES.get(weight_format, torch.bfloat16), enabled=bool(weight_format)):
            loss = F.mse_loss(model(x).float(), y)
        (optimizer.scale_loss(loss) if weight_format in FORMATS else loss).backward()
        optimizer.step()
    return loss.item()


@pytest.fixture(scope="module")
def losses():
    return {name: loss_after(name) for name in (None, "plain bf16")}


def test_plain_bfloat16_stalls(losses):
    assert losses["plain bf16"] > 1.1 * losses[None]


@every_format
def test_it_trains_as_float32_where_plain_bfloat16_stalls(weight_format, losses):
    assert abs(loss_after(weight_format) / losses[None] - 1) < 0.01


# ------------------------------------------------------------------------------- stochastic rounding
def test_stochastic_rounding_of_the_step_is_unbiased():
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(2000).bfloat16().float())
    exact = p.detach().clone()
    gradient = torch.randn(2000).bfloat16()
    exact -= 1e-3 * gradient.float()
    start, num_draws, total = p.detach().clone(), 400, torch.zeros(2000, dtype=torch.float64)
    module = nn.ParameterList([p])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    apply_low_precision(module, optimizer, LowPrecision())
    for _ in range(num_draws):  # each step has its own noise
        with torch.no_grad():
            p.copy_(start)
        p.grad = gradient
        optimizer.step()
        total += p.detach().double()
    unit = 2.0 ** (exact.abs().log2().floor() - 7)  # bfloat16's spacing: a draw's deviation is at most half of it
    error = (total / num_draws - exact) / unit
    assert abs(float(error.mean())) < 4 * 0.5 / (num_draws * 2000) ** 0.5
    assert float(error.abs().max()) < 6 * 0.5 / num_draws**0.5
    assert float((start - exact).abs().mean() / unit.mean()) > 10 * 0.5 / (num_draws * 2000) ** 0.5  # it could fail


def test_noise_depends_on_seed_and_step_and_nothing_else():
    def after(seed, global_seed, num_steps=1):
        torch.manual_seed(0)
        model, optimizer, _ = lowered(seed=seed)
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        run(model, optimizer, range(num_steps))
        assert torch.equal(torch.get_rng_state(), before)
        return whole(model)

    assert torch.equal(after(0, 1), after(0, 2))
    assert not torch.equal(after(0, 1), after(1, 1))


def test_two_parameters_have_different_noise():
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    model[1].load_state_dict(model[0].state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    apply_low_precision(model, optimizer, LowPrecision())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(model[0].weight, model[1].weight)


def test_what_is_not_finite_is_seen():
    model, optimizer, _ = lowered()
    give_gradients(model, 0)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert model[0].weight[0, 0].isnan()
    assert model[0].weight.isnan().sum() == 1


# ------------------------------------------------------------------------------- bytes
@every_format
def test_bytes_equal_the_estimate(weight_format):
    model = network()
    estimate = estimate_low_precision(model, LowPrecision(format=weight_format))
    lowered(weight_format, model=model)
    assert sum(t.nbytes for t in (*model.parameters(), *model.buffers())) == estimate


def test_bytes_per_parameter_of_the_docstring():
    model = nn.Linear(100, 100)
    sizes = [estimate_low_precision(model, LowPrecision(format=f)) / 10_100 for f in FORMATS]
    assert sizes == [2, 3, 4, 2]


@every_format
def test_the_transient_is_of_one_parameter(weight_format):
    def transient(num_layers):
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(num_layers)))
        _, optimizer, _ = lowered(weight_format, "SGD", model)
        run(model, optimizer, range(2))
        give_gradients(model, 2)
        with Ledger().watching(model, [optimizer]) as ledger:
            optimizer.step()
        return ledger.measurement.peak_bytes - ledger.measurement.held_bytes

    assert transient(2) == transient(8) <= 28 * 128 * 128


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
    assert ((whole(plain) - whole(model)).abs() <= 3 * ERRORS[weight_format] * (whole(plain).abs() + 0.02)).all()


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
        assert resumed.state[second[0].weight]["exp_avg"].dtype == torch.float32
        assert {p.dtype for p in second.parameters()} == {DTYPES[weight_format], torch.float32}
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
    apply_low_precision(model, ours, LowPrecision(format=weight_format, initial_scale=2.0**8))
    run(model, ours, range(3))
    run(plain, reference, range(3))
    assert ours.state[model[0].weight]["state1"].dtype == torch.uint8
    assert ours.state[model[3].weight]["state1"].dtype == torch.float32
    error = (whole(model) - whole(plain)).abs()
    assert (error <= 4 * ERRORS[weight_format] * (whole(plain).abs() + 0.02) + 1e-7).all()


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
        p.grad = torch.ones_like(p) * factor_of(optimizer) if p.requires_grad else None
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


# ------------------------------------------------------------------------------- what stays float32
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), {"1.weight", "1.bias"}),
        ("3", {"1.weight", "1.bias", "3.weight", "3.bias"}),
        (nn.Linear, None),
        ([nn.LayerNorm], {"1.weight", "1.bias"}),
        (("Lin*",), None),
    ],
)
def test_modules_that_stay_float32(keep, kept):
    model = network()
    config = LowPrecision(keep_32bit=keep)
    assert hash(config) is not None
    if kept is None:
        with pytest.raises(ValueError, match="`precision` needs float32 parameters"):
            Weights(model, config.format, config.keep_32bit, 0)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return
    Weights(model, config.format, config.keep_32bit, 0)
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == kept


def test_a_selector_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"LowPrecision.keep_32bit. must match a module, got 'Conv\*'"):
        lowered(keep_32bit=("Conv*",))


@pytest.mark.parametrize(
    ("name", "value"), [("format", "fp16"), ("seed", -1), ("initial_scale", 0.0), ("growth_interval", 0)]
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=r"`precision` must be one of 'bf16-sr'|`LowPrecision." + name):
        LowPrecision(**{name: value})


def test_shorthands():
    assert LowPrecision.from_shorthand(True) == LowPrecision.from_shorthand("bf16-sr") == LowPrecision()
    assert LowPrecision.from_shorthand("bf16+8").format == "bf16+8"


def test_an_optimizer_of_all_parameters_is_refused_and_nothing_changed():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="`precision` needs an optimizer that steps each parameter by itself"):
        apply_low_precision(model, optimizer, LowPrecision(format="bf16+8"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert list(model.buffers()) == []


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_a_part_of_the_model_writes_and_reads_whole_weights_too(weight_format):
    model, optimizer, _ = lowered(weight_format)
    run(model, optimizer, range(3))
    part, everything = model[0].state_dict(), model.state_dict()
    assert part["weight"].dtype == torch.float32
    assert torch.equal(part["weight"], everything["0.weight"])
    second, _, _ = lowered(weight_format)
    second[0].load_state_dict(part)
    assert torch.equal(second.state_dict()["0.weight"], part["weight"])


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_tied_weights_are_whole_under_both_names(weight_format):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    _, optimizer, _ = lowered(weight_format, model=model)
    run(model, optimizer, range(3))
    saved = model.state_dict()
    assert torch.equal(saved["a.weight"], saved["b.weight"])
    assert torch.equal(model["b"].state_dict()["weight"], saved["a.weight"])
    assert not torch.equal(saved["a.weight"], saved["a.weight"].bfloat16().float())
    copied = copy.deepcopy(model)
    run(model, optimizer, range(3, 4))
    assert torch.equal(copied.state_dict()["b.weight"], saved["b.weight"])


# ------------------------------------------------------------------------------- frozen weights
@every_format
def test_frozen_weights_are_lowered_when_asked(weight_format):
    model = network()
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = LowPrecision(format=weight_format, lower_frozen=True)
    estimate = estimate_low_precision(model, config)
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    applied = apply_low_precision(model, optimizer, config)
    assert model[0].weight.dtype == DTYPES[weight_format]
    assert not model[0].weight.requires_grad
    assert sum(t.nbytes for t in (*model.parameters(), *model.buffers())) == estimate
    rounded = before["0.weight"].to(DTYPES[weight_format])
    assert torch.equal(model[0].weight, rounded)
    assert torch.equal(model.state_dict()["0.weight"], rounded)
    give_gradients(model[3], 0, factor_of(optimizer))
    optimizer.step()
    assert torch.equal(model[0].weight, rounded)
    assert model[0].weight not in optimizer.state
    applied.undo()
    assert torch.equal(model[0].weight, rounded.float())


@every_format
def test_a_lowered_weight_that_is_unfrozen_later_trains(weight_format):
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(4, 4)])
    model[0].requires_grad_(False)
    _, optimizer, _ = lowered(weight_format, "SGD", model, lower_frozen=True)
    model[0].requires_grad_(True)
    before = whole(model[0])
    for _ in range(50):  # each step below what 16 bits show
        model[0].weight.grad = torch.full((64, 64), 0.001).to(DTYPES[weight_format]) * factor_of(optimizer)
        optimizer.step()
    plain = torch.zeros(1, requires_grad=True)
    reference = OPTIMIZERS["SGD"]([plain])
    for _ in range(50):
        plain.grad = torch.full((1,), 0.001)
        reference.step()
    assert float((whole(model[0]) - before).mean()) == pytest.approx(plain.item(), rel=0.15)
    assert whole(model[0]).dtype == torch.float32


# ------------------------------------------------------------------------------- loss scaling
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
        torch.testing.assert_close(p.grad.float() / 2**8, q.grad, rtol=2e-3, atol=1e-7)
    scaling.clip_by_value(model.parameters(), 0.003)
    nn.utils.clip_grad_value_(plain.parameters(), 0.003)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.float() / 2**8, q.grad, rtol=2e-3, atol=1e-7)
    model[0].weight.grad[0, 0] = float("inf")
    scaling.clip_by_value(model.parameters(), 0.003)
    assert model[0].weight.grad[0, 0].isinf()


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


# ------------------------------------------------------------------------------- bfloat16 gradients of float32 weights
def backward(model, optimizer):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1)
    loss = model(torch.randn(16, 24, generator=generator)).square().mean()
    loss.backward()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16_gradients_are_the_rounded_ones(name):
    model = network()
    plain = copy.deepcopy(model)
    reference = OPTIMIZERS[name](list(plain.parameters()))
    _, optimizer, _ = lowered("bf16-gradients", name, model)
    is_norm = {p: False for p in plain.parameters()} | dict.fromkeys(plain[1].parameters(), True)
    for _ in range(3):
        backward(model, optimizer)
        backward(plain, reference)
        for p in plain.parameters():
            p.grad = p.grad if is_norm[p] else p.grad.bfloat16().float()
        assert model[0].weight.grad.dtype == torch.bfloat16
        assert model[1].weight.grad.dtype == torch.float32
        optimizer.step()
        reference.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_bytes_of_bfloat16_gradients():
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = LowPrecision(format="bf16-gradients")
    assert estimate_low_precision(model, config) == 4 * 40_000
    apply_low_precision(model, optimizer, config)
    x = torch.randn(1, 100)
    for _ in range(2):
        with Ledger().watching(model, [optimizer], x) as ledger:
            model(x).sum().backward()  # the second adds to the first
    assert sum(p.grad.nbytes for p in model.parameters()) == 2 * 40_000
    assert ledger.measurement.by_category["gradients"] == 2 * 40_000


def test_bfloat16_gradients_undone_and_resumed():
    model, optimizer, applied = lowered("bf16-gradients")
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
    second = network()
    second.load_state_dict(through_disk(model.state_dict()))
    _, resumed, _ = lowered("bf16-gradients", model=second)
    resumed.load_state_dict(through_disk(optimizer.state_dict()))
    for each, its in ((model, optimizer), (second, resumed)):
        backward(each, its)
        its.step()
    assert torch.equal(whole(model), whole(second))
    applied.undo()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    backward(model, optimizer)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    optimizer.step()


def test_bfloat16_gradients_have_no_frozen_weights_to_lower():
    with pytest.raises(
        ValueError, match=r"`LowPrecision.lower_frozen` needs a format of weights, got 'bf16-gradients'"
    ):
        LowPrecision(format="bf16-gradients", lower_frozen=True)
