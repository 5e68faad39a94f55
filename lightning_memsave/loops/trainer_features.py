"""How a trainer trains, in the words of `core.compatibility`."""

from __future__ import annotations

from types import NoneType

import lightning as L
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_memsave.lightning_compat import (
    callbacks_named,
    ddp_options_of,
    has_ddp_hook,
    has_own_loop,
    is_compiled,
    is_tensor_parallel,
    kinds_of,
)
from lightning_memsave.loops.optimizer_changes import ways_of_stepping
from lightning_memsave.techniques.low_precision import LossScaling
from lightning_memsave.torch_internals.private_names import missing
from lightning_memsave.torch_internals.sharded_parameters import can_begin_anew

_OF_PROCESSES = {"DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}
_OF_RECOVERY = ("FSDP2 after an error", "sharded parameters", "DDP")


def ways_of_training(trainer: L.Trainer) -> list[str]:
    """Return the names, of `core.compatibility`, that describe how this trainer trains."""
    strategy, kinds = trainer.strategy, kinds_of(trainer.strategy)
    is_ddp, is_fsdp2 = "DDPStrategy" in kinds, "ModelParallelStrategy" in kinds
    training_step = trainer.lightning_module.training_step
    present = {
        "manual optimization": not trainer.lightning_module.automatic_optimization,
        "DDP": is_ddp,
        "DDP with static_graph": is_ddp and ddp_options_of(strategy).get("static_graph", False),
        "FSDP": "FSDPStrategy" in kinds,
        "model parallel (FSDP2)": is_fsdp2,
        "tensor parallelism": is_tensor_parallel(strategy),
        "DeepSpeed": "DeepSpeedStrategy" in kinds,
        "processes without DDP": trainer.world_size > 1 and not kinds & _OF_PROCESSES,
        "dataloader_iter": is_param_in_hook_signature(training_step, "dataloader_iter", explicit=True),
        "torch.compile of the whole module": is_compiled(trainer.lightning_module),
        "fp16 with a GradScaler": not isinstance(
            getattr(strategy.precision_plugin, "scaler", None), LossScaling | NoneType
        ),
        "a DDP communication hook": is_ddp and has_ddp_hook(strategy),
        "SyncBatchNorm": any(isinstance(m, nn.SyncBatchNorm) for m in trainer.lightning_module.modules()),
        "batch size finder": bool(callbacks_named(trainer, "BatchSizeFinder")),
        "learning rate finder": bool(callbacks_named(trainer, "LearningRateFinder")),
        "stochastic weight averaging of BatchNorm": bool(callbacks_named(trainer, "StochasticWeightAveraging"))
        and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in trainer.lightning_module.modules()),
        "an unknown training loop": bool(missing("training loop")) or has_own_loop(trainer),
        "an unknown DDP": is_ddp and bool(missing("DDP")),
        "an unknown FSDP2": is_fsdp2 and any(map(missing, _OF_RECOVERY)),
        "FSDP2 before torch 2.13": is_fsdp2 and not can_begin_anew(),
        **ways_of_stepping(trainer),
    }
    return [name for name, is_present in present.items() if is_present]
