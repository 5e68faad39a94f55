"""Write the tables of README and docs from the rows in `results/`, or from the code: python -m benchmarks.tables.write.

A page marks the place of a table: `<!-- name:start -->`, `<!-- name:end -->`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.harness.rows import ROOT
from benchmarks.tables import (
    compatibility_tables,
    cuda_tables,
    method_tables,
    planner_tables,
    record_tables,
    technique_tables,
)

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"recipes": technique_tables.recipes, "record": record_tables.headline},
    "docs/index.md": {"recipes-quality": technique_tables.recipes_quality},
    "docs/techniques/activation_compression.md": {
        "measured": technique_tables.activations,
        "codecs": technique_tables.codecs,
        "compiled": technique_tables.compiled,
        "launch-bound": technique_tables.launch_bound,
        "bounded": technique_tables.code_noise,
        "quality": technique_tables.quality,
    },
    "docs/techniques/microbatching.md": {
        "sizes": technique_tables.microbatching,
        "recovery": technique_tables.recovery,
        "loop": technique_tables.loop,
        "batchnorm": technique_tables.batchnorm,
    },
    "docs/peft.md": {"measured": technique_tables.peft},
    "docs/techniques/low_precision.md": {
        "measured": technique_tables.low_precision,
        "quality": partial(technique_tables.low_precision_quality, "GPT"),
        "digits": partial(technique_tables.low_precision_quality, "WideResNet"),
    },
    "docs/techniques/optimizer_state.md": {
        "errors": technique_tables.state_errors,
        "muon": partial(technique_tables.low_precision_quality, "Muon"),
        "second-moments": technique_tables.second_moments,
        "distributed": technique_tables.distributed,
        "measured": technique_tables.optimizer_state,
    },
    "docs/techniques/tiling.md": {
        "measured": technique_tables.tiling,
        "recovery": planner_tables.relating_recovery,
        "sequence": planner_tables.sequence,
    },
    "docs/techniques/checkpointing.md": {
        "blocks": planner_tables.checkpointing_blocks,
        "depth": planner_tables.checkpointing_depth,
        "resnet1000": planner_tables.checkpointing_resnet1000,
        "budget": planner_tables.checkpointing_budget,
        "compression": planner_tables.checkpointing_codecs,
    },
    "docs/techniques/sparsity.md": {
        "steps": technique_tables.sparsity_steps,
        "digits": technique_tables.sparsity_digits,
        "text": technique_tables.sparsity_text,
    },
    "docs/techniques/low_rank.md": {"steps": technique_tables.low_rank_steps, "text": technique_tables.low_rank_text},
    "docs/techniques/sparse_update.md": {
        "steps": technique_tables.sparse_update_steps,
        "digits": technique_tables.sparse_update_digits,
    },
    "docs/results.md": {
        "wrn-alone": record_tables.wrn_alone,
        "wrn": partial(record_tables.ladder, "wrn"),
        "wrn-quality": partial(record_tables.quality, "wrn_quality", ("pixels", "num_train", "epochs", "num_test")),
        "gpt-quality": partial(record_tables.quality, "gpt_quality", ("steps", "batch")),
        "vit-quality": partial(record_tables.quality, "vit_quality", ("steps", "batch")),
        "dynamicconv": partial(record_tables.ladder, "dynamicconv"),
        "dynamicconv-quality": partial(
            record_tables.quality, "dynamicconv_quality", ("num_train", "epochs", "num_test", "num_checkpoints")
        ),
        "papers": record_tables.papers,
    },
    "docs/methods.md": {
        "methods": method_tables.methods,
        "operators": method_tables.operators,
        "local": method_tables.local_learning,
        "fragmentation": method_tables.fragmentation,
    },
    "docs/prediction.md": {"large": planner_tables.large, "prediction": planner_tables.prediction},
    "docs/gpu.md": {
        "steps": cuda_tables.steps,
        "predictions": cuda_tables.predictions,
        "kernels": cuda_tables.kernels,
        "optimizers": cuda_tables.optimizers,
    },
    "docs/planning.md": {
        "budgets": planner_tables.planner,
        "seconds": planner_tables.planning_time,
        "budget-quality": planner_tables.budget_quality,
    },
    "docs/compatibility.md": {
        "techniques": compatibility_tables.techniques,
        "refusals": compatibility_tables.refusals,
        "versions": compatibility_tables.versions,
        "private_names": compatibility_tables.private_names,
    },
}


def with_tables(page: str) -> str:
    """The text of a page with its tables written anew."""
    text = (ROOT / page).read_text()
    for name, table in TABLES[page].items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{page} has no place for the table {name!r}")
        text = f"{before}{start}\n{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / page).write_text(with_tables(page))
        print(page)
