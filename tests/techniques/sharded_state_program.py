"""Optimizer state on shards (FSDP2) in two processes on CPU (gloo), run by `test_sharded_state.py`; rank 0 prints `ok`.

The referees are unsharded: each process also trains the whole model on the whole batch, plainly and with the format.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_leaves

from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    estimate_optimizer_state,
)
from lightning_memsave.techniques.optimizer_state.quantized import memory_of
from lightning_memsave.torch_internals import optimizer_class

FORMATS = {
    "8bit": OptimizerState(),
    "4bit": OptimizerState(first_moment="4bit"),
    "fp8": OptimizerState(first_moment="fp8"),
    "8bit-factored": OptimizerState(second_moment="factored"),
    "5bit-factored": OptimizerState(first_moment="5bit", second_moment="factored"),
    "host": OptimizerState(placement="host"),
}
NUM_STEPS = 10


class Net(nn.Module):
    """Uneven shards (`odd`, `head`), an empty one on rank 1 (`gate`), and a parameter without gradient (`spare`)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(211, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)
        )
        self.odd, self.gate = nn.Linear(64, 101), nn.Linear(4096, 1, bias=False)
        self.head, self.spare = nn.Linear(101, 67), nn.Linear(64, 66)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.odd(x * (0.5 + torch.sigmoid(self.gate(x.flatten(1)))[:, :, None])))


def make(is_sharded: bool, by_columns: bool = False) -> Net:
    torch.manual_seed(0)
    net = Net()
    if is_sharded:
        options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        if by_columns:
            options["shard_placement_fn"] = lambda p: Shard(p.dim() - 1 if p.shape[-1] % 2 == 0 else 0)
        for block in net.blocks:
            fully_shard(block, **options)
        fully_shard(net, **options)
    return net


def batch(step: int, is_sharded: bool) -> Tensor:
    ids = torch.randint(0, 211, (8, 64), generator=torch.Generator().manual_seed(step))
    return ids[dist.get_rank() :: dist.get_world_size()] if is_sharded else ids


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range, num_parts: int = 1) -> None:
    for step in steps:
        for part in batch(step, isinstance(net.head.weight, DTensor)).chunk(num_parts):
            (F.cross_entropy(net(part).flatten(0, 1), (part % 67).flatten()) / num_parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def adamw(net: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), 3e-3)


def trained(config: OptimizerState | None, is_sharded: bool, by_columns: bool = False, **options):
    net = make(is_sharded, by_columns)
    optimizer = adamw(net)
    if config is not None:
        apply_optimizer_state(optimizer, config, net)
    train(net, optimizer, range(NUM_STEPS), **options)
    return net, optimizer


def whole(net: Net) -> Tensor:
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in net.parameters()])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for state in optimizer.state.values() for t in tree_leaves(dict(state)) if isinstance(t, Tensor)]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors if t.dim())


def kinds(optimizer: torch.optim.Optimizer, net: Net) -> dict[str, str]:
    return {n: type(optimizer.state[p]["exp_avg"]).__name__ for n, p in net.named_parameters() if p in optimizer.state}


def check_formats() -> None:
    """Sharded and unsharded are no further apart than the format's own noise."""
    plain = whole(trained(None, False)[0])
    for name, config in FORMATS.items():
        for by_columns in (False, True):
            net, optimizer = trained(config, True, by_columns)
            one_net, one = trained(config, False)
            noise = distance(whole(one_net), plain)
            assert distance(whole(net), whole(one_net)) <= 1.5 * noise + 1e-6, (name, by_columns)
            assert distance(whole(net), plain) <= 1.5 * noise + 1e-6, (name, by_columns)
            assert (name == "host") == (noise == 0), name
            decided = kinds(optimizer, net)
            empty = {n for n, p in net.named_parameters() if not p.to_local().numel()}
            assert empty == ({"gate.weight"} if dist.get_rank() and not by_columns else set())
            for n, kind in kinds(one, one_net).items():  # what is low-bit is decided by the whole parameter
                assert decided[n] == ("DTensor" if n in empty or kind == "Tensor" else kind), (name, n)


def check_bytes() -> None:
    """Each process keeps what was estimated for its shards: of all parameters, also where its own shard is small."""
    for name, config in FORMATS.items():
        net = make(True)
        optimizer = adamw(net)
        expected = estimate_optimizer_state(optimizer, config, net)
        apply_optimizer_state(optimizer, config, net)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert state_bytes(optimizer) == expected, name
        if name == "8bit":
            at_best = 2 * (1 + 4 / 256) * sum(p.to_local().numel() for p in net.parameters())
            kept = sum(p.to_local().numel() for n, p in net.named_parameters() if p.numel() < 4096 or "table" in n)
            assert at_best < expected < at_best + 6 * kept + 2 * 4 * len(list(net.parameters()))


def check_parts() -> None:
    """A shard that steps in parts, and one that has a gradient less than others, as when it steps at once."""
    sizes, optimizer_class.PART_NUMEL["cpu"] = optimizer_class.PART_NUMEL["cpu"], 2048
    try:
        in_parts = {name: whole(trained(config, True)[0]) for name, config in FORMATS.items()}
    finally:
        optimizer_class.PART_NUMEL["cpu"] = sizes
    plain = whole(trained(None, True)[0])
    for name, config in FORMATS.items():
        noise = distance(whole(trained(config, True)[0]), plain)
        assert distance(in_parts[name], plain) <= 1.5 * noise + 1e-6, name


def check_noise() -> None:
    """Each process rounds with noise of its own; a whole parameter has the noise that it has without a mesh."""
    net, optimizer = trained(FORMATS["8bit"], True)
    memory, p = memory_of(optimizer), net.blocks[0][1].weight
    seeds: list[int] = [0, 0]
    dist.all_gather_object(seeds, memory.noise_of(optimizer_class.local_of(p)).seed)
    assert len({*seeds, memory.noise_of(p).seed}) == 2
    assert seeds[0] == memory.noise_of(p).seed


def check_state_dicts() -> None:
    """State dicts, sharded and whole: bit for bit what they were saved from, for ours and for plain torch."""
    for name, config in FORMATS.items():
        net, optimizer = trained(config, True)
        for is_full in (False, True):
            options = StateDictOptions(full_state_dict=is_full, strict=False)  # `spare` has no state
            saved = get_optimizer_state_dict(net, optimizer, options=options)
            moment = saved["state"]["blocks.0.1.weight"]["exp_avg"]
            assert isinstance(moment, DTensor) != is_full
            assert moment.shape == (256, 64)
            again = adamw(net)
            apply_optimizer_state(again, config, net)
            plain = adamw(net)
            for other in (again, plain):
                set_optimizer_state_dict(net, other, saved, options=options)
                found = get_optimizer_state_dict(net, other, options=options)["state"]
                bound = 1e-6 if "factored" in name and other is again else 0
                for key, entries in saved["state"].items():
                    for entry in ("exp_avg", "exp_avg_sq"):
                        torch.testing.assert_close(found[key][entry], entries[entry], rtol=bound, atol=0)
            assert memory_of(again).num_steps == memory_of(optimizer).num_steps == NUM_STEPS
        before = {id(p): p.detach().clone() for p in net.parameters()}
        train(net, optimizer, range(NUM_STEPS, NUM_STEPS + 3))
        expected = whole(net)
        for p in net.parameters():
            p.data.copy_(before[id(p)])
        train(net, again, range(NUM_STEPS, NUM_STEPS + 3))
        if "factored" in name:
            assert distance(whole(net), expected) < 1e-6
        else:
            assert torch.equal(whole(net), expected), name


def check_undo() -> None:
    """Undone, the state is torch's own: sharded, in float32, and it steps."""
    net = make(True)
    optimizer = adamw(net)
    applied = apply_optimizer_state(optimizer, FORMATS["4bit"], net)
    train(net, optimizer, range(3))
    applied.undo()
    assert type(optimizer) is torch.optim.AdamW
    for p, state in optimizer.state.items():
        assert isinstance(state["exp_avg"], DTensor)
        assert state["exp_avg"].shape == p.shape
    train(net, optimizer, range(3, 5))


def check_gradients() -> None:
    """Release: the bits of keeping gradients, and none after backward. Into the state: exact for SGD."""
    found = {}
    for gradients in ("keep", "release"):
        net = make(True)
        optimizer = adamw(net)
        apply_optimizer_state(optimizer, OptimizerState(gradients=gradients), net)
        train(net, optimizer, range(4))
        ids = batch(4, True)
        F.cross_entropy(net(ids).flatten(0, 1), (ids % 67).flatten()).backward()
        assert all((p.grad is None) == (gradients == "release") for n, p in net.named_parameters() if "spare" not in n)
        optimizer.step()
        found[gradients] = whole(net)
    assert torch.equal(found["keep"], found["release"])

    ends = {}
    for gradients in ("keep", "into-state"):
        net = make(True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        if gradients == "into-state":
            apply_optimizer_state(optimizer, OptimizerState(first_moment="32bit", gradients=gradients), net)
        train(net, optimizer, range(6), num_parts=2)
        ends[gradients] = whole(net)
    torch.testing.assert_close(ends["keep"], ends["into-state"], rtol=1e-5, atol=1e-6)


def check_summands() -> None:
    """Tensor parallelism leaves a gradient in summands, of which each process has one: they are added up."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ends = {}
    for kind in ("whole", "plain", *FORMATS, "into-state"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        if kind != "whole":
            plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()}
            parallelize_module(net, mesh, plan)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        if kind == "into-state":
            apply_optimizer_state(optimizer, OptimizerState(first_moment="32bit", gradients=kind), net)
        elif kind in FORMATS and "factored" not in kind:
            apply_optimizer_state(optimizer, replace(FORMATS[kind], min_size=1, keep_norms_32bit=False), net)
        for step in range(4):
            x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(step))
            net(x).square().mean().backward()
            if kind == "plain":
                assert not all(p.grad.placements == p.placements for p in net.parameters())
            optimizer.step()
            optimizer.zero_grad()
        ends[kind] = whole(net)
    start = whole(nn.Sequential(nn.LayerNorm(64)))
    for kind, end in ends.items():
        norm, expected = end[:128], ends["whole"][:128]
        assert float((norm - expected).norm()) <= 0.25 * float((expected - start).norm()), kind  # of one summand: half
        of_both = [torch.zeros_like(end) for _ in range(2)]
        dist.all_gather(of_both, end)
        assert torch.equal(*of_both), kind


def check_refused() -> None:
    net = make(True)
    for config, message in (
        (OptimizerState(projection="galore"), "OptimizerState.projection.*whole gradient"),
        (OptimizerState(projection="apollo"), "OptimizerState.projection.*whole gradient"),
        (OptimizerState(backend="bitsandbytes"), "OptimizerState.backend.*DTensor"),
        (OptimizerState(placement="paged"), "OptimizerState.placement.*DTensor"),
        (OptimizerState(checkpoint="compact"), "OptimizerState.checkpoint.*two shards"),
    ):
        optimizer = adamw(net)
        with pytest.raises(ValueError, match=message):
            apply_optimizer_state(optimizer, config, net)
        assert type(optimizer) is torch.optim.AdamW


def run(*checks: Callable[[], None]) -> None:
    """Run checks in every process; rank 0 names those that passed, and prints `ok` at the end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check in checks:
        check()
        if dist.get_rank() == 0:
            print(check.__name__, file=sys.stderr)
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(
        *(check_formats, check_bytes, check_parts, check_noise, check_state_dicts, check_undo),
        *(check_gradients, check_summands, check_refused),
    )
