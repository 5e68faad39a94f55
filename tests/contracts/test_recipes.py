"""The named recipes, on the toy of the contracts: all of their settings at work, and plain modules and checkpoints."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from lightning_memsave import MemSave
from lightning_memsave.core.report import worst_loss_class
from lightning_memsave.planner.recipes import RECIPES
from tests.contracts.test_contracts import SPECS, Toy, assert_parameters, data, train

NAMES = ("lossless", "balanced", "extreme")
ONE_EPOCH = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
QUIET_UNTIL_NEEDED = {"lossless": {"microbatching"}, "balanced": {"microbatching"}}  # recovery


def test_the_named_recipes_are_a_ladder():
    stems = [set(RECIPES[name].stems()) for name in NAMES]
    assert stems[0] < stems[1] < stems[2]
    assert all(set(map(type, recipe.techniques)) == set(recipe.by_default) for recipe in RECIPES.values())


@pytest.mark.parametrize("name", NAMES)
def test_all_of_a_recipe_is_at_work_and_the_loss_class_is_the_worst_of_it(name):
    baseline = MemSave("measure")
    train(baseline, double=False)
    memsave = MemSave(name).compare_to(baseline.report)
    _, module = train(memsave, double=False)
    stems = [stem for stem in memsave.recipe.stems() if stem not in QUIET_UNTIL_NEEDED.get(name, ())]
    assert [a.technique for a in memsave.report.applied] == stems
    assert memsave.report.loss_class == worst_loss_class(SPECS[stem].loss_class for stem in stems)
    assert memsave.report.peak_bytes < baseline.report.peak_bytes
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_each_recipe_takes_less_than_the_one_before():
    peaks = []
    for name in NAMES:
        memsave = MemSave(name)
        train(memsave, double=False)
        peaks.append(memsave.report.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_exact_is_bit_equal():
    memsave = MemSave("exact")
    _, plain = train(None, double=False)
    _, ours = train(memsave, double=False)
    assert_parameters(plain, ours, bit_equal=True)
    assert memsave.report.loss_class == "exact"
    assert "checkpointing" in [applied.technique for applied in memsave.report.applied]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("name", ["balanced", "extreme"])
def test_checkpoints_are_plain_and_resume_is_bit_equal(name, tmp_path):
    trainer, _ = train(MemSave(name), double=False)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    plain = train(None, double=False)[1].state_dict()
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert {key: t.shape for key, t in saved.items()} == {key: t.shape for key, t in plain.items()}
    _, straight = train(MemSave(name), double=False, epochs=4)
    _, resumed = train(MemSave(name), double=False, epochs=4, ckpt=tmp_path / "half.ckpt")
    assert_parameters(straight, resumed, bit_equal=True)
    train(None, double=False, epochs=4, ckpt=tmp_path / "half.ckpt")


class WithoutKin(Toy):
    """An optimizer without a low-bit kin, without blocks to checkpoint, and too small to be sparse."""

    def __init__(self):
        super().__init__()
        self.blocks, self.stem, self.head = torch.nn.Identity(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
        self.norm = torch.nn.Identity()

    def configure_optimizers(self):
        return torch.optim.ASGD(self.parameters(), 1e-3)


@pytest.mark.parametrize("name", ["balanced", "extreme"])
def test_a_default_that_cannot_work_steps_aside(name):
    memsave = MemSave(name)
    L.Trainer(callbacks=[memsave], **ONE_EPOCH).fit(WithoutKin(), data())
    applied = {a.technique for a in memsave.report.applied}
    assert "optimizer_state" not in applied
    assert "sparsity" not in applied
    assert "checkpointing" not in applied
    asked = L.Trainer(callbacks=[MemSave(name, optimizer_state="8bit")], **ONE_EPOCH)
    with pytest.raises(ValueError, match="optimizer_state"):
        asked.fit(WithoutKin(), data())
