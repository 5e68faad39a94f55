"""A plan before a run: what would `MemSave(budget=...)` do with this module and batch?"""

from __future__ import annotations

import lightning as L

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import Batch
from lightning_memsave.planner.plan import Plan


def plan_training(module: L.LightningModule, batch: Batch, memsave: MemSave) -> Plan:
    """Plan for a budget without training; `MemSave(plan)` then trains with it, here or elsewhere.

    Args:
        module: is copied, not changed.
        batch: what `training_step` takes, on the CPU.
        memsave: with a `budget`.

    Raises:
        ValueError: `memsave` has no budget, or nothing that its recipe allows fits: the text says the smallest peak.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> plan = plan_training(BoringModel(), torch.ones(8192, 32), MemSave(budget="0.9x"))
        >>> plan.needed_bytes <= plan.budget_bytes < plan.baseline_bytes
        True
        >>> MemSave(plan).recipe.stems()
        ('early_zero_grad', 'microbatching')
    """
    if memsave.budgeted is None:
        raise setting_error("memsave", "must have a budget to plan for", memsave.recipe.name, "`MemSave(budget=...)`.")
    return memsave.budgeted.plan_for(module, batch)
