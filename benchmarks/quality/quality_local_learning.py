"""Local learning, as NeuroFlux trains, beside what this package does to a model as it is: peak, accuracy and time.

A WideResNet-16-2 on scikit-learn's digits at 16 x 16 pixels. In local learning the network is cut into parts that keep
about the same bytes. Each part is trained by a head of its own on what the part before gave, and its backward pass ends
there, so one part's activations are alive at a time. That changes the model: parts do not learn what later ones need.
Different from NeuroFlux (https://arxiv.org/abs/2402.14139): every part sees every batch, no outputs are cached on disk,
and parts have one batch size. Three seeds; about 15 minutes on 1 core. Rows that are there are kept.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.measurement import Subject, environment, measure_memory, put_row, read_rows
from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    apply_activation_compression,
    apply_checkpointing,
    microbatches,
)
from lightning_memsave.demo.data import load_digits_32
from lightning_memsave.demo.model import WideResNet

NAME = "local_learning"
SEEDS = (0, 1, 2)
BATCH, NUM_STEPS, LEARNING_RATE, NUM_CLASSES = 64, 150, 0.05, 10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the network is trained."""

    parts: int = 1
    """Of local learning; 1: one loss for the whole network."""
    codecs: tuple[str, ...] = ()
    blocks: bool = False
    microbatch: int = BATCH


SETTINGS = {
    "plain": Setting(),
    "local, 2 parts": Setting(parts=2),
    "local, 4 parts": Setting(parts=4),
    "exact": Setting(codecs=("exact",)),
    "blocks": Setting(blocks=True),
    "exact, blocks": Setting(codecs=("exact",), blocks=True),
    "int4-chain": Setting(codecs=("int4-chain",)),
    "int4-chain, microbatch 16": Setting(codecs=("int4-chain",), microbatch=16),
}
Batch = tuple[Tensor, Tensor]


class Tail(nn.Module):
    """What comes behind the last block."""

    def __init__(self, network: WideResNet) -> None:
        super().__init__()
        self.bn, self.head = network.bn, network.head

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 10]."""
        return self.head(F.adaptive_avg_pool2d(F.relu(self.bn(x)), 1).flatten(1))  # type: ignore[no-any-return]


def units_of(network: WideResNet) -> list[nn.Module]:
    """The network as modules that follow each other."""
    return [network.stem, *itertools.chain(*network.groups), Tail(network)]


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """What waits for backward behind a module, its weights aside."""
    kept: dict[int, int] = {}
    own = {p.data_ptr() for p in module.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        held = module(x)
    del held
    return sum(kept.values())


def parts_of(units: list[nn.Module], x: Tensor, num_parts: int) -> list[nn.Sequential]:
    """Cut where what is kept so far passes the next of `num_parts` equal shares."""
    sizes = []
    for unit in units:
        sizes.append(kept_bytes(unit, x))
        with torch.no_grad():
            x = unit(x)
    ends = [0]
    for number, total in enumerate(itertools.accumulate(sizes), 1):
        if total >= len(ends) * sum(sizes) / num_parts and len(ends) < num_parts and number < len(units):
            ends.append(number)
    return [nn.Sequential(*units[a:b]) for a, b in itertools.pairwise([*ends, len(units)])]


def heads_of(parts: list[nn.Sequential], x: Tensor) -> nn.ModuleList:
    """A head for each part: the last one's is the network's own, which is in the part."""
    heads = nn.ModuleList()
    with torch.no_grad():
        for part in parts[:-1]:
            x = part(x)
            heads.append(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * x.shape[1], NUM_CLASSES)))
    return heads.append(nn.Identity())


class Trained(nn.Module):
    """A network with the heads of its parts."""

    def __init__(self, network: WideResNet, parts: list[nn.Sequential], heads: nn.ModuleList) -> None:
        super().__init__()
        self.network, self.heads = network, heads
        self._parts = tuple(parts)  # their modules are the network's

    def backward(self, x: Tensor, labels: Tensor, weight: float) -> None:
        """Run forward and backward, a part at a time."""
        for part, head in zip(self._parts, self.heads, strict=True):
            x = part(x.detach())
            (F.cross_entropy(head(x), labels) * weight).backward()


def subject_of(name: str, seed: int, batch: Batch) -> Subject:
    setting = SETTINGS[name]
    torch.manual_seed(seed)
    network = WideResNet(depth=16)
    network.train()
    state = {key: value.clone() for key, value in network.state_dict().items()}
    parts = parts_of(units_of(network), batch[0], setting.parts)
    heads = heads_of(parts, batch[0])
    network.load_state_dict(state)  # statistics of normalisation have moved
    if setting.codecs:
        apply_activation_compression(network, ActivationCompression(codecs=setting.codecs))
    if setting.blocks:
        apply_checkpointing(network, Checkpointing.from_shorthand("blocks"))
    model = Trained(network, parts, heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    whole = _whole(network) if setting.parts == 1 else model.backward

    def step() -> None:
        optimizer.zero_grad()
        for (x, labels), weight in microbatches(batch, size=setting.microbatch):
            whole(x, labels, weight)
        optimizer.step()

    return Subject(name, model, optimizer, batch, step)


def _whole(network: WideResNet) -> Callable[[Tensor, Tensor, float], None]:
    """One loss for the network, called as a whole, as techniques that are applied to it see it."""

    def backward(x: Tensor, labels: Tensor, weight: float) -> None:
        (F.cross_entropy(network(x), labels) * weight).backward()

    return backward


def images(seed: int) -> tuple[Batch, Batch]:
    train, test = ((F.avg_pool2d(part.tensors[0], 2), part.tensors[1]) for part in load_digits_32(seed))
    return train, test


def train(name: str, seed: int) -> dict[str, float]:
    (x, labels), (test, test_labels) = images(seed)
    batch = x[:BATCH].clone(), labels[:BATCH].clone()
    sizes = measure_memory(subject_of(name, seed, batch), workspace=False)
    subject, generator = subject_of(name, seed, batch), torch.Generator().manual_seed(seed)
    start = time.process_time()
    for step in range(NUM_STEPS):
        for group in subject.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (0.5 + 0.5 * math.cos(math.pi * step / NUM_STEPS))
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        batch[0].copy_(x[chosen])
        batch[1].copy_(labels[chosen])
        subject.step()
    seconds = time.process_time() - start
    network: WideResNet = subject.model.network
    network.eval()
    with torch.no_grad():
        accuracy = float((network(test).argmax(1) == test_labels).float().mean())
    return {**sizes, "quality_value": accuracy, "cpu_seconds_run": seconds}


def main() -> None:
    torch.set_num_threads(1)
    for seed, name in itertools.product(SEEDS, SETTINGS):
        known = [row for row in read_rows(NAME) if row["seed"] == str(seed)]
        if any(row["setting"] == name for row in known):
            continue
        found = train(name, seed)
        plain = next((row for row in known if row["setting"] == "plain"), found)
        row = {
            "benchmark": NAME,
            "model": f"WideResNet-16-2, digits 16 x 16, batch {BATCH}, SGD momentum, {NUM_STEPS} steps, cosine",
            "setting": name,
            "seed": seed,
            **found,
            "factor": float(plain["peak_bytes"]) / found["peak_bytes"],
            "cpu_time_ratio": found["cpu_seconds_run"] / float(plain["cpu_seconds_run"]),
            "quality": "test accuracy, fraction of 360 images",
            **environment(),
        }
        put_row(NAME, row, ("setting", "seed"))
        print(name, seed, found, flush=True)


if __name__ == "__main__":
    main()
