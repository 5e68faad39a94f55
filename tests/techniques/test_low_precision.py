"""Low precision: the same steps in 16 bits, on average, in how many bytes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import Ledger, LowPrecision, apply_low_precision
from lightning_memsave.techniques.low_precision import estimate_low_precision
from tests.contracts.spec import Spec
from tests.techniques.low_precision_subjects import (
    DTYPES,
    FORMATS,
    OPTIMIZERS,
    error_of,
    every_format,
    give_gradients,
    lowered,
    network,
    run,
    through_disk,
    whole,
)

SPEC = Spec(config=LowPrecision(), loss_class="changed", trainer_precision="32-true", tips_by=3e-2, shrinks="weights")


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
    assert (error <= 1.1 * num_steps * error_of(weight_format, expected, 0.02) + 1e-7).all(), error.max()


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
    assert sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())) == estimate


def test_bytes_per_parameter_of_the_docstring():
    model = nn.Linear(100, 100)
    sizes = [estimate_low_precision(model, LowPrecision(format=f)) / 10_100 for f in FORMATS]
    assert sizes == [2, 3, 4, 2, (100 * 100 + 100 * 2 + 100 * 2) / 10_100]  # with scales, and a bias in bfloat16


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

    assert transient(2) == transient(8) <= (38 if weight_format == "int8-sr" else 28) * 128 * 128


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


@pytest.mark.parametrize("kind", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_a_weight_that_spectral_normalisation_multiplies_by_buffers_stays_as_it_is(kind):
    model = nn.Sequential(kind(nn.Linear(8, 32)), nn.Linear(32, 8))
    apply_low_precision(model, torch.optim.SGD(model.parameters(), 0.1), LowPrecision())
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.dim() > 1}
    assert sorted(map(str, dtypes.values())) == ["torch.bfloat16", "torch.float32"]
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 8)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
