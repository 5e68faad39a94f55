"""Train any LightningModule in a fraction of the memory, and see where every byte went.

>>> from lightning_memsave import MemSave
>>> callback = MemSave(microbatch=10, checkpointing="blocks", optimizer_state="8bit")
>>> callback.recipe.stems()
('early_zero_grad', 'microbatching', 'checkpointing', 'optimizer_state')
"""

from lightning_memsave.core.versions import check_versions
from lightning_memsave.torch_internals.private_names import check_names

check_versions()
check_names()

from lightning_memsave.api import plan_training, predict, verify  # noqa: E402  # after the check of versions
from lightning_memsave.callbacks import MemoryMonitor, MemoryProgressBar, MemSave  # noqa: E402
from lightning_memsave.core.errors import (  # noqa: E402
    BudgetWarning,
    MemoryGrowthWarning,
    MicrobatchWarning,
    NoEffectWarning,
    NotLosslessWarning,
)
from lightning_memsave.core.report import Applied, MemoryReport  # noqa: E402
from lightning_memsave.core.verification import Verification  # noqa: E402
from lightning_memsave.measuring import Ledger, Measurement, allocation_peak  # noqa: E402
from lightning_memsave.planner.checkpointing import plan_checkpointing  # noqa: E402
from lightning_memsave.planner.plan import Plan  # noqa: E402
from lightning_memsave.planner.recipes import Recipe  # noqa: E402
from lightning_memsave.reporting.wandb_run import wandb_logger  # noqa: E402
from lightning_memsave.simulation.predicted_step import Prediction  # noqa: E402
from lightning_memsave.strategies.ddp import MemSaveDDPStrategy  # noqa: E402
from lightning_memsave.strategies.fsdp import MemSaveFSDPStrategy  # noqa: E402
from lightning_memsave.strategies.memsave_strategy import MemSaveStrategy  # noqa: E402
from lightning_memsave.strategies.registration import register_strategies  # noqa: E402
from lightning_memsave.techniques.activation_compression import (  # noqa: E402
    ActivationCompression,
    apply_activation_compression,
)
from lightning_memsave.techniques.checkpointing import Checkpointing, apply_checkpointing  # noqa: E402
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad  # noqa: E402
from lightning_memsave.techniques.low_precision import LowPrecision, apply_low_precision  # noqa: E402
from lightning_memsave.techniques.low_rank import LowRank, apply_low_rank  # noqa: E402
from lightning_memsave.techniques.microbatching import LabelCount, Microbatching, microbatches  # noqa: E402
from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state  # noqa: E402
from lightning_memsave.techniques.sparse_update import (  # noqa: E402
    SparseUpdate,
    apply_sparse_update,
    plan_sparse_update,
)
from lightning_memsave.techniques.sparsity import (  # noqa: E402
    MaskUpdates,
    Sparsity,
    UpdateSchedule,
    apply_sparsity,
)
from lightning_memsave.techniques.tiling import Tiling, apply_tiling  # noqa: E402
from lightning_memsave.torch_internals.compact_layers import export_dense  # noqa: E402

register_strategies()

__version__ = "0.1.0"
__all__ = [
    "ActivationCompression",
    "Applied",
    "BudgetWarning",
    "Checkpointing",
    "EarlyZeroGrad",
    "LabelCount",
    "Ledger",
    "LowPrecision",
    "LowRank",
    "MaskUpdates",
    "Measurement",
    "MemSave",
    "MemSaveDDPStrategy",
    "MemSaveFSDPStrategy",
    "MemSaveStrategy",
    "MemoryGrowthWarning",
    "MemoryMonitor",
    "MemoryProgressBar",
    "MemoryReport",
    "MicrobatchWarning",
    "Microbatching",
    "NoEffectWarning",
    "NotLosslessWarning",
    "OptimizerState",
    "Plan",
    "Prediction",
    "Recipe",
    "SparseUpdate",
    "Sparsity",
    "Tiling",
    "UpdateSchedule",
    "Verification",
    "allocation_peak",
    "apply_activation_compression",
    "apply_checkpointing",
    "apply_low_precision",
    "apply_low_rank",
    "apply_optimizer_state",
    "apply_sparse_update",
    "apply_sparsity",
    "apply_tiling",
    "export_dense",
    "microbatches",
    "plan_checkpointing",
    "plan_sparse_update",
    "plan_training",
    "predict",
    "verify",
    "wandb_logger",
]
