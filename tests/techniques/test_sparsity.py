"""Sparse training takes the bytes that are stated."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave import Sparsity, apply_sparsity
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.techniques.sparsity import estimate_sparsity, sparse_layers
from tests.contracts.spec import Spec

SPEC = Spec(config=Sparsity(sparsity=0.9), loss_class="changed", shrinks="weights")


@pytest.mark.parametrize(
    "options",
    [
        *({"sparsity": sparsity} for sparsity in (0.5, 0.9, 0.95, "2:4")),
        {"sparsity": 0.9, "distribution": "erk"},
        {"sparsity": 0.9, "distribution": "global", "initial": "magnitude"},
        {"sparsity": 0.9, "method": "gradual"},
    ],
)
def test_bytes_are_those_estimated(options):
    model, config = WideResNet(), Sparsity(**options)
    before = sum(p.nbytes for p in model.parameters())
    prunable = {n: m.weight.numel() for n, m in model.named_modules() if hasattr(m, "weight")}
    estimate = estimate_sparsity(model, config)
    apply_sparsity(model, config)
    layers = sparse_layers(model)
    held = sum(layer.values.nbytes + layer.values_index.nbytes for layer in layers.values())
    assert held == estimate
    rest = before - 4 * sum(prunable[name] for name in layers)
    assert sum(p.nbytes for p in model.parameters()) + sum(layer.values_index.nbytes for layer in layers.values()) == (
        rest + estimate
    )


def test_wide_resnet_at_90_percent_holds_two_megabytes():
    """Weights with positions, buffers, gradients and momentum."""
    model = WideResNet()
    apply_sparsity(model, Sparsity(sparsity=0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    gradients = sum(p.grad.nbytes for p in model.parameters())
    momentum = sum(state["momentum_buffer"].nbytes for state in optimizer.state.values())
    assert (held, gradients, momentum) == (805_500, 608_116, 608_116)
    dense = WideResNet()
    assert sum(t.nbytes for t in (*dense.parameters(), *dense.buffers())) == 5_885_104
