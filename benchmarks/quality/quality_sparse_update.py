"""What a sparse update reaches in fine-tuning, five seeds each, beside full training and what one freezes by hand.

A network of six convolutions learns the digits 0 to 4 of scikit-learn's 8 x 8 images, and is then trained on 200 images
of 5 to 9. A minute on 1 core.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.harness.measurement import Subject, environment, measure_memory, save_rows
from benchmarks.memory_time.bench_sparsity import held_bytes
from lightning_memsave import SparseUpdate, apply_sparse_update, plan_sparse_update

SEEDS = (0, 1, 2, 3, 4)
BATCH, NUM_TRAIN, NUM_TEST, NUM_STEPS_BEFORE = 32, 200, 300, 1000
WIDTHS = (1, 16, 32, 32, 64, 64, 64)
BUDGETS = (0.05, 0.1, 0.2, 0.4)
BY_HAND = {
    "head": SparseUpdate(layers={"15": 1.0}),
    "head and biases": SparseUpdate(layers={"15": 1.0}, biases=("*",)),
    "last two convolutions and head": SparseUpdate(layers={"8": 1.0, "10": 1.0, "15": 1.0}),
}


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(WIDTHS)):
        layers += [nn.Conv2d(before, after, 3, 2 if number in (2, 4) else 1, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(WIDTHS[-1], 5))


Images = tuple[Tensor, Tensor]


def images(first: int, seed: int) -> tuple[Images, Images]:
    """Five digits from `first` on: those to train on, and those to test with."""
    found = load_digits()
    wanted = (found.target >= first) & (found.target < first + 5)
    x = torch.tensor(found.images[wanted]).float()[:, None] / 8 - 1
    y = torch.tensor(found.target[wanted]) - first
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    return (x[:-NUM_TEST], y[:-NUM_TEST]), (x[-NUM_TEST:], y[-NUM_TEST:])


def fit(model: nn.Module, data: Images, num_steps: int, lr: float, seed: int) -> Subject:
    """Train with momentum and a cosine, and return the last step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5 + 0.5 * math.cos(math.pi * t / num_steps))
    batch = data[0][:BATCH].clone(), data[1][:BATCH].clone()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    for _ in range(num_steps):
        chosen = torch.randint(0, len(data[0]), (BATCH,), generator=generator)
        batch[0].copy_(data[0][chosen])
        batch[1].copy_(data[1][chosen])
        step()
        schedule.step()
    return Subject("", model, optimizer, batch, step)


def accuracy(model: nn.Module, data: Images) -> float:
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


def training_bytes(model: nn.Module, batch: Images) -> int:
    """What training takes besides the network: kept tensors, values of their own, gradients and momentum."""
    lasting = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        F.cross_entropy(model(batch[0]), batch[1])
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    own = sum(t.nbytes for name, t in model.named_parameters() if name.endswith("values"))
    waiting = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in lasting)
    return waiting + own + 8 * num_trained


def planned(model: nn.Module, data: Images, budget: float) -> SparseUpdate:
    parts = [(x, y) for x, y in zip(data[0].split(BATCH)[:4], data[1].split(BATCH)[:4], strict=True)]
    losses = [lambda x=x, y=y: F.cross_entropy(model(x), y) for x, y in parts]
    return plan_sparse_update(model, losses, SparseUpdate(budget=budget), state_bytes=4)


def run(base: nn.Module, setting: str, seed: int) -> dict[str, Any]:
    (x, y), test = images(5, seed)
    train = x[:NUM_TRAIN], y[:NUM_TRAIN]
    model = copy.deepcopy(base)
    if setting.startswith("budget"):
        apply_sparse_update(model, planned(model, train, float(setting.split()[1])))
    elif setting != "full":
        apply_sparse_update(model, BY_HAND[setting])
    start = time.process_time()
    subject = fit(model, train, 200, 0.02, seed)
    seconds = time.process_time() - start
    return {
        "num_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "training_bytes": training_bytes(model, subject.batch),
        "held_bytes": held_bytes(subject)["held_bytes"],
        "quality_value": accuracy(model, test),
        "peak_bytes": measure_memory(subject, workspace=False)["peak_bytes"],
        "cpu_seconds_run": seconds,
    }


def main() -> None:
    torch.set_num_threads(1)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    settings = ["full", *BY_HAND, *(f"budget {budget}" for budget in BUDGETS)]
    for seed in SEEDS:
        torch.manual_seed(seed)
        base = network()
        fit(base, images(0, seed)[0], NUM_STEPS_BEFORE, 0.05, seed)
        base[-1] = nn.Linear(WIDTHS[-1], 5)
        for setting in settings:
            found[setting, seed] = run(base, setting, seed)
            print(setting, seed, found[setting, seed], flush=True)
    rows = []
    for setting, seed in itertools.product(settings, SEEDS):
        row, full = found[setting, seed], found["full", seed]
        rows.append(
            {
                "benchmark": "sparse_update_digits",
                "model": f"six convolutions, 16 to 64 channels, 8 x 8 images, batch {BATCH}, SGD momentum, 200 steps",
                "setting": setting,
                "seed": seed,
                **row,
                "factor": full["peak_bytes"] / row["peak_bytes"],
                "cpu_time_ratio": row["cpu_seconds_run"] / full["cpu_seconds_run"],
                "quality": "accuracy on 300 images of the digits 5 to 9, after 0 to 4",
                **environment(),
            }
        )
    save_rows("sparse_update_digits", rows)


if __name__ == "__main__":
    main()
