"""What activation compression costs where kernels take microseconds: CPU time of a step on one thread, in pairs.

Hooks and a function mode that do nothing are the least that any such method costs.
"""

from __future__ import annotations

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.harness.measurement import Subject, environment, measure_cpu_seconds, time_columns, write_rows
from benchmarks.models.subjects import PlainGPT, next_token_loss
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore

NUM_STEPS = 60
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_rows("launch_bound", [*gpt_rows(2, 16, 1024), *gpt_rows(1, 8, 1)])
