"""Weights that are others for a while, without a copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave.loops.perturbed_weights import enlarged, moved


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moves", [moved, enlarged])
def test_weights_are_others_for_a_while_and_then_the_same_bits(moves, dtype):
    module = nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 2)).to(dtype)
    ends = [-0.0, 0.0] if moves is moved else [torch.finfo(dtype).tiny / 2, torch.finfo(dtype).max]
    with torch.no_grad():
        module[2].bias.copy_(torch.tensor(ends, dtype=dtype))
        if moves is moved:
            module[2].weight.zero_()
    before = [p.detach().clone() for p in module.parameters()]
    with moves(module):
        meanwhile = [p.detach().clone() for p in module.parameters()]
    for p, mine, its in zip(module.parameters(), before, meanwhile, strict=True):
        assert torch.equal(p.view(torch.uint8), mine.view(torch.uint8))
        assert (its != mine).any() or (moves is enlarged and not mine.any())
        assert its.isfinite().all()
