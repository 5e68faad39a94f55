"""What is left of a fit: a trainer that can be copied and pickled."""

from __future__ import annotations

import copy
import gc
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_memsave import MemSave, Sparsity

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
SLOTS = [{}, {"recipe": "measure"}, {"activations": "exact"}, {"checkpointing": "sqrt"}, {"microbatch": 2},
         {"precision": "bf16-sr"}, {"recipe": "balanced"},
         {"sparsity": Sparsity(sparsity=0.5, min_size=1)}]  # fmt: skip


def fitted(slots):
    trainer = L.Trainer(**QUIET, max_steps=3, limit_val_batches=0, accelerator="cpu", callbacks=[MemSave(**slots)])
    with torch.random.fork_rng():
        trainer.fit(BoringModel())
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_the_trainer_can_be_pickled_and_copied_after_a_fit(slots):
    for _ in range(2):
        trainer = fitted(slots)
        twin = pickle.loads(pickle.dumps(trainer))
        assert type(twin.strategy) is type(trainer.strategy)
        is_sparse = "sparsity" in slots  # such a strategy goes on writing checkpoints
        assert type(twin.strategy).__module__.startswith("lightning_memsave.") == is_sparse
        for other in (twin, copy.deepcopy(trainer)):
            for a, b in zip(trainer.lightning_module.parameters(), other.lightning_module.parameters(), strict=True):
                assert torch.equal(a, b)
        del trainer, twin, other
        gc.collect()  # references that were copied would be freed twice
