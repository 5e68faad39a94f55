"""What memory saving costs where kernels take microseconds: CPU time of a step on one thread, in pairs.

Activation compression, beside hooks and a function mode that do nothing, which are the least that any such method
costs; and `MemSave()` in Lightning's loop, in batches in which nothing is cut and nothing measured, beside a callback
that does nothing.
"""

from __future__ import annotations

import contextlib

import lightning as L
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from benchmarks.harness.measurement import Subject, environment, measure_cpu_seconds, time_columns, write_rows
from benchmarks.harness.taking_turns import seconds_of_batches
from benchmarks.models.subjects import PlainGPT, next_token_loss
from lightning_memsave import MemSave
from lightning_memsave.demo.run import _quiet
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore

NUM_STEPS = 60
NUM_BATCHES, NUM_SKIPPED = 199, 9  # the first ones warm up, or are measured; so is the 200th
SETTINGS = {
    "exact": {"recompute": True},
    "int4": {"lossy": Fidelity.INT4},
    "exact and int4": {"recompute": True, "lossy": Fidelity.INT4},
}


class Nothing(TorchFunctionMode):
    """A function mode that only calls."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooks():
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), Nothing():
        yield


def gpt_rows(batch_size: int, context: int, min_numel: int) -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = PlainGPT(12, 64, 4, context, dropout=0.0)
    ids = torch.randint(0, 256, (batch_size, context))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scopes = {"baseline": contextlib.nullcontext, "hooks alone": hooks}
    scopes |= {name: SavedTensorStore(**options, min_numel=min_numel).scope for name, options in SETTINGS.items()}

    def subject(setting: str) -> Subject:
        def step() -> None:
            with scopes[setting]():
                loss = next_token_loss(model(ids), ids)
            loss.backward()
            model.zero_grad()

        return Subject(setting, model, optimizer, ids, step)

    seconds = measure_cpu_seconds(list(map(subject, scopes)), NUM_STEPS)
    size = "every tensor" if min_numel == 1 else f"tensors of {min_numel} elements and more"
    return [
        {
            "benchmark": "launch_bound",
            "model": f"GPT, 12 layers, width 64, batch {batch_size} x {context}; {size}",
            "setting": setting,
            **time_columns(taken, seconds[0]),
            **environment(),
        }
        for setting, taken in zip(scopes, seconds, strict=True)
    ]


class Net(L.LightningModule):
    """A network whose loss is a mean of squares of what it returns, or next-token loss for integers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor) -> Tensor:
        output = self.network(batch)
        return output.square().mean() if batch.is_floating_point() else next_token_loss(output, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class LastOutput(nn.Module):
    """An LSTM, of which the last output is read."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def conv_net(depth: int) -> nn.Module:
    layers = ((nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(*(module for block in layers for module in block))


LOOPS = {
    "2 linears, width 16, batch 4": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        lambda: torch.randn(4, 8),
    ),
    "LSTM, width 16, batch 4 x 8": (LastOutput, lambda: torch.randn(4, 8, 8)),
    "12 convolutions with BatchNorm, width 8, batch 2": (lambda: conv_net(12), lambda: torch.randn(2, 8, 8, 8)),
    "GPT, 12 layers, width 64, batch 1 x 8": (
        lambda: PlainGPT(12, 64, 4, 8, dropout=0.0),
        lambda: torch.randint(0, 256, (1, 8)),
    ),
}
FIRST = "not counted: it takes longer in the place of the first"
CALLBACKS = {
    FIRST: list,
    "baseline": list,
    "a callback that does nothing": lambda: [L.Callback()],
    'MemSave("measure")': lambda: [MemSave("measure", summary=False)],
    "MemSave()": lambda: [MemSave(summary=False)],
}


def loop_rows(name: str) -> list[dict[str, object]]:
    make, draw = LOOPS[name]

    def fit(callbacks: list[L.Callback]) -> None:
        torch.manual_seed(0)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, callbacks=callbacks, **options)
        trainer.fit(Net(make()), DataLoader([draw() for _ in range(NUM_BATCHES)], batch_size=None))

    with _quiet():
        seconds = {setting: taken[NUM_SKIPPED:] for setting, taken in seconds_of_batches(fit, CALLBACKS).items()}
    del seconds[FIRST]
    return [
        {
            "benchmark": "launch_bound_loop",
            "model": name,
            "setting": setting,
            **time_columns(taken, seconds["baseline"]),
            **environment(),
        }
        for setting, taken in seconds.items()
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_rows("launch_bound_loop", [row for name in LOOPS for row in loop_rows(name)])
    write_rows("launch_bound", [*gpt_rows(2, 16, 1024), *gpt_rows(1, 8, 1)])
