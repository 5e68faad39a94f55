"""Budgets: is what is measured within what was asked for, and is the plan fast?

Each model is given budgets from 0.9 of what its plain step takes downwards, under "lossless" and "balanced". A plan is
trained with, and the run's own measurement (tracked bytes and workspace) is held against the budget; what is refused
must name the smallest peak, which is then asked for.

Time: CPU seconds of steps of the plan against other settings that fit the same budget with a loss class no worse: every
single technique, and random combinations. What needs twice as long as the plan for one step is not trained further
(`num_slow`). Some turns choose the fastest, which then take turns with the plan: the smallest of many noisy times is no
measure of who won. A turn is a few hundredths of a second, so that whatever else the machine does meets all alike, and
every contestant waits for its turns in a process of its own.
Rows that are there are kept; `--no-times` first makes all the others.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from benchmarks.harness.measurement import environment, put_row, read_rows, time_columns
from benchmarks.models.subjects import PlainGPT, ResidualBlock, next_token_loss
from lightning_memsave import MemoryMonitor, MemSave, Plan, Recipe
from lightning_memsave.core.report import LOSS_CLASSES
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.planner.memory_budget import Budget
from lightning_memsave.planner.recipes import RECIPES
from lightning_memsave.planner.search_space import TIERS, dimensions
from lightning_memsave.prediction.budgeted_run import plan_for
from lightning_memsave.techniques.microbatching import why_not_exact

NAME, KEY = "planner", ("model", "setting", "budget")
TURN_SECONDS = 0.04
"""Of steps of one setting before the next one's turn, and at least one step."""
SCREENING_TURNS = 15
NUM_FINALISTS = 3
"""Rivals whose times are measured against the plan's."""
FRACTIONS = (0.9, 0.7, 0.5, 0.35, 0.2)
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Step(L.LightningModule):
    """A model, its loss and an optimizer."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], momentum: bool = False) -> None:
        super().__init__()
        self.model, self.loss, self.momentum = model, loss, momentum

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.momentum:
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 1e-3)


def classify(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(getattr(scores, "logits", scores), batch[1])


def language(model: nn.Module, ids: Tensor) -> Tensor:
    found = model(ids)
    return next_token_loss(getattr(found, "logits", found), ids)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(256, 64), nn.LSTM(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0])


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))


def subjects() -> dict[str, tuple[Callable[[], Step], Any]]:
    llama = LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=3,
        vocab_size=500,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    vit = ViTConfig(
        hidden_size=48,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=32,
        patch_size=4,
        num_labels=10,
    )
    return {
        "WideResNet-10-1, batch 16, SGD momentum": (
            lambda: Step(WideResNet(depth=10, width=1), classify, momentum=True),
            images(16),
        ),
        "GPT of plain modules, 4 layers, width 64, dropout 0, batch 16 x 32, AdamW": (
            lambda: Step(PlainGPT(4, 64, 4, 32, dropout=0.0), language),
            torch.randint(0, 256, (16, 32)),
        ),
        "Llama, 3 layers, width 64, batch 16 x 32, AdamW": (
            lambda: Step(LlamaForCausalLM(llama), language),
            torch.randint(0, 500, (16, 32)),
        ),
        "ViT, 3 layers, width 48, batch 16, AdamW": (
            lambda: Step(ViTForImageClassification(vit), classify),
            images(16),
        ),
        "12 residual blocks, width 64, 512 rows, AdamW": (
            lambda: Step(nn.Sequential(*(ResidualBlock(64) for _ in range(12)), nn.Linear(64, 10)), classify),
            (torch.randn(512, 64), torch.randint(0, 10, (512,))),
        ),
        "LSTM, 2 layers, width 64, batch 16 x 32, AdamW": (
            lambda: Step(Recurrent(), language),
            torch.randint(0, 256, (16, 32)),
        ),
    }


def made(make: Callable[[], Step]) -> Step:
    torch.manual_seed(0)
    return make().train()


class Clock(L.Callback):
    """CPU seconds of every step; training ends where one after the first takes longer than its limit."""

    def __init__(self, limits: Sequence[float] = ()) -> None:
        self.limits, self.taken = limits, list[float]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.taken.append(time.process_time() - self.start)
        trainer.should_stop = self.is_slow

    @property
    def is_slow(self) -> bool:
        return any(taken > limit for taken, limit in list(zip(self.taken, self.limits, strict=False))[1:])


def trained(make: Callable[[], Step], batch: Any, memsave: MemSave, *callbacks: L.Callback, steps: int = 5) -> Any:
    """A run of some steps, the last of which is profiled."""
    monitor = MemoryMonitor(workspace=True)
    trainer = L.Trainer(max_steps=steps, callbacks=[memsave, monitor, *callbacks], **QUIET)
    trainer.fit(made(make), DataLoader([batch] * steps, batch_size=None))
    return memsave.report


# ---------------------------------------------------------------------------------------------------- honesty
def honesty_row(
    name: str, make: Callable[[], Step], batch: Any, budget: Any, recipe: str
) -> tuple[dict[str, Any], Any]:
    start = time.process_time()
    row: dict[str, Any] = {"benchmark": "planner", "model": name, "setting": recipe, "budget": str(budget)}
    try:
        plan = plan_for(made(make), batch, Budget(budget), RECIPES[recipe])
    except ValueError as error:
        found = re.search(r"must be at least .* \((\d+) bytes\)", str(error))
        if found is None:
            raise
        return {**row, "feasible": False, "smallest_bytes": int(found[1]), **_took(start)}, int(found[1])
    row |= _took(start)
    report = trained(make, batch, MemSave(plan))
    needed = report.peak_bytes + (report.workspace_bytes or 0)
    return {
        **row,
        "feasible": True,
        "budget_bytes": plan.budget_bytes,
        "baseline_bytes": plan.baseline_bytes,
        "predicted_bytes": plan.needed_bytes,
        "peak_bytes": report.peak_bytes,
        "workspace_bytes": report.workspace_bytes,
        "factor": plan.baseline_bytes / needed,
        "within_budget": needed <= plan.budget_bytes,
        "loss_class": report.loss_class,
        "num_predictions": plan.num_predictions,
        "plan": ", ".join(step.setting for step in plan.steps),
    }, plan


def _took(start: float) -> dict[str, float]:
    return {"plan_cpu_seconds": time.process_time() - start}


# ---------------------------------------------------------------------------------------------------- time
def others(plan: Plan, num_samples: int, is_cut_exact: bool, count: int) -> list[tuple[str, Recipe]]:
    """Single settings and random combinations of what the plan might have used, no worse in loss class.

    As somebody would set them by hand: what "lossless" has and they do not replace stays.
    """
    table = dimensions(
        plan.budget_bytes,
        plan.baseline_bytes,
        tier=plan.recipe if plan.recipe in TIERS else TIERS[0],
        num_samples=num_samples,
        is_cut_exact=is_cut_exact,
    )
    allowed = [
        [o for o in dimension if LOSS_CLASSES.index(o.loss_class) <= LOSS_CLASSES.index(plan.loss_class)]
        for dimension in table.values()
    ]
    nothing = [dimension[0] for dimension in allowed]
    singles = [[*nothing[:i], o, *nothing[i + 1 :]] for i, dimension in enumerate(allowed) for o in dimension[1:]]
    draw = random.Random(0)
    mixed = [[draw.choice(dimension) for dimension in allowed] for _ in range(20 * count)]
    found: dict[str, Recipe] = {}
    base = RECIPES["lossless"].techniques
    for kind, choices in (("single", singles), ("random", mixed)):
        for choice in choices:
            text = f"{kind}: " + ", ".join(o.text for o in choice if o.config is not None)
            configs = [o.config for o in choice if o.config is not None]
            try:
                found[text] = Recipe("other", (*(t for t in base if type(t) not in map(type, configs)), *configs))
            except ValueError:
                continue
    own = sorted(map(repr, plan.techniques))
    return [(text, each) for text, each in found.items() if sorted(map(repr, each.techniques)) != own]


class Turns(Clock):
    """Sends the times of its steps and waits until it is told how many to take."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self.pipe, self.left = pipe, 0

    def on_train_batch_start(self, *args: Any) -> None:
        if not self.left:
            self.pipe.send(self.taken)
            self.taken, self.left = [], self.pipe.recv()
        super().on_train_batch_start(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.left -= 1


def contend(pipe: Connection, make: Callable[[], Step], batch: Any, memsave: MemSave) -> None:
    """Train in turns until the process is ended."""
    trainer = L.Trainer(max_steps=10**6, callbacks=[memsave, Turns(pipe)], **QUIET)
    trainer.fit(made(make), DataLoader([batch] * 10**6, batch_size=None))


def taking_turns(
    contestants: dict[str, MemSave], make: Callable[[], Step], batch: Any, turns: int, num_steps: int
) -> dict[str, list[float]]:
    """Seconds of a step, for each turn of each contestant."""
    context = get_context("fork")
    processes, pipes = [], {}
    for text, memsave in contestants.items():
        pipes[text], theirs = context.Pipe()
        processes.append(context.Process(target=contend, args=(theirs, make, batch, memsave), daemon=True))
        processes[-1].start()
        theirs.close()  # so that the end of a process ends its pipe
    for pipe in pipes.values():
        for steps in (3, num_steps):  # the first plans, the next two are measured; then as many as in a turn
            pipe.recv()
            pipe.send(steps)
        pipe.recv()
    taken: dict[str, list[float]] = {text: [] for text in contestants}
    for _ in range(turns):
        for text, pipe in pipes.items():
            pipe.send(num_steps)
            taken[text].append(statistics.median(pipe.recv()))
    for process in processes:
        process.kill()
        process.join()
    return taken


def rivals_of(
    plan: Plan, make: Callable[[], Step], batch: Any, count: int, limits: Sequence[float]
) -> tuple[dict[str, MemSave], int]:
    """What fits the plan's budget in steps no longer than `limits`, and how many settings were slower."""
    num_samples = len(batch if isinstance(batch, Tensor) else batch[0])
    found: dict[str, MemSave] = {}
    num_random = num_slow = 0
    for text, recipe in others(plan, num_samples, not why_not_exact(made(make)), count):
        if text.startswith("random") and num_random >= count:
            continue
        clock = Clock(limits)
        try:
            report = trained(make, batch, MemSave(recipe), clock)
        except ValueError:
            continue
        if clock.is_slow:
            num_slow += 1
        elif report.peak_bytes + (report.workspace_bytes or 0) <= plan.budget_bytes:
            found[text] = MemSave(recipe)
            num_random += text.startswith("random")
    return found, num_slow


def quality_row(make: Callable[[], Step], batch: Any, plan: Plan, count: int, turns: int) -> dict[str, Any]:
    """The plan against the fastest of the others that fit."""
    own = Clock()
    trained(make, batch, MemSave(plan), own)
    rivals, num_slow = rivals_of(plan, make, batch, count, [2 * seconds for seconds in own.taken])
    num_steps = max(1, int(TURN_SECONDS / min(own.taken)))
    screened = taking_turns(rivals, make, batch, SCREENING_TURNS, num_steps)
    finalists = sorted(screened, key=lambda text: statistics.median(screened[text]))[:NUM_FINALISTS]
    contestants = {"plan": MemSave(plan)} | {text: rivals[text] for text in finalists}
    taken = taking_turns(contestants, make, batch, turns, num_steps)
    against = {text: time_columns(taken["plan"], taken[text]) for text in finalists}
    row = {"num_rivals": len(rivals), "num_slow": num_slow, "fastest_rival": ""}
    if finalists:
        fastest = max(against, key=lambda text: against[text]["cpu_time_ratio"])
        row["fastest_rival"] = fastest
        row |= {f"time_against_fastest{end}": against[fastest][f"cpu_time_ratio{end}"] for end in ("", "_p20", "_p80")}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--random", type=int, default=10, help="random rivals of each plan")
    parser.add_argument("--turns", type=int, default=101)
    parser.add_argument("--no-times", dest="times", action="store_false")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of models, in this order")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = {name: each for part in options.only for name, each in subjects().items() if part in name}
    for name, (make, batch) in chosen.items():
        for recipe in ("lossless", "balanced"):
            for budget in (f"{fraction}x" for fraction in FRACTIONS):
                has_times = options.times and recipe == "lossless"
                if is_known(name, recipe, budget, has_times):
                    continue
                row, found = honesty_row(name, make, batch, budget, recipe)
                if isinstance(found, int):  # the smallest that was named must do
                    again, smallest = honesty_row(name, make, batch, found, recipe)
                    row |= {"smallest_is_enough": not isinstance(smallest, int) and again["within_budget"]}
                elif has_times:
                    row |= quality_row(make, batch, found, options.random, options.turns)
                row |= {"quality": "measured bytes over the budget", **environment()}
                if row["feasible"]:
                    row["quality_value"] = (row["peak_bytes"] + (row["workspace_bytes"] or 0)) / row["budget_bytes"]
                print({k: v for k, v in row.items() if k not in environment()}, flush=True)
                put_row(NAME, row, KEY)


def is_known(*pair: str | bool) -> bool:
    """Whether there is a row of this model, recipe and budget, with times if these are wanted."""
    *values, has_times = pair
    same = [row for row in read_rows(NAME) if [row[column] for column in KEY] == values]
    return bool(same) and not (
        has_times and same[0]["feasible"] == "True" and not same[0].get("time_against_fastest_p20")
    )


if __name__ == "__main__":
    main()
