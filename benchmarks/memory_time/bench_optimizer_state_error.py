"""The optimizer's step alone: the error of every format of state against float64 AdamW, its time and its temporaries.

Beside bitsandbytes, torchao and optimi where they are installed. Errors: 65,536 parameters, 200 steps of fixed
gradients; `even`: all of one size; `uneven`, `wide`: each element's gradient has a size of its own, over two or four
decades. Times: 10 parameters of 1024 x 1024, and 200 of 8 x 64, whose time is that of calls; one thread, CPU seconds,
taking turns with torch's AdamW. Temporaries: the largest number of bytes alive during a step of one parameter of 2**22
elements, besides what is held before and after.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.harness.measurement import environment, save_rows
from lightning_memsave import OptimizerState, allocation_peak, apply_optimizer_state

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torchao without its compiler; its errors are the same
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

ALL: dict[str, Any] = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
OURS = {
    "8bit": OptimizerState(backend="own", **ALL),
    "4bit": OptimizerState(first_moment="4bit", **ALL),
    "fp8": OptimizerState(first_moment="fp8", **ALL),
    "factored": OptimizerState(second_moment="factored", **ALL),
    "5bit-factored": OptimizerState(first_moment="5bit", second_moment="factored", **ALL),
    "4bit-factored": OptimizerState(first_moment="4bit", second_moment="factored", **ALL),
    "lowrank, rank 64": OptimizerState(projection="galore", rank=64, **ALL),
    "apollo, rank 64": OptimizerState(projection="apollo", rank=64, **ALL),
    "offload": OptimizerState(placement="host", **ALL),
    "32bit, into-state": OptimizerState(first_moment="32bit", gradients="into-state", **ALL),
}
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SETTINGS = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


def peers() -> dict[str, Build]:
    found: dict[str, Build] = {}
    if find_spec("bitsandbytes"):
        import bitsandbytes

        found["bitsandbytes AdamW8bit"] = lambda p: bitsandbytes.optim.AdamW8bit(p, min_8bit_size=0, **SETTINGS)
    if find_spec("torchao"):
        from torchao import optim

        found["torchao AdamW8bit"] = lambda p: optim.AdamW8bit(p, **SETTINGS)
        found["torchao AdamW4bit"] = lambda p: optim.AdamW4bit(p, **SETTINGS)
        found["torchao AdamWFp8"] = lambda p: optim.AdamWFp8(p, **SETTINGS)
    if find_spec("optimi"):
        import optimi

        found["optimi AdamW"] = lambda p: optimi.AdamW(p, **SETTINGS)
    return found


def ours(config: OptimizerState) -> Build:
    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, **SETTINGS)
        apply_optimizer_state(optimizer, config, nn.ParameterList(parameters))
        return optimizer

    return build


BUILDS: dict[str, Build] = {
    "float32": lambda p: torch.optim.AdamW(p, **SETTINGS),
    "float32, foreach": lambda p: torch.optim.AdamW(p, foreach=True, **SETTINGS),
    "float32, fused": lambda p: torch.optim.AdamW(p, fused=True, **SETTINGS),
    **{name: ours(config) for name, config in OURS.items()},
    **peers(),
}


# ------------------------------------------------------------------------------- errors
DECADES = {"even": 0, "uneven": 2, "wide": 4}


def gradients(decades: int, num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = 10 ** (decades * torch.rand(256, 256, generator=generator) - decades) if decades else torch.ones(256, 256)
    return [torch.randn(256, 256, generator=generator) * sizes for _ in range(num_steps)]


def exact(given: list[Tensor]) -> Tensor:
    """AdamW in float64, written out."""
    p, first, second = (torch.zeros(256, 256, dtype=torch.float64) for _ in range(3))
    for count, gradient in enumerate(given, start=1):
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.999 * second + 0.001 * gradient.double() ** 2
        p -= 1e-3 * (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)
    return p


def error_of(build: Build, given: list[Tensor], expected: Tensor) -> tuple[float, float]:
    """Relative L2 error and largest error, the latter over the root mean square of what is exact."""
    p = nn.Parameter(torch.zeros(256, 256))
    optimizer = build([p])
    for gradient in given:
        if hook := p._post_accumulate_grad_hooks:  # gradients go into the state: through a backward
            assert hook
            (p * gradient).sum().backward()
        else:
            p.grad = gradient.clone()
        optimizer.step()
    error = p.detach().double() - expected
    scale = expected.square().mean().sqrt()
    return float(error.norm() / expected.norm()), float(error.abs().max() / scale)


# ------------------------------------------------------------------------------- bytes and time
def state_bytes_per_parameter(build: Build) -> float:
    p = nn.Parameter(torch.zeros(1024, 1024))
    optimizer = build([p])
    (p * torch.ones(1024, 1024)).sum().backward()
    optimizer.step()
    leaves = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, Tensor) and t.dim()]
    flat = [inner for t in leaves for inner in _inner(t)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in flat}.values()) / p.numel()


def _inner(tensor: Tensor) -> list[Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    return [tensor]


def transient_bytes_per_element(build: Build) -> float:
    p = nn.Parameter(torch.zeros(2048, 2048))
    optimizer = build([p])

    def step() -> None:
        p.grad = gradient
        optimizer.step()

    gradient = torch.randn(2048, 2048)
    step()
    return allocation_peak(step, 0) / p.numel()


def step_seconds(builds: dict[str, Build], count: int, *shape: int, repeats: int = 5) -> dict[str, list[float]]:
    subjects = {}
    for name, build in builds.items():
        parameters = [nn.Parameter(torch.randn(shape)) for _ in range(count)]
        subjects[name] = parameters, build(parameters)
    given = [torch.randn(shape) for _ in range(count)]
    seconds: dict[str, list[float]] = {name: [] for name in builds}
    for turn in range(repeats + 1):
        for name, (parameters, optimizer) in subjects.items():
            for p, gradient in zip(parameters, given, strict=True):
                p.grad = gradient
            start = time.process_time()
            optimizer.step()
            if turn:
                seconds[name].append(time.process_time() - start)
    return seconds


def main() -> None:
    torch.set_num_threads(1)
    timed = {name: build for name, build in BUILDS.items() if "into-state" not in name}
    seconds, of_small = step_seconds(timed, 10, 1024, 1024), step_seconds(timed, 200, 8, 64, repeats=9)
    given = {kind: gradients(decades, 200) for kind, decades in DECADES.items()}
    expected = {kind: exact(each) for kind, each in given.items()}
    rows = []
    for name, build in BUILDS.items():
        row = {
            "benchmark": "optimizer_state_error",
            "setting": name,
            "state_bytes_per_parameter": state_bytes_per_parameter(build),
        }
        for kind in DECADES:
            relative, largest = error_of(build, given[kind], expected[kind])
            row |= {f"{kind}_relative_error": relative, f"{kind}_largest_error": largest}
        if name in seconds:
            ratios = [a / b for a, b in zip(seconds[name], seconds["float32"], strict=True)]
            row |= {
                "cpu_seconds": statistics.median(seconds[name]),
                "cpu_time_ratio": statistics.median(ratios),
                "cpu_us_per_parameter": statistics.median(of_small[name]) / 200 * 1e6,
                "transient_bytes_per_element": transient_bytes_per_element(build),
            }
        rows.append(row | environment())
        print(row, flush=True)
    save_rows("optimizer_state_error", rows)


if __name__ == "__main__":
    main()
