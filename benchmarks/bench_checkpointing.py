"""Checkpointing beside torch's own, and beside compiled blocks: memory against depth, and time against a budget.

Names of results (`blocks`, `depth`, `resnet1000`, `budget`, `codecs`) as arguments run only these; about 25 minutes
on 1 core. A step of `depth` and `resnet1000` is forward and backward onto gradients that exist before, so that the
peak less weights and gradients is what the technique can change.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from harness import (
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
from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    allocation_peak,
    apply_activation_compression,
    apply_checkpointing,
)
from lightning_memsave.demo.model import WideBlock
from lightning_memsave.memory.fake import fake_tensors, optimizer_state_bytes
from lightning_memsave.memory.storages import tensors_in
from lightning_memsave.memory.trace import Trace, trace_step
from lightning_memsave.planner.checkpointing import CheckpointingPlan, Planner
from models import (
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
    """With the regions that the planner finds, and how long it took."""
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
    """In any bit."""
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
        for subject, columns in zip(subjects, found, strict=True):
            rows.append(
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
            )
        print(num_blocks, *(f"{r['cpu_time_ratio']:.2f}" for r in rows[-len(subjects) :]), flush=True)
    for row in rows:
        same = [other for other in rows if other["setting"] == row["setting"]]
        row["exponent"] = slope([r["n"] for r in same], [r["beyond_gradients_bytes"] for r in same])
    write_rows("checkpointing_depth", rows)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line through the logarithms."""
    a, b = torch.tensor(x).double().log(), torch.tensor(y).double().log()
    a = a - a.mean()
    return float((a * b).sum() / (a * a).sum())


def outcomes_and_times(subjects: list[Subject], repeats: int) -> list[dict[str, Any]]:
    """Of one model in many settings, the first the plain one: peaks, times, and whether the bits are the same."""
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


# ---------------------------------------------------------------------------------------------------- budget
NUM_BUDGETS, BUDGET_REPEATS = 10, 9
COMPILE_BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
FEWER_BYTES, LESS_TIME = 0.99, 0.97  # what counts as better


def run_budget() -> None:
    found = BudgetRun()
    found.add(wide_resnet("plain"))
    found.add_budgets()
    for subject in eager_peers():
        found.add(subject, kind="eager peer")
    for budget in COMPILE_BUDGETS:
        found.add(compiled(budget), kind="compiled peer")
    seconds = measure_cpu_seconds(found.subjects, BUDGET_REPEATS, warm_up=False)
    rows = [{**row, **time_columns(taken, seconds[0])} for row, taken in zip(found.rows, seconds, strict=True)]
    for row in rows:
        for kind in ("eager", "compiled"):
            row[f"dominated_by_{kind}"] = "; ".join(
                peer["setting"]
                for peer in rows
                if row["kind"] == "ours"
                and peer["kind"] == f"{kind} peer"
                and peer["allocation_bytes"] <= FEWER_BYTES * row["allocation_bytes"]
                and peer["cpu_time_ratio"] <= LESS_TIME * row["cpu_time_ratio"]
            )
    for row in rows:
        row.update(environment())
    write_rows("checkpointing_budget", rows)


class BudgetRun:
    """Settings of WideResNet-28-2, with what one step of each takes."""

    def __init__(self) -> None:
        self.subjects: list[Subject] = []
        self.rows: list[dict[str, Any]] = []
        self._plain: list[Tensor] = []
        model = wide_resnet("plain")
        self._extra_bytes = optimizer_state_bytes(model.optimizer)
        self._trace = traced(model)

    def add(self, subject: Subject, kind: str = "ours", **columns: Any) -> None:
        self._append(subject, kind, self._measured(subject, kind), columns)

    def _append(self, subject: Subject, kind: str, sizes: dict[str, Any], columns: dict[str, Any]) -> None:
        row = {
            "benchmark": "checkpointing_budget",
            "model": "WideResNet-28-2, batch 100, SGD momentum",
            "setting": subject.setting,
            "kind": kind if self.rows else "baseline",
            "budget_bytes": columns.pop("budget_bytes", None),
            **sizes,
            "factor": (self.rows[0] if self.rows else sizes)["allocation_bytes"] / sizes["allocation_bytes"],
            "quality": QUALITY,
            **{key: columns.get(key) for key in ("modelled_seconds", "num_regions", "plan_seconds", "num_plans")},
        }
        self.subjects.append(subject)
        self.rows.append(row)
        print(row["setting"], f"{row['allocation_bytes'] / MIB:.1f} MiB allocated", row["quality_value"], flush=True)

    def _measured(self, subject: Subject, kind: str) -> dict[str, Any]:
        """A first step, the bits it gave, and peaks. The ledger makes compiled code eager: there, allocations alone."""
        start = time.perf_counter()
        here = outcome(subject)
        first_seconds = time.perf_counter() - start
        self._plain = self._plain or here
        sizes: dict[str, Any] = {"peak_bytes": None}
        if kind == "compiled peer":
            sizes["allocation_bytes"] = allocation_peak(subject.step, held_bytes(subject))
        else:
            measured = measure_memory(subject, warm_up=False)
            sizes = {"peak_bytes": measured["peak_bytes"]}
            sizes["allocation_bytes"] = measured["peak_bytes"] + measured["workspace_bytes"]
        different = num_different(here, self._plain)
        return {**sizes, "quality_value": different, "first_step_seconds": first_seconds}

    def add_budgets(self) -> None:
        """Ten budgets from what the smallest feasible plan takes to what the plain step takes."""
        smallest = self._regions(self._smallest_plan())
        low, high = self._measured(smallest, "ours")["allocation_bytes"], self.rows[0]["allocation_bytes"]
        for number in range(NUM_BUDGETS):
            self._add_budget(low + (high - low) * number // NUM_BUDGETS)

    def _planner(self, budget: int) -> Planner:
        return Planner(self._trace, Checkpointing(budget=budget), extra_bytes=self._extra_bytes)

    def _smallest_plan(self) -> CheckpointingPlan:
        """By bisection."""
        low, high = 0, self.rows[0]["allocation_bytes"]
        plan = self._planner(high).plan()
        while high - low > MIB:
            middle = (low + high) // 2
            try:
                plan = self._planner(middle).plan()
            except ValueError:
                low = middle
            else:
                high = middle
        print("smallest plan", plan.describe(), flush=True)
        return plan

    def _regions(self, plan: CheckpointingPlan, setting: str = "") -> Subject:
        subject = wide_resnet(setting)
        apply_checkpointing(subject.model, plan.config)
        return subject

    def _add_budget(self, budget: int) -> None:
        """Plan, measure, and where a step takes more than was foreseen, plan again, as a run does."""
        start = time.perf_counter()
        planner = self._planner(budget)
        plan, unforeseen, num_plans = planner.plan(), 0, 0
        plan_seconds = time.perf_counter() - start
        while True:
            num_plans += 1
            subject = self._regions(plan, f"budget {budget / MIB:.0f} MiB")
            sizes = self._measured(subject, "ours")
            over = sizes["allocation_bytes"] - budget
            if over <= 0 or num_plans == 4:
                break
            unforeseen += over
            better = planner.plan_again(less_bytes=unforeseen)
            if better is None:
                break
            plan = better
        columns = {"modelled_seconds": plan.seconds, "num_regions": len(plan.config.regions or ())}
        columns |= {"plan_seconds": plan_seconds, "num_plans": num_plans, "budget_bytes": budget}
        self._append(subject, "ours", sizes, columns)


def held_bytes(subject: Subject) -> int:
    """Between two steps: weights, buffers, gradients, optimizer state and batch."""
    model = subject.model
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    held += [*tensors_in(subject.optimizer.state_dict()["state"]), *tensors_in(subject.batch)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())


def save_convolutions(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_convolution = op == torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if is_convolution else CheckpointPolicy.PREFER_RECOMPUTE


def eager_peers() -> list[Subject]:
    def segments(number: int) -> Subject:
        subject = wide_resnet(f"torch checkpoint_sequential, {number} segments")
        return in_segments(subject, subject.model.groups, number)

    contexts = functools.partial(create_selective_checkpoint_contexts, save_convolutions)
    return [
        with_wrapper(wide_resnet("torch checkpoint_wrapper per block"), WideBlock),
        *(segments(number) for number in (2, 3, 4, 6)),
        with_wrapper(wide_resnet("torch selective, convolutions saved"), WideBlock, context_fn=contexts),
    ]


def compiled(budget: float) -> Subject:
    """Each block compiled, with a budget for the partitioner; the code object is new, as dynamo caches by it."""
    original = WideBlock.forward
    own = types.FunctionType(original.__code__.replace(co_name=f"forward_{int(100 * budget)}"), original.__globals__)
    compiled_forward = torch.compile(own, dynamic=False)
    subject = wide_resnet(f"torch.compile per block, activation_memory_budget {budget:g}")
    for module in subject.model.modules():
        if isinstance(module, WideBlock):
            module.forward = types.MethodType(compiled_forward, module)
    step = subject.step

    def step_with_budget() -> None:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            step()

    subject.step = step_with_budget
    return subject


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
    "budget": run_budget,
    "codecs": run_codecs,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or RUNS:
        RUNS[name]()
