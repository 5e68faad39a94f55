from __future__ import annotations

from itertools import combinations

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_memsave import MemSave
from lightning_memsave.core.compatibility import COMPATIBILITY, SETTINGS, WAYS_OF_TRAINING, check_compatibility
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.techniques.registry import TECHNIQUES

OLD_FSDP2 = ["FSDP2 before torch 2.13"] if torch.__version__ < (2, 13) else []
STEMS = [technique.stem for technique in TECHNIQUES]
REFUSED = [row for row in COMPATIBILITY if row.refused_because]


def test_rows_name_what_exists_and_no_pair_twice():
    known = {*STEMS, *SETTINGS, *WAYS_OF_TRAINING}
    assert {name for row in COMPATIBILITY for name in (row.first, row.second)} <= known
    pairs = [frozenset((row.first, row.second)) for row in COMPATIBILITY]
    assert len(set(pairs)) == len(pairs)
    assert {frozenset(pair) for pair in combinations(STEMS, 2)} <= set(pairs)
    distributed = ("DDP", "model parallel (FSDP2)")
    assert {frozenset((stem, way)) for stem in STEMS for way in distributed} <= set(pairs)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.first}+{row.second}")
def test_a_refusal_names_both_the_reason_and_the_way_out(row):
    assert row.remedy
    assert row.remedy[0].isupper()
    assert row.refused_because not in WAYS_OF_TRAINING
    with pytest.raises(ValueError, match="cannot be combined") as caught:
        check_compatibility([row.second, row.first, "early_zero_grad"])
    for part in (row.first, row.second, row.refused_because, row.remedy):
        assert part in str(caught.value)


def test_what_is_not_refused_passes():
    for row in COMPATIBILITY:
        if not row.refused_because:
            check_compatibility([row.first, row.second])


class Iterates(BoringModel):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(self(batch))


class Manual(BoringModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def trainer_of(module, **options):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    trainer.strategy.connect(module)
    trainer.strategy._lightning_module = module
    return trainer


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (BoringModel(), {}, []),
        (Manual(), {}, ["manual optimization"]),
        (Iterates(), {}, ["dataloader_iter"]),
        (BoringModel(), {"strategy": "ddp"}, ["DDP"]),
        (BoringModel(), {"strategy": "memsave_ddp"}, ["DDP"]),
        (
            BoringModel(),
            {"strategy": L.pytorch.strategies.DDPStrategy(static_graph=True)},
            ["DDP", "DDP with static_graph"],
        ),
        (BoringModel(), {"strategy": "memsave_fsdp"}, ["model parallel (FSDP2)", *OLD_FSDP2]),
        (
            BoringModel(),
            {"strategy": L.pytorch.strategies.ModelParallelStrategy(1, 2)},
            ["model parallel (FSDP2)", "tensor parallelism", *OLD_FSDP2],
        ),
        (
            BoringModel(),
            {"plugins": [L.pytorch.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
            ["fp16 with a GradScaler"],
        ),
    ],
    ids=lambda value: value if isinstance(value, list) else None,
)
def test_ways_of_training_are_recognised(module, options, expected):
    assert ways_of_training(trainer_of(module, **options)) == expected


@pytest.mark.filterwarnings("ignore")
def test_dataloader_iter_is_refused_before_training():
    with pytest.raises(ValueError, match=r"dataloader_iter.*microbatches\(batch\)"):
        L.Trainer(
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, callbacks=[MemSave(microbatch=1)]
        ).fit(Iterates(), DataLoader(RandomDataset(32, 8), batch_size=4))
