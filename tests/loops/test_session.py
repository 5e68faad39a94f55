"""The session of a run: what follows from its recipe, what it learns, and what it gives back."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import Checkpointing, MemSave, Microbatching, OptimizerState, Recipe
from lightning_memsave.loops.kept_weights import KeptWeights
from lightning_memsave.loops.session import Session
from lightning_memsave.planner.recipes import RECIPES
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad

LEARNED = {
    "num_measures": 2,
    "training": {"limit_elements": 48.0, "interval": 16},
    "evaluation": {"limit_elements": 96.0, "interval": 8},
}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_recovery_is_there_where_the_size_is_left_to_it():
    lossless, cut, plain = (Session(recipe) for recipe in (RECIPES["lossless"], CUT, Recipe("measure")))
    assert (lossless.num_recovered, cut.num_recovered, plain.num_recovered) == (0, None, None)
    assert (lossless.cutter.size, cut.cutter.size, plain.cutter.size) == (None, 4, None)
    assert (lossless.zero_grad_first, cut.zero_grad_first, plain.zero_grad_first) == (True, False, False)
    assert [a.technique for a in lossless.applied] == ["early_zero_grad"]
    assert plain.applied == ()


CUT = Recipe("cut", (Microbatching(size=4),))


def test_what_was_learned_goes_into_a_checkpoint_and_comes_back():
    session = Session(RECIPES["lossless"])
    assert session.state_dict() == {}, "nothing is known yet"
    session.load_state_dict(LEARNED)
    assert session.state_dict() == LEARNED
    assert Session(RECIPES["lossless"]).after(session).state_dict() == LEARNED
    assert Session(RECIPES["lossless"]).after(None).state_dict() == {}


def test_a_session_without_recovery_leaves_what_was_learned_alone():
    session = Session(CUT)
    session.load_state_dict({**LEARNED, "sparsity": {"layer": 1}})
    assert session.state_dict() == {}
    assert session.saved_training == {"sparsity": {"layer": 1}}


def test_a_fit_with_less_of_its_recipe_goes_on_from_what_was_learned():
    session = Session(RECIPES["lossless"])
    session.load_state_dict(LEARNED)
    same = session.recovery
    session.begin(RECIPES["lossless"])
    assert session.recovery is same
    session.begin(RECIPES["lossless"].without(EarlyZeroGrad))
    assert session.recovery is not same
    assert session.state_dict() == LEARNED
    assert not session.zero_grad_first
    assert session.started


def test_a_source_decides_on_the_recipe():
    asked = []

    class Chooses:
        def decide(self, trainer):
            asked.append(trainer)
            return CUT

    trainer = L.Trainer(**QUIET)
    session = Session(RECIPES["lossless"], Chooses())
    assert not session.is_decided
    assert session.decide(trainer) is session.decide(trainer) is CUT
    assert session.is_decided
    assert asked == [trainer]
    assert Session(RECIPES["lossless"]).decide(trainer) is RECIPES["lossless"]


def test_what_was_done_is_told_in_the_order_of_recipes():
    memsave = MemSave(
        optimizer_state=OptimizerState(first_moment="8bit", min_size=1),
        checkpointing=Checkpointing(modules="layer"),
        microbatch=1,
        precision="bf16-sr",
    )
    trainer = L.Trainer(**QUIET, max_steps=2, limit_val_batches=0, callbacks=[memsave])
    module = BoringModel()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), 1e-3)
    trainer.fit(module)
    techniques = [applied.technique for applied in memsave.report.applied]
    assert techniques == ["early_zero_grad", "low_precision", "checkpointing", "optimizer_state"]


@pytest.mark.parametrize(
    ("weights", "text", "is_told"),
    [
        (SimpleNamespace(reason="weights are bfloat16"), "expected scalar type Float but found BFloat16", True),
        (SimpleNamespace(reason="weights are bfloat16"), "sizes do not match", False),
        (None, "expected scalar type Float but found BFloat16", False),
    ],
)
def test_an_error_about_dtypes_names_the_setting_where_weights_were_lowered(weights, text, is_told):
    def fails():
        raise RuntimeError(text)

    session = Session(Recipe("measure"))
    session.weights = weights
    with pytest.raises(RuntimeError, match=text) as caught:
        session.run(L.Trainer(**QUIET), fails, ())
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("weights are bfloat16" in notes) is ("MemSave(precision=...)" in notes) is is_told


def test_weights_of_a_trial_and_the_model_come_back_at_the_end():
    session, module, undone = Session(Recipe("measure")), nn.Linear(2, 2), []
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    session.kept_weights = KeptWeights(module, copies=True)
    session.release = SimpleNamespace(remove=lambda: undone.append("release"))
    for technique in ("sparsity", "optimizer_state", "low_precision"):
        session.changes.append(
            SimpleNamespace(
                technique=technique,
                undo=lambda technique=technique: undone.append(technique),
                keep=lambda technique=technique: undone.append(f"{technique} is kept"),
            )
        )
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    session.finish()
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert undone == ["release", "low_precision", "optimizer_state is kept", "sparsity"]
    assert (session.weights, session.release, session.kept_weights) == (None, None, None)


@pytest.mark.parametrize(("is_refused", "begins"), [(True, False), (True, True), (False, False)])
def test_weights_come_back_where_a_fit_is_refused_before_its_first_step(is_refused, begins):
    session, module = Session(Recipe("measure")), nn.Linear(2, 2)
    before = module.weight.detach().clone()
    session.kept_weights = KeptWeights(module)
    module.weight.data = torch.zeros(2, 2)
    if begins:
        session.begin_step()
    session.finish(is_refused=is_refused)
    assert torch.equal(module.weight, before) is (is_refused and not begins)


@pytest.mark.filterwarnings("ignore:.*Sparse.*")
def test_an_error_about_dtypes_in_backward_names_the_setting():
    class Graph(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def training_step(self, batch, batch_idx):
            adjacent = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (5, 5)).coalesce()
            return self.head(torch.sparse.mm(adjacent, self.first(batch))).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = L.Trainer(**QUIET, max_steps=1, callbacks=[MemSave(precision="bf16-sr")])
    with pytest.raises(RuntimeError, match="BFloat16") as caught:
        trainer.fit(Graph(), DataLoader([torch.randn(5, 4)], batch_size=None))
    assert any("`precision=False`" in note for note in caught.value.__notes__)
