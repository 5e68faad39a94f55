"""Gradients that go into the optimizer's state, in plain torch, against steps written by hand in float64."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_memsave import Ledger, LowPrecision, apply_low_precision
from lightning_memsave.core import optimizers
from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state

from .optimizer_state_subjects import flat, through_disk

INTO = OptimizerState(format="32bit", gradients="into-state")
ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
LOW_BIT = {f: OptimizerState(format=f, gradients="into-state", **ALL) for f in ("8bit", "4bit", "fp8")}
SGDS = {
    "momentum": {"momentum": 0.9},
    "weight decay": {"momentum": 0.9, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "maximize": {"momentum": 0.5, "maximize": True, "weight_decay": 0.1},
}


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 4)).to(dtype)


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


# ------------------------------------------------------------------------------- Adam: the squares of each part
def by_hand(model, steps, num_parts, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, decay=0.1):
    """Zhang et al., 2023, algorithm 1, with decoupled weight decay, and weights of squares by what parts agree in."""
    parameters = list(model.parameters())
    first, second, products, most = ([torch.zeros_like(p) for p in parameters] for _ in range(4))
    for count, step in enumerate(steps, start=1):
        x, y = batch(step)
        gradients = []
        for part_x, part_y in zip(x.chunk(num_parts), y.chunk(num_parts), strict=True):
            loss = (model(part_x) - part_y).square().mean() / num_parts
            gradients.append(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            for i, p in enumerate(parameters):
                parts = [g[i] for g in gradients]
                squares = sum((g**2).sum() for g in parts)
                # |G|**2 with (k - 1) times the product of the first part and the first moment instead of the others'.
                others = sum(parts) - parts[0]
                found = sum(parts).square().sum() - squares
                found += 2 * betas[0] / (1 - betas[0]) * (first[i] * (others - (num_parts - 1) * parts[0])).sum()
                found = found.clamp(-squares, (num_parts - 1) * squares)
                agreement = (products[i].sum() / most[i].sum()).nan_to_num(0).clamp(0, 1) if count > 1 else 0
                weighed = sum((1 + 2 * j * agreement) * g**2 for j, g in enumerate(parts))
                weighed *= (1 + found / squares).clamp(min=1) if count == 1 else 1
                products[i] = torch.lerp(products[i], found / p.numel() + 0 * p, 1 - betas[0])
                most[i] = torch.lerp(most[i], (num_parts - 1) * squares / p.numel() + 0 * p, 1 - betas[0])
                first[i] = betas[0] * first[i] + (1 - betas[0]) * sum(parts)
                second[i] = betas[1] * second[i] + (1 - betas[1]) * weighed
                mean = first[i] / (1 - betas[0] ** count)
                p -= lr * (decay * p + mean / ((second[i] / (1 - betas[1] ** count)).sqrt() + eps))


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2, betas=(0.9, 0.99), weight_decay=0.1)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_adamw_is_the_papers(num_parts):
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
def test_where_all_parts_agree_in_all_steps_they_are_adams(num_parts):
    """In any number of them: also the last batch of an epoch, or where microbatches get smaller."""
    models, optimizers, _ = pair(lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1))
    gradients = [torch.randn_like(p) for p in models[0].parameters()]
    for step in range(6):
        for model, optimizer, parts in zip(models, optimizers, (1, num_parts[step % len(num_parts)]), strict=True):
            for _ in range(parts):
                sum((p * g).sum() / parts for p, g in zip(model.parameters(), gradients, strict=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    close(models, optimizers, ["exp_avg", "exp_avg_sq"], rtol=1e-6)


def test_a_long_way_of_whole_batches_after_microbatches_leaves_no_rest_below_zero():
    """Weights whose second moment is 0, and whose first is not, as low-bit codes may have it."""
    p = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([p], 1e-3, betas=(0.9, 0.95), eps=1e-30)
    apply_optimizer_state(optimizer, INTO, nn.ParameterList([p]))
    for step in range(800):
        for _ in range(2 if step == 0 else 1):
            p.sum().backward()
        optimizer.state[p]["exp_avg_sq"].zero_()
        optimizer.step()
    assert p.isfinite().all()


@pytest.mark.parametrize("config", [INTO, LOW_BIT["8bit"]], ids=["32bit", "8bit"])
def test_where_parts_agree_and_steps_alternate_they_are_adams(config):
    """What alternates does not show in the first moment."""
    models, optimizers, _ = pair(lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.0), config, torch.float32)
    for step in range(400):
        before = [flat(model) for model in models]
        for model, optimizer, parts in zip(models, optimizers, (1, 8), strict=True):
            for _ in range(parts):
                sum((p * (-1) ** step).sum() / parts for p in model.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
    plain, ours = ((flat(model) - was).norm() for model, was in zip(models, before, strict=True))
    assert ours / plain == pytest.approx(1, abs=0.01 if config is INTO else 0.1)


@pytest.mark.parametrize("agreeing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_parts", [2, 8])
def test_where_parts_are_noise_in_part_steps_are_as_long_as_adams(num_parts, agreeing):
    lengths, generator = [], torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.zeros(20_000, dtype=torch.float64)) for _ in range(2)]
    optimizers = [torch.optim.Adam([p], 1e-3) for p in weights]
    apply_optimizer_state(optimizers[1], INTO, nn.ParameterList(weights[1:]))
    for _ in range(50):
        noise = torch.randn(num_parts, 20_000, generator=generator, dtype=torch.float64)
        noise += agreeing * torch.randn(20_000, generator=generator, dtype=torch.float64)
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
    assert (flat(models[1]) - expected).norm() < {"8bit": 0.1, "4bit": 0.6, "fp8": 0.2}[name] * (
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
def test_with_low_precision(config, precision):
    models, optimizers, _ = pair(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), config, torch.float32)
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
    assert (flat(models[1]) - flat(models[0])).norm() < 0.1 * (flat(models[0]) - start).norm()


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


@pytest.mark.parametrize("name", ["AdamW", "4bit"])
def test_large_parameters_agree_as_a_whole(name, monkeypatch):
    found = []
    for part_numel in (2**20, 256):
        monkeypatch.setitem(optimizers.PART_NUMEL, "cpu", part_numel)
        config = LOW_BIT.get(name, INTO)
        (_, model), (_, optimizer), _ = pair(adamw, config, torch.float32)
        train(model, optimizer, range(4), 4)
        found.append((flat(model), optimizer.state[model[0].weight]["agreement"]))
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4 if name == "AdamW" else 0.3, atol=1e-6)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-6 if name == "AdamW" else 0.1)


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


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), "nesterov=True"),
        (lambda p: torch.optim.SGD(p, 0.1), "momentum"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "L2 weight decay.*AdamW"),
        (lambda p: torch.optim.RMSprop(p), "needs one of SGD, Adam, AdamW"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.LBFGS(p), "steps each parameter by itself"),
    ],
)
def test_what_needs_the_gradient_is_refused(build, word):
    model = net()
    optimizer = build(list(model.parameters()))
    plain_class = type(optimizer)
    with pytest.raises(ValueError, match=word):
        apply_optimizer_state(optimizer, INTO, model)
    assert type(optimizer) is plain_class
