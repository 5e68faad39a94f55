"""Gradients that go into the optimizer's state, in plain torch, against steps written by hand in float64."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_memsave import Ledger, LowPrecision, apply_low_precision
from lightning_memsave.numerics.kbit import mix, random_bits
from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state
from lightning_memsave.techniques.optimizer_state.quantized import memory_of
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.torch_internals import optimizer_class

from .optimizer_state_subjects import flat, through_disk

INTO = OptimizerState(first_moment="32bit", gradients="into-state")
ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
LOW_BIT = {f: OptimizerState(**BY_NAME[f], gradients="into-state", **ALL) for f in ("8bit", "4bit", "fp8")}
SGDS = {
    "momentum": {"momentum": 0.9},
    "weight decay": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "maximize": {"momentum": 0.5, "maximize": True, "weight_decay": 0.1},
}


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 12, generator=generator).to(dtype), torch.randn(16, 4, generator=generator).to(dtype)


def train(model, optimizer, steps, num_parts):
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step, next(model.parameters()).dtype)
        for part_x, part_y in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            ((model(part_x) - part_y).square().mean() / num_parts).backward()
        optimizer.step()


def pair(build, config=INTO, dtype=torch.float64):
    models = [net(dtype), net(dtype)]
    optimizers = [build(m.parameters()) for m in models]
    applied = apply_optimizer_state(optimizers[1], config, models[1])
    return models, optimizers, applied


def close(models, optimizers, names, rtol=1e-12):
    for first, second in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(second, first, rtol=rtol, atol=1e-14)
    for name in names:
        for first, second in zip(*(m.parameters() for m in models), strict=True):
            pairs = (o.state[p][name] for o, p in zip(optimizers, (first, second), strict=True))
            torch.testing.assert_close(*pairs, rtol=rtol, atol=1e-14)


# ------------------------------------------------------------------------------- SGD: nothing changes
@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("name", SGDS)
def test_sgd_is_exact(name, num_parts):
    models, optimizers, applied = pair(lambda p: torch.optim.SGD(p, 0.05, **SGDS[name]))
    assert applied.loss_class == "exact"
    train(models[0], optimizers[0], range(6), 1)
    train(models[1], optimizers[1], range(6), num_parts)
    close(models, optimizers, ["momentum_buffer"])
    assert all(p.grad is None for p in models[1].parameters())


def test_parameters_without_gradient_stay():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    apply_optimizer_state(optimizer, INTO, model)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    train(model, optimizer, range(2), 2)
    assert torch.equal(model[0].weight, before)
    before = flat(model)
    optimizer.step()  # nothing has come since
    assert torch.equal(flat(model), before)


# ------------------------------------------------------------------------------- Adam: squares of a sum nobody has
def signed_sums(gradient, number, step, axis):
    """[N, 4]: of each row (axis 0) or column of a matrix, with the signs of a step."""
    length = gradient.shape[1 - axis]
    seed = mix(mix(8 * number + 1) ^ mix((step * 0x9E3779B9 & 0xFFFFFFFF) ^ axis))
    bits = random_bits(seed, 0, -(-length // 256), gradient.device).flatten().tolist()
    return torch.tensor(
        [
            [sum((-1) ** (1 - (bits[i] >> n & 1)) * value for i, value in enumerate(line)) for n in range(4)]
            for line in gradient.movedim(axis, 0).tolist()
        ],
        dtype=torch.float64,
    )


def is_matrix(p):
    return p.dim() == 2 and 2 * 5 * sum(p.shape) <= p.numel()


def by_hand(model, steps, num_parts, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, decay=0.1):
    """AdamW whose second moment of matrices has squares of parts, weighed, in rows and columns of another sum."""
    parameters = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    products, most = [0.0] * len(parameters), [0.0] * len(parameters)
    for count, step in enumerate(steps, start=1):
        x, y = batch(step)
        gradients = []
        for part_x, part_y in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            loss = (model(part_x) - part_y).square().mean() / num_parts
            gradients.append(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            for i, p in enumerate(parameters):
                parts = [g[i] for g in gradients]
                first[i] = betas[0] * first[i] + (1 - betas[0]) * sum(parts)
                before = betas[1] * second[i]
                if num_parts == 1 or not is_matrix(p):
                    second[i] = before + (1 - betas[1]) * sum(parts) ** 2
                else:
                    squares = sum(g**2 for g in parts)
                    wanted, total = [], 0.0
                    for axis in (0, 1):
                        signed = torch.stack([signed_sums(g, i, count - 1, axis) for g in parts])
                        missing = (signed.sum(0) ** 2 - (signed**2).sum(0)).mean(1)
                        wanted.append((before + (1 - betas[1]) * squares).sum(1 - axis) + (1 - betas[1]) * missing)
                        total = total if axis else float(missing.sum())
                    agreement = min(max(products[i] / most[i], 0), 1) if most[i] else 0
                    weighed = sum((1 + 2 * j * agreement) * g**2 for j, g in enumerate(parts))
                    v = before + (1 - betas[1]) * weighed
                    least = 0.25 / (1 + 2 * (num_parts - 1) * agreement)
                    wanted = [torch.maximum(w, v.sum(1 - axis) * least) for axis, w in enumerate(wanted)]
                    v = v * (wanted[0] / v.sum(1))[:, None]
                    columns = wanted[1] / wanted[1].sum() * (wanted[0].sum() + wanted[1].sum()) / 2
                    second[i] = v * (columns / v.sum(0))
                    products[i] = betas[0] * products[i] + (1 - betas[0]) * max(total, -float(squares.sum()))
                    most[i] = betas[0] * most[i] + (1 - betas[0]) * (num_parts - 1) * float(squares.sum())
                mean = first[i] / (1 - betas[0] ** count)
                p -= lr * (decay * p + mean / ((second[i] / (1 - betas[1] ** count)).sqrt() + eps))


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2, betas=(0.9, 0.99), weight_decay=0.1)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_adamw_is_what_was_derived(num_parts):
    models, optimizers, applied = pair(adamw)
    assert applied.loss_class == "changed"
    assert "AdamW" in applied.reasons[0]
    by_hand(models[0], range(6), num_parts)
    train(models[1], optimizers[1], range(6), num_parts)
    close(models, optimizers, [], rtol=1e-11)


@pytest.mark.parametrize(
    "build", [adamw, lambda p: torch.optim.Adam(p, 1e-2), lambda p: torch.optim.Adam(p, 1e-2, maximize=True)]
)
def test_adam_with_one_part_is_exact(build):
    models, optimizers, _ = pair(build)
    train(models[0], optimizers[0], range(6), 1)
    train(models[1], optimizers[1], range(6), 1)
    close(models, optimizers, ["exp_avg", "exp_avg_sq"], rtol=1e-10)


@pytest.mark.parametrize("num_parts", [(2,), (8,), (8, 8, 1), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("config", [INTO, replace(INTO, placement="host")], ids=["32bit", "offload"])
@pytest.mark.parametrize("shape", [(300,), (100, 3), (20, 1, 3), ()], ids=str)
def test_vectors_and_narrow_matrices_are_adams(shape, config, num_parts):
    """Whatever microbatches are: also the last batch of an epoch, or where microbatches get smaller."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([p], 1e-2, weight_decay=0.1) for p in weights]
    apply_optimizer_state(optimizers[1], config, nn.ParameterList(weights[1:]))
    for step in range(12):
        parts = torch.randn(num_parts[step % len(num_parts)], *shape, generator=generator)
        (weights[0] * parts.sum(0)).sum().backward()
        for part in parts:
            (weights[1] * part).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    plain, ours = (optimizer.state_dict()["state"][0]["exp_avg_sq"] for optimizer in optimizers)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=0)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-6)


def second_moments(shape, agreeing, config=INTO, num_steps=200, num_parts=8, size=lambda step: 1):
    """Adam's own and ours, of gradients whose rows and columns differ, and that agree in part."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    optimizers = [torch.optim.Adam([p], 1e-3, betas=(0.9, 0.98)) for p in weights]
    apply_optimizer_state(optimizers[1], config, nn.ParameterList(weights[1:]))
    profile = torch.ones(shape) if len(shape) == 1 else torch.outer(*(torch.logspace(-1, 1, n) for n in shape))
    for step in range(num_steps):
        parts = (
            size(step)
            * profile
            * (torch.randn(num_parts, *shape, generator=generator) + agreeing * torch.randn(shape, generator=generator))
        )
        (weights[0] * parts.sum(0)).sum().backward()
        for part in parts:
            (weights[1] * part).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [o.state_dict()["state"][0]["exp_avg_sq"] for o in optimizers]


@pytest.mark.parametrize("agreeing", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("name", ["32bit", "8bit", "factored"])
def test_rows_and_columns_of_a_second_moment_have_adams_sums(name, agreeing):
    config = INTO if name == "32bit" else OptimizerState(**BY_NAME[name], gradients="into-state", **ALL)
    plain, ours = second_moments((64, 48), agreeing, config)
    for axis in (0, 1):
        ratios = ours.sum(axis) / plain.sum(axis)
        assert ratios.median() == pytest.approx(1, abs=0.05)
        assert ((ratios > 0.7) & (ratios < 1.4)).all()  # 1 +- 0.07 of a hundred steps, largest of 64


@pytest.mark.parametrize("part_numel", [2**20, pytest.param(768, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["32bit", "8bit"])
def test_a_pattern_within_rows_fades_about_as_adams(name, part_numel, monkeypatch):
    """Where parts agree: every other element is small at first, and the others later. Rows and columns do not tell."""
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", part_numel)
    is_first = (torch.arange(64)[:, None] + torch.arange(48)) % 2 == 0
    patterns = [torch.where(is_first, 0.1, 1.0), torch.where(is_first, 1.0, 0.1)]
    config = INTO if name == "32bit" else LOW_BIT[name]
    plain, ours = second_moments((64, 48), 3.0, config, size=lambda step: patterns[step >= 100])
    for chosen in (is_first, ~is_first):
        assert 0.7 < (ours / plain)[chosen].median() < 1.4


@pytest.mark.parametrize("part_numel", [2**20, 2**15])
def test_blocks_of_a_large_vector_have_adams_sums(part_numel, monkeypatch):
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", part_numel)
    plain, ours = second_moments((2**16 + 2,), 3.0, num_steps=60)
    ratios = torch.stack([ours[: 2**16].view(-1, 256).sum(1), plain[: 2**16].view(-1, 256).sum(1)])
    assert (ratios[0] / ratios[1]).median() == pytest.approx(1, abs=0.05)
    assert float(ours[2**16 :].sum() / plain[2**16 :].sum()) == pytest.approx(1, abs=0.6)  # the last row is not full


def test_large_matrices_are_cut_between_rows(monkeypatch):
    found = []
    for part_numel in (2**20, 1000):
        monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", part_numel)
        plain, ours = second_moments((64, 48), 3.0, num_steps=80)
        found.append(ours.sum(1) / plain.sum(1))
    assert all(ratios.median() == pytest.approx(1, abs=0.05) for ratios in found)
    assert not torch.equal(*found)  # parts have columns, and signs, of their own


def test_where_rows_are_far_apart_in_memory():
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(16, 32, 3).to(memory_format=memory_format)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        apply_optimizer_state(optimizer, INTO, model)
        for step in range(3):
            for part in range(4):
                x = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(10 * step + part))
                model(x).square().mean().backward()
            optimizer.step()
        found.append((model.weight.detach(), optimizer.state[model.weight]["exp_avg_sq"]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_from_where_parts_have_another_size_goes_on(monkeypatch):
    def one(model):
        x, y = batch(0, torch.float32)
        (model(x) - y).square().mean().backward()

    (_, model), (_, optimizer), _ = pair(adamw, INTO, torch.float32)
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", 120)
    one(model)
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    monkeypatch.undo()
    (_, second), (_, resumed), _ = pair(adamw, INTO, torch.float32)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    one(second)
    resumed.step()
    assert flat(second).isfinite().all()


def test_a_row_that_one_part_alone_has_touched_has_its_square():
    """A rare token, in the last part, after steps in which parts agreed: nothing is missing there."""
    p = nn.Parameter(torch.zeros(64, 48))
    optimizer = torch.optim.Adam([p], 1e-3, betas=(0.9, 0.98))
    apply_optimizer_state(optimizer, INTO, nn.ParameterList([p]))
    for step in range(5):
        for part in range(15):
            gradient = torch.ones(64, 48)
            gradient[0] = step == 4 and part == 14
            (p * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    squares = float(optimizer.state[p]["exp_avg_sq"][0].mean()) / 0.02
    assert 0.5 < squares < 2  # columns are scaled as well


def test_a_checkpoint_between_two_parts_loads_into_another_format():
    """What has been summed goes on as it began."""
    for written, read in (("8bit", "4bit"), ("4bit", "8bit"), ("4bit", "factored")):
        configs = [OptimizerState(**BY_NAME[f], gradients="into-state", **ALL) for f in (written, read)]
        (_, model), (_, optimizer), _ = pair(adamw, configs[0], torch.float32)
        train(model, optimizer, range(2), 2)
        (model(batch(2, torch.float32)[0])).square().mean().backward()
        (_, second), (_, resumed), _ = pair(adamw, configs[1], torch.float32)
        second.load_state_dict(model.state_dict())
        resumed.load_state_dict(through_disk(optimizer.state_dict()))
        for m, o in ((model, optimizer), (second, resumed)):
            start = flat(m)
            m(batch(3, torch.float32)[0]).square().mean().backward()
            o.step()
            assert 0.003 < (flat(m) - start).abs().mean() < 0.03  # a rate of 0.01


@pytest.mark.parametrize("config", [INTO, LOW_BIT["8bit"]], ids=["32bit", "8bit"])
def test_where_parts_agree_and_steps_alternate_they_are_adams(config):
    """What alternates does not show in the first moment."""
    models, optimizers, _ = pair(lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.0), config, torch.float32)
    for step in range(200):
        before = [flat(model) for model in models]
        for model, optimizer, parts in zip(models, optimizers, (1, 8), strict=True):
            for _ in range(parts):
                sum((p * (-1) ** step).sum() / parts for p in model.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
    plain, ours = ((flat(model) - was).norm() for model, was in zip(models, before, strict=True))
    assert ours / plain == pytest.approx(1, abs=0.03 if config is INTO else 0.1)


@pytest.mark.parametrize("shape", [(96, 128), (2**16 + 1000,)], ids=str)
@pytest.mark.parametrize("agreeing", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("num_parts", [2, 8])
def test_where_parts_are_noise_in_part_steps_are_as_long_as_adams(num_parts, agreeing, shape):
    lengths, generator = [], torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for _ in range(2)]
    optimizers = [torch.optim.Adam([p], 1e-3) for p in weights]
    apply_optimizer_state(optimizers[1], INTO, nn.ParameterList(weights[1:]))
    for _ in range(50):
        noise = torch.randn(num_parts, *shape, generator=generator, dtype=torch.float64)
        noise += agreeing * torch.randn(shape, generator=generator, dtype=torch.float64)
        before = [p.detach().clone() for p in weights]
        (weights[0] * noise.sum(0)).sum().backward()
        for part in noise:
            (weights[1] * part).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        lengths.append([float((p.detach() - was).norm()) for p, was in zip(weights, before, strict=True)])
    plain, ours = lengths[-1]
    assert ours / plain == pytest.approx(1, abs=0.03)


# ------------------------------------------------------------------------------- low-bit state
@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("build", [lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), adamw], ids=["SGD", "AdamW"])
def test_low_bit_moments_follow(name, build):
    models, optimizers, applied = pair(build, LOW_BIT[name], torch.float32)
    assert applied.loss_class == "changed"
    reference = pair(build, INTO, torch.float32)
    start = flat(models[1])
    train(models[1], optimizers[1], range(10), 4)
    train(reference[0][1], reference[1][1], range(10), 4)
    expected = flat(reference[0][1])
    assert (flat(models[1]) - expected).norm() < {"8bit": 0.1, "4bit": 0.8, "fp8": 0.2}[name] * (
        expected - start
    ).norm()


def test_rounding_once_per_part_has_no_bias():
    model = nn.Linear(256, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    apply_optimizer_state(optimizer, LOW_BIT["4bit"], model)
    gradient = torch.linspace(0.1, 1, 256).repeat(16, 1)
    for _ in range(40):
        for _ in range(4):
            (model.weight * gradient / 4).sum().backward()
        optimizer.step()
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
    expected = gradient[0] * 10 * (1 - 0.9**40)
    assert ((momentum.mean(0) - expected) / expected[-1]).abs().mean() < 0.08  # 16 draws for each
    assert abs(float((momentum.mean() - expected.mean()) / expected.mean())) < 0.02


@pytest.mark.parametrize("precision", ["bf16-sr", "bf16+8", "bf16-kahan"])
@pytest.mark.parametrize("config", [INTO, LOW_BIT["8bit"]], ids=["32bit", "8bit"])
@pytest.mark.parametrize(
    ("build", "most"), [(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), 0.1), (adamw, 0.6)], ids=["SGD", "AdamW"]
)
def test_with_low_precision(build, most, config, precision):
    models, optimizers, _ = pair(build, config, torch.float32)
    apply_low_precision(models[1], optimizers[1], LowPrecision(format=precision))
    start = flat(models[0])
    train(models[0], optimizers[0], range(8), 1)
    for step in range(8):
        x, y = batch(step, torch.float32)
        for part_x, part_y in zip(x.chunk(4), y.chunk(4), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = (models[1](part_x).float() - part_y).square().mean() / 4
            loss.backward()
        optimizers[1].step()
        assert all(p.grad is None for p in models[1].parameters())
    assert (flat(models[1]) - flat(models[0])).norm() < most * (flat(models[0]) - start).norm()


def test_bytes_per_parameter_of_bfloat16_weights_with_8bit_momentum():
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    apply_optimizer_state(optimizer, LOW_BIT["8bit"], model)
    apply_low_precision(model, optimizer, LowPrecision())
    num_parameters, one = 8 * 256**2, 256**2

    def step():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(1, 256)).float().square().mean()
            loss.backward()
        optimizer.step()

    step()
    with Ledger().watching(model, [optimizer]) as ledger:
        step()
    held = sum(t.nbytes for t in (*model.parameters(), *tree_leaves(list(optimizer.state.values()))))
    assert held / num_parameters == 2 + 1 + 4 / 256  # 3.016
    # The peak has besides one parameter's gradient, float32 copies and the activations of one sample.
    assert ledger.measurement.peak_bytes < held + 20 * one


# ------------------------------------------------------------------------------- checkpoints, and the end
@pytest.mark.parametrize("config", [INTO, LOW_BIT["8bit"]], ids=["32bit", "8bit"])
@pytest.mark.parametrize(
    "build", [lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.1), adamw], ids=["SGD", "AdamW"]
)
def test_a_checkpoint_between_two_parts_continues_bit_for_bit(build, config):
    def part(model, step):
        x, y = batch(step, torch.float32)
        (model(x) - y).square().mean().backward()

    (_, model), (_, optimizer), _ = pair(build, config, torch.float32)
    train(model, optimizer, range(2), 2)
    part(model, 10)
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    (_, second), (_, resumed), _ = pair(build, config, torch.float32)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for m, o in ((model, optimizer), (second, resumed)):
        part(m, 11)
        o.step()
        train(m, o, range(3, 5), 2)
    assert torch.equal(flat(model), flat(second))


@pytest.mark.parametrize("config", [INTO, LOW_BIT["8bit"]], ids=["32bit", "8bit"])
def test_moments_of_bfloat16_weights_are_float32_on_disk_and_bfloat16_without_us(config):
    (_, model), (_, optimizer), applied = pair(adamw, config, torch.bfloat16)
    train(model, optimizer, range(3), 2)
    saved = through_disk((model.state_dict(), optimizer.state_dict()))
    (_, second), (_, resumed), _ = pair(adamw, config, torch.bfloat16)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for m, o in ((model, optimizer), (second, resumed)):
        train(m, o, range(3, 6), 2)
    assert torch.equal(flat(model), flat(second))
    applied.undo()
    train(model, optimizer, range(6, 8), 1)  # torch's step takes one dtype
    assert {optimizer.state[p]["exp_avg"].dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("sums", [None, torch.zeros(3)], ids=["SGD", "AdamW"])
def test_a_checkpoint_of_an_earlier_version_between_two_parts_goes_on(sums):
    build = adamw if sums is not None else lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)
    (_, model), (_, optimizer), _ = pair(build, INTO, torch.float32)
    train(model, optimizer, range(2), 2)
    (model(batch(0, torch.float32)[0])).square().mean().backward()
    saved = optimizer.state_dict()
    [side] = [value for key, value in saved.items() if key.startswith("memsave")]
    side["pending"] = {number: (*each[:2], sums) for number, each in side["pending"].items()}
    optimizer.load_state_dict(saved)
    (model(batch(1, torch.float32)[0])).square().mean().backward()
    optimizer.step()
    assert flat(model).isfinite().all()


def test_what_a_checkpoint_has_is_not_added_to():
    (_, model), (_, optimizer), _ = pair(adamw, INTO, torch.float32)
    one = batch(0, torch.float32)[0]
    model(one).square().mean().backward()
    saved = through_disk(optimizer.state_dict())
    before = [t.clone() for t in tree_leaves(saved) if isinstance(t, torch.Tensor)]
    optimizer.load_state_dict(saved)
    model(one).square().mean().backward()
    assert all(
        torch.equal(a, b) for a, b in zip(before, (t for t in tree_leaves(saved) if torch.is_tensor(t)), strict=True)
    )


def test_sums_are_float32_where_backward_runs_inside_of_autocast():
    found = []
    for is_inside in (False, True):
        (_, model), (_, optimizer), _ = pair(adamw, INTO, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            (model[0].weight * torch.linspace(0, 1, 64 * 12).view(64, 12)).sum().backward()
        found.append(tree_leaves(vars(optimizer)[optimizer_class.PENDING][model[0].weight].sums))
    assert len(found[0]) == 5
    assert all(map(torch.equal, *found))


def test_what_has_no_gradients_to_take_any_more_is_cut_as_before():
    (_, model), (_, optimizer), applied = pair(adamw, LOW_BIT["8bit"], torch.float32)
    memory, p = memory_of(optimizer), model[0].weight
    assert memory.unit(p) == 768
    train(model, optimizer, range(1), 2)
    applied.undo()
    assert memory.unit(p) == 256


def test_undo_gives_gradients_back():
    models, optimizers, applied = pair(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3), 1)
    applied.undo()
    assert type(optimizers[1]) is torch.optim.SGD
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3, 6), 1)
    close(models, optimizers, ["momentum_buffer"])
    assert all(p.grad is not None for p in models[1].parameters())


def test_copies_go_their_own_way():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    apply_optimizer_state(optimizer, INTO, model)
    train(model, optimizer, range(2), 2)
    second, copied = copy.deepcopy((model, optimizer))
    before = flat(second)
    train(model, optimizer, range(2, 4), 2)
    assert torch.equal(flat(second), before)
    assert all(torch.is_tensor(state["momentum_buffer"]) for state in copied.state.values())


def test_an_optimizer_dies_without_the_garbage_collector():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    apply_optimizer_state(optimizer, INTO, model).keep()
    gone = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert gone() is None
        model(batch(0)[0]).sum().backward()
    finally:
        gc.enable()


class Closes(torch.optim.SGD):
    """Cannot step without computing the loss again."""

    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), "nesterov=True"),
        (lambda p: torch.optim.SGD(p, 0.1), "momentum"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "L2 weight decay.*AdamW"),
        (lambda p: torch.optim.RMSprop(p), "needs one of SGD, Adam, AdamW"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.LBFGS(p), "steps each parameter by itself"),
        (lambda p: Closes(p, 0.1, momentum=0.9), "steps each parameter by itself, got 'Closes'"),
    ],
)
def test_what_needs_the_gradient_is_refused(build, word):
    model = net()
    optimizer = build(list(model.parameters()))
    plain_class = type(optimizer)
    with pytest.raises(ValueError, match=word):
        apply_optimizer_state(optimizer, INTO, model)
    assert type(optimizer) is plain_class
