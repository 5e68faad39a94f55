"""The loss class of codes: `unbiased` is said only where the mean of many gradients is the plain one."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from tests.saved_tensors.nets import data

WIDTH, SHAPE = 64, (4, 6, 64)


def class_of(function, **options):
    store = SavedTensorStore(lossy=Fidelity.INT4, min_numel=1, **options)
    with store.scope():
        out = function()
    out.sum().backward()
    return store.consequences


def linear():
    return nn.Linear(WIDTH, WIDTH)


UNBIASED = {
    "layers in a row": lambda: linear()(linear()(data(*SHAPE))),
    "ReLU": lambda: linear()(linear()(data(*SHAPE)).relu()),
    "layers beside each other": lambda: (lambda h: linear()(h) + linear()(h))(data(*SHAPE)),
    "product": lambda: data(*SHAPE) * data(*SHAPE),
    "square": lambda: data(*SHAPE).square() + data(*SHAPE) ** 2,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear())(data(*SHAPE)),
    "convolution": lambda: nn.Conv1d(6, 5, 3)(nn.Conv1d(6, 6, 1)(data(*SHAPE))),
}
APPROXIMATE = {
    "GELU": (lambda: F.gelu(linear()(data(*SHAPE))), {"gelu"}),
    "GLU": (lambda: F.glu(data(*SHAPE)), {"glu"}),
    "GELU of what a product reads": (lambda: (lambda h: F.gelu(h) + h * data(*SHAPE))(data(*SHAPE)), {"gelu"}),
    "LayerNorm": (lambda: F.layer_norm(data(*SHAPE), (WIDTH,)), {"layer_norm"}),
    "attention": (
        lambda: F.scaled_dot_product_attention(data(*SHAPE), data(*SHAPE), data(*SHAPE)),
        {"scaled_dot_product_attention"},
    ),
    "gate of the same tensor": (lambda: (lambda h: h * linear()(h))(data(*SHAPE)), set()),
    "product of two, squared": (lambda: (lambda a, b: (a * b * a).square())(data(*SHAPE), data(*SHAPE)), set()),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_linear_functions_of_codes_are_unbiased(name):
    found = class_of(UNBIASED[name])
    assert (found.is_there, found.loss_class, found.reasons) == (True, "unbiased", ())


@pytest.mark.parametrize("name", APPROXIMATE)
def test_others_are_approximate_and_say_why(name):
    function, nonlinear = APPROXIMATE[name]
    found = class_of(function)
    assert (found.loss_class, found.nonlinear) == ("approximate", nonlinear)
    reason = "are not linear in what codes keep" if nonlinear else "a code is read twice"
    assert reason in found.reasons[0]


def test_a_recomputation_reads_the_codes_that_it_is_made_from():
    """(a * b)**2: the square's a * b is computed from codes of a and b, which the product reads as well."""

    def squared():
        return (data(*SHAPE) * data(*SHAPE)).square()

    assert class_of(squared).loss_class == "unbiased"  # a * b has a code of its own
    assert class_of(squared, recompute=True).loss_class == "approximate"


def test_without_lossy_codes_nothing_is_lost():
    assert class_of(lambda: data(*SHAPE).sin()).loss_class == "exact"
    assert class_of(lambda: data(*SHAPE).relu()).loss_class == "exact"


def test_what_one_scope_did_is_remembered():
    store = SavedTensorStore(lossy=Fidelity.INT4, min_numel=1)
    for function in (lambda: F.glu(data(*SHAPE)), lambda: data(*SHAPE).sin()):
        with store.scope():
            out = function()
        out.sum().backward()
    assert store.consequences.loss_class == "approximate"


# ------------------------------------------------------------------------------- random networks
def network(seed):
    """A loss on a few operations, each on what earlier ones made."""
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    layers, x, weights = [linear() for _ in range(6)], torch.randn(SHAPE), torch.randn(SHAPE)
    operations = {
        "linear": lambda a, b, k: layers[k](a),
        "product": lambda a, b, k: a * b,
        "ReLU": lambda a, b, k: a.relu(),
        "square": lambda a, b, k: a.square() * 0.3,
        "sum": lambda a, b, k: a + b,
        "matmul": lambda a, b, k: (a @ b.transpose(1, 2) @ b) * 0.02,
        "expanded": lambda a, b, k: a[:, :1].expand(SHAPE) * b,
        "GELU": lambda a, b, k: F.gelu(a),
        "LayerNorm": lambda a, b, k: F.layer_norm(a, (WIDTH,)),
        "scaled": lambda a, b, k: a * 0.5,
        "joined": lambda a, b, k: torch.cat([a[:, :3], b[:, 3:]], 1),
    }
    steps: list[tuple[str, int, int, int]] = []
    for known in range(2, 2 + chosen.randint(2, 7)):
        steps.append(
            (
                chosen.choice(list(operations)),
                chosen.randrange(max(0, known - 3), known),
                chosen.randrange(known),
                chosen.randrange(6),
            )
        )

    def loss_of():
        values = [layers[0](x), layers[1](x)]
        for name, first, second, layer in steps:
            values.append(operations[name](values[first], values[second], layer))
        return (layers[5](values[-1]) * weights).sum()

    return layers, loss_of


def gradients(layers, loss_of, store=None):
    for layer in layers:
        layer.zero_grad()
    if store is None:
        loss = loss_of()
    else:
        with store.scope():
            loss = loss_of()
    loss.backward()
    return torch.cat([p.grad.flatten() for layer in layers for p in layer.parameters() if p.grad is not None]).double()


def check(seed, draws):
    """Whether a network was called unbiased; its mean error is then within chance."""
    for recompute in (False, True):
        layers, loss_of = network(seed)
        plain, store = (
            gradients(layers, loss_of),
            SavedTensorStore(lossy=Fidelity.INT4, recompute=recompute, min_numel=1, seed=seed),
        )
        gradients(layers, loss_of, store)
        if store.consequences.loss_class != "unbiased":
            return False
        total, squares = torch.zeros_like(plain), 0.0
        for step in range(draws):
            store.draw_for(step)
            error = gradients(layers, loss_of, store) - plain
            total += error
            squares += float(error.square().sum())
        assert (total / draws).norm() < 1.15 * (squares / draws) ** 0.5 / draws**0.5, seed
    return True


def test_random_networks_that_are_called_unbiased_are():
    assert sum(check(seed, draws=128) for seed in range(40)) >= 5


@pytest.mark.slow
def test_many_random_networks_that_are_called_unbiased_are():
    assert sum(check(seed, draws=256) for seed in range(40, 600)) >= 50
