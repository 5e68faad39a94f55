"""How a trainer trains, in the words of the compatibility table."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn

from lightning_memsave import MemSaveStrategy
from lightning_memsave.core.compatibility import WAYS_OF_TRAINING
from lightning_memsave.loops.trainer_features import ways_of_training


class ByHand(BoringModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TakesAnIterator(BoringModel):
    def training_step(self, dataloader_iter):
        return super().training_step(*next(dataloader_iter))


class Synchronised(BoringModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.Sequential(nn.SyncBatchNorm(2))


def ways(module=None, **options):
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": 1, **options},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.strategy.connect(BoringModel() if module is None else module)
    return ways_of_training(trainer)


def scaler():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"strategy": MemSaveStrategy()}, []),
        ({"precision": "bf16-mixed"}, []),
        ({"gradient_clip_val": 0}, []),
        ({"module": ByHand()}, ["manual optimization"]),
        ({"module": TakesAnIterator()}, ["dataloader_iter"]),
        ({"module": Synchronised()}, ["SyncBatchNorm"]),
        ({"module": from_compiled(torch.compile(BoringModel()))}, ["torch.compile of the whole module"]),
        ({"strategy": "ddp"}, ["DDP"]),
        ({"strategy": "memsave_ddp"}, ["DDP"]),
        ({"strategy": DDPStrategy(static_graph=True)}, ["DDP", "DDP with static_graph"]),
        ({"strategy": DDPStrategy(ddp_comm_hook=print)}, ["DDP", "a DDP communication hook"]),
        (scaler(), ["fp16 with a GradScaler"]),
        ({"callbacks": [BatchSizeFinder()]}, ["batch size finder"]),
        ({"callbacks": [LearningRateFinder()]}, ["learning rate finder"]),
        ({"accumulate_grad_batches": 3}, ["accumulate_grad_batches"]),
        ({"gradient_clip_val": 0.5}, ["gradient clipping by norm"]),
    ],
)
def test_each_way_has_its_name_and_no_other(options, expected):
    assert ways(**options) == expected
    assert set(expected) <= set(WAYS_OF_TRAINING)


def test_several_ways_are_named_together():
    found = ways(ByHand(), strategy=DDPStrategy(), **scaler())
    assert found == ["manual optimization", "DDP", "fp16 with a GradScaler"]


def test_classes_that_derive_from_lightnings_count_as_theirs():
    class OurFinder(BatchSizeFinder):
        pass

    class OurStrategy(DDPStrategy):
        pass

    assert ways(callbacks=[OurFinder()], strategy=OurStrategy()) == ["DDP", "batch size finder"]
