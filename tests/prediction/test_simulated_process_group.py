"""Runs of several processes that only one is there for; what real processes take is in `prediction_program.py`."""

from __future__ import annotations

import inspect
import sys

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave import MemSave, MemSaveStrategy, predict
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.torch_internals.fake_tensors import is_fake


class Layers(L.LightningModule):
    """A parameter of 4 * 64 * 64 bytes in each layer, and nothing else."""

    def __init__(self, is_sharded=False, read=False, **options):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        self.is_sharded, self.read, self.options = is_sharded, read, options

    def configure_model(self):
        for part in (*self.net, self.net) if self.is_sharded else ():
            fully_shard(part, mesh=self.device_mesh["data_parallel"], **self.options)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        if self.read:
            assert loss.item() < 1e9
        return loss

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), foreach=False)  # makes tensors of a parameter's size


WEIGHTS = 3 * 4 * 64 * 64
COUNTS = 3 * 4
"""Bytes of the optimizer's counts of steps."""


def sharded_over(num):
    return ModelParallelStrategy(data_parallel_size=num, tensor_parallel_size=1)


def test_shards_get_smaller_with_more_processes_and_activations_do_not():
    batch = torch.ones(8, 64)
    few, many = (
        predict(Layers(is_sharded=True), batch, MemSave("measure"), strategy=sharded_over(n), devices=n) for n in (2, 8)
    )
    assert few.by_category["optimizer_state"] == WEIGHTS // 2 + COUNTS
    assert many.by_category["optimizer_state"] == WEIGHTS // 8 + COUNTS
    gathered = WEIGHTS // 3
    assert few.by_category["weights"] == WEIGHTS // 2 + gathered
    assert many.by_category["weights"] == WEIGHTS // 8 + gathered
    assert few.by_category["activations"] == many.by_category["activations"] > 0


def test_processes_on_all_nodes_count():
    batch, strategy = torch.ones(8, 64), sharded_over(8)
    on_one = predict(Layers(is_sharded=True), batch, strategy=strategy, devices=8)
    assert predict(Layers(is_sharded=True), batch, strategy=strategy, devices=4, num_nodes=2) == on_one


def test_fsdp_by_name_shards_over_all_processes():
    found = predict(Layers(is_sharded=True), torch.ones(8, 64), strategy="memsave_fsdp", devices=4, num_nodes=2)
    assert found.by_category["optimizer_state"] == WEIGHTS // 8 + COUNTS


def test_fsdp_of_one_process():
    batch = torch.ones(8, 64)
    found = predict(Layers(is_sharded=True), batch, strategy="memsave_fsdp")
    assert found.by_category["optimizer_state"] == WEIGHTS + COUNTS
    assert found.by_category["data"] == batch.nbytes


@pytest.mark.parametrize("strategy", ["auto", "memsave", MemSaveStrategy(), "ddp", "memsave_ddp", DDPStrategy()])
def test_ddp_has_gradients_in_buckets_as_well(strategy):
    batch = torch.ones(8, 64)
    alone = predict(Layers(), batch, MemSave("measure"))
    found = predict(Layers(), batch, MemSave("measure"), strategy=strategy, devices=16)
    assert alone.by_category["gradients"] == WEIGHTS
    assert found.by_category["gradients"] == 2 * WEIGHTS
    for single in ("memsave", MemSaveStrategy(), SingleDeviceStrategy(device="cpu")):
        assert alone == predict(Layers(), batch, MemSave("measure"), strategy=single, devices=1)


def test_a_step_that_reads_values_is_measured_in_a_group_of_one():
    alone = predict(Layers(), torch.ones(64, 64), MemSave("measure"))
    found = predict(Layers(read=True), torch.ones(64, 64), MemSave("measure"), strategy="ddp", devices=2)
    assert found.source == "measured"
    assert found.by_category["gradients"] == 2 * WEIGHTS
    assert found.by_category["data"] == alone.by_category["data"] == 4 * 64 * 64


class Data(L.LightningDataModule):
    """Prepared before, by the run."""

    def prepare_data(self):
        raise AssertionError("again")

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch / 2


class Prepared(Layers):
    def prepare_data(self):
        raise AssertionError("again")


@pytest.mark.parametrize("read", [False, True])
def test_data_is_not_prepared_again_and_nobody_is_waited_for(read):
    """Around `prepare_data` Lightning makes a group of real processes, which are not there."""
    settings = {"strategy": "ddp", "devices": 2}
    alone = predict(Layers(read=read), torch.ones(64, 64), MemSave("measure"), **settings)
    found = Predictor(Prepared(read=read), torch.ones(64, 64), data_module=Data(), **settings)(
        MemSave("measure").recipe
    )
    assert found.by_category["gradients"] == alone.by_category["gradients"] == 2 * WEIGHTS


def test_shards_in_host_memory_are_refused_on_a_device():
    module, plain = Layers(is_sharded=True, offload_policy=CPUOffloadPolicy(pin_memory=False)), Layers(is_sharded=True)
    options = {"strategy": sharded_over(2), "devices": 2}
    found, usual = (predict(each, torch.ones(8, 64), MemSave("measure"), **options) for each in (module, plain))
    assert found.peak_bytes == usual.peak_bytes  # there is no other memory
    for source in (module, Layers(is_sharded=True, read=True, offload_policy=CPUOffloadPolicy(pin_memory=False))):
        with pytest.raises(ValueError, match=r"offload_policy.*moves them there.*optimizer_state='offload'"):
            predict(source, torch.ones(8, 64), target="cuda", **options)


def test_no_mesh_of_a_prediction_is_remembered():
    """Torch takes one for another of the same numbers, whose process group is another."""
    predict(Layers(is_sharded=True), torch.ones(8, 64), strategy=sharded_over(2), devices=2)
    excepthook = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))["data_parallel"]
        for part in (net := Layers().net):
            fully_shard(part, mesh=mesh)
        assert all(p.detach().device_mesh is torch.zeros_like(p).device_mesh is mesh for p in net.parameters())
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def test_what_it_leaves_behind_is_nothing():
    module, strategy, hook = Layers(is_sharded=True), sharded_over(2), sys.excepthook
    state = torch.get_rng_state()
    predict(module, torch.ones(8, 64), strategy=strategy, devices=2)
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert type(strategy) is ModelParallelStrategy
    assert strategy.cluster_environment is None
    assert not any(is_fake(p) for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("slots", [{"sparsity": 0.5}, {"low_rank": 2}], ids=str)
def test_a_failure_ends_the_group_too(slots):
    with pytest.raises(ValueError, match="cannot be combined with model parallel"):
        predict(Layers(is_sharded=True), torch.ones(8, 64), MemSave(**slots), strategy=sharded_over(2), devices=2)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"devices": 0}, "devices.*at least 1.*got 0"),
        ({"devices": "auto"}, "devices.*integer.*got 'auto'"),
        ({"num_nodes": 1.5}, "num_nodes.*integer.*got 1.5"),
        ({"strategy": "dpp", "devices": 2}, "strategy.*Lightning knows.*got 'dpp'"),
        ({"strategy": "fsdp", "devices": 2}, "strategy.*DDP or FSDP2.*got 'fsdp'"),
        ({"strategy": DDPStrategy(static_graph=True), "devices": 2}, "static_graph"),
    ],
)
def test_refusals(settings, match):
    with pytest.raises(ValueError, match=match):
        predict(BoringModel(), torch.ones(8, 32), MemSave(microbatch=2), **settings)


def test_not_beside_a_process_group():
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(ValueError, match=r"devices.*process group"):
            predict(BoringModel(), torch.ones(8, 32), devices=2)
    finally:
        dist.destroy_process_group()


def test_private_names_of_torch():
    assert {"inputs", "kwargs"} <= set(inspect.signature(nn.parallel.DistributedDataParallel._pre_forward).parameters)
    assert "_rebuild_buckets" in inspect.getsource(nn.parallel.DistributedDataParallel._pre_forward)
    with _disable_current_modes():
        assert torch.ones(1).item() == 1
