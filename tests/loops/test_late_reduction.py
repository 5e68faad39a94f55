"""Gradients that are averaged after backward: bytes, and the names of DDP that this rests on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memsave.loops import late_reduction


def test_the_names_of_ddp_have_not_moved():
    for name in ("_sync_buffers", "will_sync_module_buffers"):
        assert callable(getattr(DistributedDataParallel, name)), f"DistributedDataParallel.{name} has moved"
    assert hasattr(dist.ProcessGroup, "_get_sequence_number_for_group"), "a group's sequence number has moved"


@pytest.fixture
def process_group(tmp_path):
    """Ends after the test's DDP has died: as the last owner of a group it would wait for threads that wait for it."""
    assert late_reduction.num_collectives() == 0
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_process_counts_its_collectives_and_sends_buffers_when_ddp_would(process_group):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    before = late_reduction.num_collectives()
    dist.all_reduce(torch.zeros(1))
    assert late_reduction.num_collectives() == before + 1
    assert model.require_forward_param_sync
    exchange = late_reduction.LateReduction(model, steps=True)
    assert late_reduction.num_collectives() > before + 1  # its buffers are due in the first batch
    assert not model.require_forward_param_sync
    with model.no_sync():
        model(torch.randn(5, 3)).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    assert not exchange.has_begun
    exchange.finish()
    exchange.finish()
    assert exchange.has_begun
    assert model.require_forward_param_sync  # the next batch sends them again
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    while_accumulating = late_reduction.LateReduction(model, steps=False)
    before = late_reduction.num_collectives()
    while_accumulating.finish()
    assert late_reduction.num_collectives() == before
    assert not model.require_forward_param_sync


def test_what_ddp_takes_on_top():
    """Buckets beside what was the peak, or the exchange where it becomes the peak."""
    module = nn.Linear(9, 10)
    gradients = 400
    assert late_reduction.bytes_on_top(module, peak_bytes=10_000, lasting_bytes=800) == gradients
    assert 1200 + late_reduction.bytes_on_top(module, peak_bytes=1200, lasting_bytes=800) == 800 + 3 * gradients
    module.requires_grad_(False)
    assert late_reduction.bytes_on_top(module, peak_bytes=1200, lasting_bytes=800) == 0


def test_the_flat_copy_is_no_larger_than_a_bucket(monkeypatch):
    monkeypatch.setattr(late_reduction, "_BUCKET_BYTES", 100)
    assert late_reduction.bytes_on_top(nn.Linear(9, 10), peak_bytes=0, lasting_bytes=800) == 800 + 2 * 400 + 100
