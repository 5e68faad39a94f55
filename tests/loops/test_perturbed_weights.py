"""Weights that are others for a while, without a copy."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


@pytest.fixture
def mesh(monkeypatch):
    """A mesh of this process alone."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # replaced with the group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("moves", [moved, enlarged])
def test_of_sharded_weights_the_shards_move_while_what_is_gathered_comes_and_goes(moves, mesh):
    module = fully_shard(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 2)), mesh=mesh)
    shards = [p.to_local().clone() for p in module.parameters()]
    with torch.no_grad():
        expected = module(torch.ones(2, 30))  # its weights stay gathered
    with moves(module):
        found = module(torch.ones(2, 30))
        found.sum().backward()  # afterwards they are freed
    assert not torch.equal(found, expected)
    assert all(torch.equal(p.to_local(), shard) for p, shard in zip(module.parameters(), shards, strict=True))
