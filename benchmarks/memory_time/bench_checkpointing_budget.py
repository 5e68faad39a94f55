"""Checkpointing under ten budgets, beside torch's own and beside compiled blocks: time against memory."""

from __future__ import annotations

import functools
import time
import types
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.harness.measurement import (
    Subject,
    environment,
    measure_cpu_seconds,
    measure_memory,
    time_columns,
    write_rows,
)
from benchmarks.memory_time.bench_checkpointing import (
    MIB,
    QUALITY,
    in_segments,
    num_different,
    outcome,
    traced,
    with_wrapper,
)
from benchmarks.models.subjects import wide_resnet
from lightning_memsave import Checkpointing, allocation_peak, apply_checkpointing
from lightning_memsave.demo.model import WideBlock
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.planner.checkpointing import CheckpointingPlan, Planner
from lightning_memsave.simulation.fake_model import optimizer_state_bytes

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
        """Ten budgets from the least that has a plan to what the plain step takes."""
        low, high = self._least_budget(), self.rows[0]["allocation_bytes"]
        for number in range(NUM_BUDGETS):
            self._add_budget(low + (high - low) * number // NUM_BUDGETS)

    def _planner(self, budget: int) -> Planner:
        return Planner(self._trace, Checkpointing(budget=budget), extra_bytes=self._extra_bytes)

    def _least_budget(self) -> int:
        """By bisection."""
        low, high = 0, self.rows[0]["allocation_bytes"]
        while high - low > MIB:
            middle = (low + high) // 2
            try:
                self._planner(middle).plan()
            except ValueError:
                low = middle
            else:
                high = middle
        return high

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


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_budget()
