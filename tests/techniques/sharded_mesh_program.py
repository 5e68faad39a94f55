"""Optimizer state on meshes of two dimensions, in four processes on CPU (gloo), run by `test_sharded_state.py`.

Replicated shards (HSDP), and FSDP2 over tensor parallelism. Rank 0 prints `ok`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state
from tests.techniques.sharded_state_program import FORMATS, adamw, distance, run, whole


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 384), nn.Linear(384, 96)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def trained(kind: str, config: OptimizerState | None) -> tuple[nn.Module, torch.optim.Optimizer, DeviceMesh]:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(96, 66))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    if kind == "tensor parallel":
        for block in net[:3]:
            parallelize_module(block, mesh["second"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["first"])
        fully_shard(net, mesh=mesh["first"])
        number, num = mesh["first"].get_local_rank(), 2
    elif kind == "whole":
        number, num = 0, 1
    else:
        for part in (*net[:3], net):
            fully_shard(part, mesh=mesh)
        number, num = dist.get_rank(), 4
    optimizer = adamw(net)
    if config is not None:
        apply_optimizer_state(optimizer, config, net)
    for step in range(10):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(step))[number::num]
        (net(x) - torch.sin(x[:, :66] * 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer, mesh


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    found = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found


def check_meshes() -> None:
    """As the whole, within the format's noise; replicas are equal to the bit, and shards round with other noise."""
    plain = whole(trained("whole", None)[0])
    noise = {name: distance(whole(trained("whole", config)[0]), plain) for name, config in FORMATS.items()}
    for kind in ("replicas", "tensor parallel"):
        for name, config in FORMATS.items():
            net, optimizer, mesh = trained(kind, config)
            assert distance(whole(net), plain) <= 1.5 * noise[name] + 1e-6, (kind, name)
            p = net[0].up.weight
            assert isinstance(p, DTensor)
            moment = optimizer.state[p]["exp_avg"]
            if name == "host":
                continue
            weights, codes = p.to_local().detach(), moment.codes
            of_replicas = gathered(codes, mesh["first"].get_group())  # HSDP: what is sharded is the second dimension
            of_shards = gathered(codes, mesh["second"].get_group())
            assert torch.equal(*of_replicas) == (kind == "replicas")
            assert not torch.equal(*of_shards)
            if kind == "replicas":
                assert torch.equal(*gathered(weights, mesh["first"].get_group())), name


if __name__ == "__main__":
    run(check_meshes)
