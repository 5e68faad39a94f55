"""Checkpointing beside torch's own: memory and time against depth, a 1000-layer ResNet, and with codecs.

Names of results (`blocks`, `depth`, `resnet1000`, `codecs`) as arguments run only these. A step of `depth` and
`resnet1000` is forward and backward onto gradients that exist before, so that the peak less weights and gradients is
what the technique can change. Budgets: `bench_checkpointing_budget.py`.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from benchmarks.harness.measurement import (
    Subject,
    compare,
    environment,
    measure_cpu_seconds,
    measure_kept_bytes,
    measure_memory,
    measured_rows,
    time_columns,
    write_rows,
)
from benchmarks.models.subjects import (
    Bottleneck,
    ResidualBlock,
    deep_chain,
    gpt,
    gradients,
    plain_gpt,
    relative_difference,
    resnet_1001,
    wide_resnet,
)
from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    apply_activation_compression,
    apply_checkpointing,
)
from lightning_memsave.demo.model import WideBlock
from lightning_memsave.measuring.step_trace import Trace, trace_step
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.planner.checkpointing import CheckpointingPlan, Planner
from lightning_memsave.simulation.fake_model import fake_tensors, optimizer_state_bytes

Make = Callable[[str], Subject]
QUALITY = "tensors that differ from a plain step (gradients + buffers)"
MIB = 2**20


# ---------------------------------------------------------------------------------------------------- settings
def with_torch(subject: Subject, block: type) -> Subject:
    """What users write by hand: each block's forward through `torch.utils.checkpoint`."""
    for module in subject.model.modules():
        if isinstance(module, block):
            module.forward = lambda *a, original=module.forward, **k: checkpoint(original, *a, use_reentrant=False, **k)
    return subject


def with_blocks(subject: Subject, **options: Any) -> Subject:
    apply_checkpointing(subject.model, Checkpointing(**options))
    return subject


def with_wrapper(subject: Subject, block: type, **options: Any) -> Subject:
    """torch's wrapper around each block."""
    for module in list(subject.model.modules()):
        for name, child in module.named_children():
            if isinstance(child, block):
                setattr(module, name, checkpoint_wrapper(child, **options))
    return subject


def in_segments(subject: Subject, chain: nn.Sequential, num_segments: int) -> Subject:
    """torch's `checkpoint_sequential` over all blocks of `chain`."""
    blocks = [b for group in chain for b in (group if isinstance(group, nn.Sequential) else [group])]
    chain.forward = lambda x: checkpoint_sequential(blocks, num_segments, x, use_reentrant=False)
    return subject


def traced(subject: Subject) -> Trace:
    """Forward and backward on fake tensors."""
    assert subject.loss is not None
    with fake_tensors(subject.model):
        return trace_step(subject.model, lambda: subject.loss().backward(), held=list(tensors_in(subject.batch)))


def with_plan(subject: Subject, **options: Any) -> tuple[Subject, CheckpointingPlan, float]:
    """Apply the regions that the planner finds; return the subject, the plan and the seconds that planning took."""
    start = time.perf_counter()
    plan = Planner(traced(subject), Checkpointing(**options)).plan()
    seconds = time.perf_counter() - start
    apply_checkpointing(subject.model, plan.config)
    return subject, plan, seconds


# ---------------------------------------------------------------------------------------------------- quality
def outcome(subject: Subject) -> list[Tensor]:
    """Gradients and buffers after one step."""
    torch.manual_seed(6)
    subject.step()
    found = [p.grad.clone() for p in subject.model.parameters() if p.grad is not None]
    return found + [buffer.clone() for buffer in subject.model.buffers()]


def num_different(a: list[Tensor], b: list[Tensor]) -> int:
    """Count the tensors that differ in any bit."""
    return sum(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------------- blocks
def quality_against(make: Make) -> Callable[[Subject], tuple[str, float]]:
    def quality(subject: Subject) -> tuple[str, float]:
        """How many of the gradients and buffers differ from a plain step's, in any bit."""
        plain = make("plain")
        twin = make("twin")
        if subject.setting != "plain":
            twin = with_blocks(twin) if subject.setting == "blocks" else with_torch(twin, BLOCK[make])
        return QUALITY, num_different(outcome(twin), outcome(plain))

    return quality


BLOCK = {wide_resnet: WideBlock, gpt: GPT2Block}


def run_blocks() -> None:
    for name, make, model in (
        ("checkpointing", wide_resnet, "WideResNet-28-2, batch 100, SGD momentum"),
        ("checkpointing_gpt", gpt, "GPT-2, 4 layers, width 256, batch 8 x 128, AdamW"),
    ):
        subjects = [make("plain"), with_blocks(make("blocks")), with_torch(make("torch checkpoint"), BLOCK[make])]
        compare(name, model, subjects, quality_against(make))


# ---------------------------------------------------------------------------------------------------- depth
REPEATS_OF_DEPTH = {64: 7, 128: 7, 256: 5, 512: 3, 1024: 3}


def run_depth() -> None:
    rows: list[dict[str, Any]] = []
    for num_blocks, repeats in REPEATS_OF_DEPTH.items():
        rows += depth_rows(num_blocks, repeats)
        gc.collect()  # models of the deepest chains take gigabytes, and hooks make cycles of them
    for row in rows:
        same = [other for other in rows if other["setting"] == row["setting"]]
        row["exponent"] = slope([r["n"] for r in same], [r["beyond_gradients_bytes"] for r in same])
    write_rows("checkpointing_depth", rows)


def depth_rows(num_blocks: int, repeats: int) -> list[dict[str, Any]]:
    make = functools.partial(deep_chain, num_blocks=num_blocks)
    segments = make("torch checkpoint_sequential, sqrt(n) segments")
    in_segments(segments, segments.model, round(math.sqrt(num_blocks)))
    sqrt, sqrt_plan, sqrt_seconds = with_plan(make("sqrt"), method="sqrt")
    recursive, recursive_plan, recursive_seconds = with_plan(make("recursive"), method="recursive")
    plans = {"sqrt": (sqrt_plan, sqrt_seconds), "recursive": (recursive_plan, recursive_seconds)}
    subjects = [
        make("plain"),
        with_blocks(make("blocks")),
        sqrt,
        recursive,
        segments,
        with_wrapper(make("torch checkpoint_wrapper per block"), ResidualBlock),
    ]
    found = outcomes_and_times(subjects, repeats)
    print(num_blocks, *(f"{columns['cpu_time_ratio']:.2f}" for columns in found), flush=True)
    return [
        {
            "benchmark": "checkpointing_depth",
            "model": "chain of residual blocks, width 256, 512 tokens",
            "setting": subject.setting,
            "n": num_blocks,
            "exponent": None,
            **columns,
            **plan_columns(*plans.get(subject.setting, (None, None))),
            **environment(),
        }
        for subject, columns in zip(subjects, found, strict=True)
    ]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the straight line through the logarithms."""
    a, b = torch.tensor(x).double().log(), torch.tensor(y).double().log()
    a = a - a.mean()
    return float((a * b).sum() / (a * a).sum())


def outcomes_and_times(subjects: list[Subject], repeats: int) -> list[dict[str, Any]]:
    """Measure one model in many settings, the plain one first: peaks, times, and whether the bits are the same."""
    plain = outcome(subjects[0])
    found: list[dict[str, Any]] = []
    for subject in subjects:
        different = 0 if subject is subjects[0] else num_different(outcome(subject), plain)
        sizes = measure_memory(subject, warm_up=False, workspace=False)
        held = sizes["weights_bytes"] + sizes["gradients_bytes"] + sizes["data_bytes"]
        beyond = sizes["peak_bytes"] - held
        factor = (found[0]["beyond_gradients_bytes"] if found else beyond) / beyond
        columns = {"beyond_gradients_bytes": beyond, "factor": factor}
        found.append({**sizes, **columns, "quality": QUALITY, "quality_value": different})
        print(subject.setting, f"{beyond / MIB:.1f} MiB beyond gradients, {different} tensors differ", flush=True)
    seconds = measure_cpu_seconds(subjects, repeats, warm_up=False)
    return [{**columns, **time_columns(taken, seconds[0])} for columns, taken in zip(found, seconds, strict=True)]


def plan_columns(plan: CheckpointingPlan | None, seconds: float | None) -> dict[str, Any]:
    return {
        "plan_seconds": seconds,
        "num_regions": None if plan is None else len(plan.config.regions or ()),
        "predicted_peak_bytes": None if plan is None else plan.tracked_peak_bytes,
        "modelled_seconds": None if plan is None else plan.seconds,
    }


# ---------------------------------------------------------------------------------------------------- 1000 layers
SCALED = {"image_size": 32, "width": 64, "batch_size": 16}
"""Fewer pixels at full width, as narrow layers spend more of a step in their forward pass."""
FULL = {"image_size": 224, "width": 64, "batch_size": 32}
EIGHTH = "budget of an eighth"
PAPER_BYTES = {"plain": 48 * 10**9, "sqrt": 7 * 10**9}  # Chen et al., 2016, section 5


def run_resnet1000() -> None:
    rows: list[dict[str, Any]] = []
    make = functools.partial(resnet_1001, **SCALED)
    sqrt, sqrt_plan, sqrt_seconds = with_plan(make("sqrt"), method="sqrt")
    recursive, recursive_plan, recursive_seconds = with_plan(make("recursive"), method="recursive")
    eighth, eighth_plan, eighth_seconds = with_plan(make(EIGHTH), budget=1 / 8)
    plans = {
        "sqrt": (sqrt_plan, sqrt_seconds),
        "recursive": (recursive_plan, recursive_seconds),
        EIGHTH: (eighth_plan, eighth_seconds),
    }
    subjects = [
        make("plain"),
        sqrt,
        eighth,
        recursive,
        with_blocks(make("blocks")),
        with_wrapper(make("torch checkpoint_wrapper per block"), Bottleneck),
    ]
    for subject, columns in zip(subjects, outcomes_and_times(subjects, repeats=3), strict=True):
        rows.append(
            {
                "benchmark": "checkpointing_resnet1000",
                "model": "32x32, batch 16, measured",
                "setting": subject.setting,
                "paper_bytes": None,
                **columns,
                "budget_bytes": eighth_plan.budget_bytes if subject is eighth and eighth_plan is not None else None,
                **plan_columns(*plans.get(subject.setting, (None, None))),
                **environment(),
            }
        )
    rows += full_size_rows()
    write_rows("checkpointing_resnet1000", rows)


def full_size_rows() -> list[dict[str, Any]]:
    """The same at full size, on fake tensors: the plain step, the regions' prediction, and their trace."""
    subject = resnet_1001("plain", **FULL)
    start = time.perf_counter()
    plain = traced(subject)
    plan = Planner(plain, Checkpointing(method="sqrt")).plan()
    seconds = time.perf_counter() - start
    apply_checkpointing(subject.model, plan.config)
    verified = traced(subject)
    assert plan.tracked_peak_bytes is not None
    peaks = {
        "plain": (plain.peak_bytes, None),
        "sqrt": (verified.peak_bytes, plan.tracked_peak_bytes),
    }
    return [
        {
            "benchmark": "checkpointing_resnet1000",
            "model": "224x224, batch 32, traced on fake tensors",
            "setting": setting,
            "paper_bytes": PAPER_BYTES[setting],
            "peak_bytes": peak,
            "predicted_peak_bytes": predicted,
            "beyond_gradients_bytes": peak - plain.start_bytes,
            "factor": (plain.peak_bytes - plain.start_bytes) / (peak - plain.start_bytes),
            "num_regions": len(plan.config.regions or ()) if setting == "sqrt" else None,
            "plan_seconds": seconds if setting == "sqrt" else None,
            **environment(),
        }
        for setting, (peak, predicted) in peaks.items()
    ]


# ---------------------------------------------------------------------------------------------------- codecs
CODECS = ("plain", "blocks", "blocks + exact", "blocks + int4", "int4", "sqrt + exact", "blocks, inputs offloaded")


def with_codecs(make: Make, setting: str) -> Subject:
    subject = make(setting)
    codecs = tuple(codec for codec in ("exact", "int4") if codec in setting)
    if codecs:
        apply_activation_compression(subject.model, ActivationCompression(codecs=codecs))
    if "blocks" in setting:
        with_blocks(subject, offload="offloaded" in setting)
    if "sqrt" in setting:  # planned from a step with the codecs on, as in a run, on real tensors
        held = list(tensors_in(subject.batch))
        trace = trace_step(subject.model, lambda: subject.loss().backward(), held=held)
        subject.optimizer.zero_grad()
        extra = optimizer_state_bytes(subject.optimizer)
        plan = Planner(trace, Checkpointing(method="sqrt"), extra_bytes=extra).plan()
        apply_checkpointing(subject.model, plan.config)
    return subject


def run_codecs() -> None:
    models: tuple[tuple[str, Make], ...] = (
        ("WideResNet-28-2, batch 50, SGD momentum", functools.partial(wide_resnet, batch_size=50)),
        ("GPT of plain modules, 6 layers, width 256, batch 8 x 256, dropout 0.1, AdamW", plain_gpt),
    )
    rows: list[dict[str, Any]] = []
    for model, make in models:
        exact = gradients(make("plain"))
        plain_bytes = measure_kept_bytes(make("plain"))

        def quality(subject: Subject, make: Make = make, exact: list[Tensor] = exact) -> tuple[str, float]:
            twin = with_codecs(make, subject.setting)
            return "relative error of one gradient against plain torch's", relative_difference(gradients(twin), exact)

        def details(subject: Subject, make: Make = make, plain_bytes: int = plain_bytes) -> dict[str, float]:
            kept = measure_kept_bytes(with_codecs(make, subject.setting))
            return {"kept_bytes": kept, "kept_factor": plain_bytes / kept}

        subjects = [with_codecs(make, setting) for setting in CODECS]
        rows += measured_rows("checkpointing_codecs", model, subjects, quality, details, repeats=3)
    write_rows("checkpointing_codecs", rows)


RUNS: dict[str, Callable[[], None]] = {
    "blocks": run_blocks,
    "depth": run_depth,
    "resnet1000": run_resnet1000,
    "codecs": run_codecs,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or RUNS:
        RUNS[name]()
        gc.collect()
