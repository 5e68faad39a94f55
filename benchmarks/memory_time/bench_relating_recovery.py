"""Batches that cannot be cut, as their loss relates samples, where memory is too small: the default `MemSave()`.

A limit on tensors' bytes, a half, a quarter or an eighth of what plain Lightning takes, ends a step in torch's own
error. What is then done, what a step takes after it, and how far the weights are from those of the plain run.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.harness.measurement import environment, write_rows
from benchmarks.models.relating import RELATING
from benchmarks.models.subjects import relative_difference
from lightning_memsave import MemSave
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.limit import SimulatedLimit
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError

NUM_STEPS = 4
FRACTIONS = {"1/2": 0.5, "1/4": 0.25, "1/8": 0.125}
QUALITY = f"relative distance of the weights from the plain run's, {NUM_STEPS} steps"


class Module(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


def fit(name: str, limit_bytes: int | None) -> tuple[list[Tensor], Any]:
    """Return the trained weights, and the report."""
    make, make_batch = RELATING[name]
    torch.manual_seed(0)
    module = Module(make())
    batches = [make_batch() for _ in range(NUM_STEPS)]
    memsave = MemSave() if limit_bytes is not None else MemSave(microbatch=False)
    limit = SimulatedLimit(limit_bytes or 10**12)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[limit, memsave, limit.after],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return [p.detach() for p in module.parameters()], memsave.report


def rows_of(name: str) -> list[dict[str, Any]]:
    plain, baseline = fit(name, None)
    rows = [row(name, "plain", baseline, baseline, 0.0)]
    for fraction, share in FRACTIONS.items():
        limit_bytes = int(share * baseline.peak_bytes)
        try:
            weights, report = fit(name, limit_bytes)
        except OutOfMemoryUnrecoverableError:
            failed = dict.fromkeys(rows[0], "") | {"loss_class": "", "taken": ""}
            fixed = {key: rows[0][key] for key in ("benchmark", "model", "quality", *environment())}
            rows.append(failed | fixed | {"setting": f"limit of {fraction}", "limit_bytes": limit_bytes})
            continue
        difference = relative_difference(weights, plain)
        rows.append(row(name, f"limit of {fraction}", report, baseline, difference) | {"limit_bytes": limit_bytes})
    return rows


def row(name: str, setting: str, report: Any, baseline: Any, difference: float) -> dict[str, Any]:
    return {
        "benchmark": "relating_recovery",
        "model": name,
        "setting": setting,
        "taken": "; ".join(each.summary for each in report.applied if each.technique in TAKEN),
        "loss_class": report.loss_class,
        "peak_bytes": report.peak_bytes,
        **{f"{category}_bytes": report.by_category[category] for category in CATEGORIES},
        "factor": baseline.peak_bytes / report.peak_bytes,
        "num_recovered": report.num_oom_recovered,
        "quality": QUALITY,
        "quality_value": difference,
        "limit_bytes": "",
        **environment(),
    }


TAKEN = ("checkpointing", "tiling")
"""Techniques whose lines say what was done about too little memory."""


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    for name in RELATING:
        rows += rows_of(name)
        for each in rows[-1 - len(FRACTIONS) :]:
            print(*(each[key] for key in ("model", "setting", "taken", "loss_class", "peak_bytes", "quality_value")))
    write_rows("relating_recovery", rows)


if __name__ == "__main__":
    main()
