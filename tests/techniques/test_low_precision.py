from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import Ledger, LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from lightning_memsave.techniques.low_precision import Weights, estimate_low_precision
from tests.contracts.spec import Spec

SPEC = Spec(config=LowPrecision(), loss_class="changed", trainer_precision="32-true", tips_by=3e-2, shrinks="weights")
FORMATS = ("bf16-sr", "bf16+8", "bf16-kahan")
ERRORS = {"bf16-sr": 2.0**-7, "bf16+8": 2.0**-15, "bf16-kahan": 2.0**-17}  # of a weight, by one rounding
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
    return model, optimizer, apply_low_precision(model, optimizer, LowPrecision(format=weight_format, **settings))


def give_gradients(model, step):
    """Numbers that bfloat16 holds, so that each format sees the same."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def run(model, optimizer, steps):
    for step in steps:
        give_gradients(model, step)
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
    assert model[0].weight.dtype == model[3].bias.dtype == torch.bfloat16
    assert model[1].weight.dtype == torch.float32
    tensors = [v for v in ours.state[model[0].weight].values() if torch.is_tensor(v) and v.is_floating_point()]
    assert {v.dtype for v in tensors} <= {torch.float32}
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
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(weight_format)):
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
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
    assert sizes == [2, 3, 4]


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
    assert dtypes == ({torch.float32, torch.bfloat16} if weight_format == "bf16-sr" else {torch.float32})
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
        assert {p.dtype for p in second.parameters()} == {torch.bfloat16, torch.float32}
        straight, copied = copy.deepcopy((model, optimizer))
        run(straight, copied, range(4, 8))
        run(second, resumed, range(4, 8))
        assert torch.equal(whole(straight), whole(second))
        assert all(torch.equal(a, b) for a, b in zip(straight.buffers(), second.buffers(), strict=True))


@pytest.mark.parametrize("weight_format", FORMATS[1:])
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
    apply_low_precision(model, ours, LowPrecision(format=weight_format))
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
        p.grad = torch.ones_like(p) if p.requires_grad else None
    before = model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    optimizer.step()
    after = model.state_dict()
    assert torch.equal(after["a.weight"], after["b.weight"])
    assert model["c"].weight.is_contiguous(memory_format=torch.channels_last)
    for name in ("a.weight", "c.weight"):
        step = (before[name].float() - after[name].float()).mean()
        assert step == pytest.approx(1e-3, rel=0.3)
    assert ((after["f.weight"].float() - frozen).abs() <= 2**-8 * frozen.abs()).all()
    assert torch.equal(after["f.weight"], before["f.weight"])


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


@pytest.mark.parametrize("settings", [{"format": "fp16"}, {"seed": -1}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=r"`precision` must be one of 'bf16-sr'|LowPrecision.seed"):
        LowPrecision(**settings)


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
