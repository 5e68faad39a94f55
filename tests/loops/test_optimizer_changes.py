"""What a run makes of optimizers, what a second fit replaces or tells, and what of a checkpoint they can read."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, NoEffectWarning, OptimizerState
from lightning_memsave.core.compatibility import WAYS_OF_TRAINING
from lightning_memsave.loops import optimizer_changes
from lightning_memsave.loops.optimizer_changes import most_accumulated, readable, ways_of_stepping
from lightning_memsave.techniques.optimizer_state import apply_format


class Keeps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.optimizer = torch.optim.AdamW(self.parameters(), 1e-2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return self.optimizer


def fit(module, callbacks=(), max_epochs=1, **settings):
    memsave = MemSave(**settings)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[memsave, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(16, 32), 4))
    return memsave.report


class Finetuned(Keeps):
    """A backbone that joins the optimizer in the second epoch."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(32, 128)
        self.layer = torch.nn.Linear(128, 4)

    def training_step(self, batch, batch_idx):
        return self.layer(self.backbone(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-2)


def test_layers_that_are_unfrozen_later_are_told_and_measured():
    config = OptimizerState(first_moment="8bit", min_size=1024)
    report = fit(Finetuned(), [BackboneFinetuning(1, verbose=False)], optimizer_state=config)
    assert (report.loss_class, report.by_category["optimizer_state"]) == ("exact", 2 * 4 * (128 * 4 + 4) + 2 * 4)
    assert "for 0 of 2 parameters" in report.applied[-1].summary
    report = fit(Finetuned(), [BackboneFinetuning(1, verbose=False)], 2, optimizer_state=config)
    assert report.loss_class == "changed"
    assert "for 1 of 4 parameters" in report.applied[-1].summary
    assert report.by_category["gradients"] == 4 * sum(p.numel() for p in Finetuned().parameters())


@pytest.fixture
def kept():
    module = Keeps()
    assert fit(module, optimizer_state=OptimizerState(first_moment="8bit", min_size=1)).loss_class == "changed"
    assert type(module.optimizer).__qualname__ == "AdamWCoded"
    return module


def steps_of(module):
    return {float(state["step"]) for state in module.optimizer.state.values()}


def test_a_fit_that_does_not_ask_for_low_bit_state_says_that_there_is_some(kept):
    report = fit(kept)
    assert report.loss_class == "changed"
    assert "the state of AdamWCoded is low-bit" in report.loss_class_reasons
    assert steps_of(kept) == {8.0}


def test_another_format_replaces_it(kept):
    report = fit(kept, optimizer_state=OptimizerState(first_moment="4bit", min_size=1))
    assert any("4-bit state" in applied.summary for applied in report.applied)
    assert steps_of(kept) == {8.0}


def test_releasing_gradients_in_32_bits_leaves_it(kept):
    report = fit(kept, optimizer_state=OptimizerState(first_moment="32bit", gradients="release"))
    assert type(kept.optimizer) is torch.optim.AdamW
    assert report.loss_class == "exact"
    assert steps_of(kept) == {8.0}


@pytest.mark.parametrize("state", ["8bit", "4bit", "offload", OptimizerState(projection="galore", rank=64, min_size=0)])
def test_a_format_that_changes_no_parameters_state_says_so(state):
    with pytest.warns(NoEffectWarning, match="`optimizer_state` in '.*' has no effect on this model"):
        report = fit(Keeps(), optimizer_state=state)
    assert report.loss_class == "exact"


def test_a_default_that_changes_nothing_is_silent():
    report = fit(Keeps(), recipe="balanced", activations=False, precision=False)
    assert report.loss_class == "exact"  # warnings are errors here


class ClipsItself(BoringModel):
    def configure_gradient_clipping(self, *args, **options):
        pass


class StepsItself(BoringModel):
    def optimizer_step(self, *args, **options):
        pass


class ZeroesItself(BoringModel):
    def optimizer_zero_grad(self, *args):
        pass


def connected(module, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", **quiet, **options)
    trainer.strategy.connect(module)
    return trainer


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (BoringModel, {}, set()),
        (BoringModel, {"accumulate_grad_batches": 2}, {"accumulate_grad_batches"}),
        (BoringModel, {"gradient_clip_val": 1.0}, {"gradient clipping by norm"}),
        (
            BoringModel,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            {"gradient clipping by value"},
        ),
        (BoringModel, {"gradient_clip_algorithm": "value"}, set()),
        (ClipsItself, {}, {"configure_gradient_clipping"}),
        (StepsItself, {}, {"optimizer_step of the module"}),
        (ZeroesItself, {}, {"optimizer_zero_grad of the module"}),
    ],
)
def test_what_happens_to_gradients_before_the_step_is_named(module, options, expected):
    found = ways_of_stepping(connected(module(), **options))
    assert {name for name, is_present in found.items() if is_present} == expected
    assert set(found) <= set(WAYS_OF_TRAINING)


def test_the_most_batches_that_are_ever_added_up_are_those_of_a_schedule_too():
    class OurScheduler(GradientAccumulationScheduler):
        pass

    assert most_accumulated(connected(BoringModel(), accumulate_grad_batches=3)) == 3
    assert most_accumulated(connected(BoringModel(), callbacks=[OurScheduler({0: 1, 4: 8, 6: 2})])) == 8


def stepped(optimizer, parameter):
    for step in range(2):
        parameter.grad = torch.linspace(-1, 1, parameter.numel()) * (step + 1)
        optimizer.step()
    return optimizer


def test_a_plain_optimizer_gets_the_numbers_that_codes_stand_for_and_a_low_bit_one_the_codes():
    weights = [torch.nn.Parameter(torch.zeros(256)) for _ in range(3)]
    coded, exact, plain = (torch.optim.AdamW([each], 1e-2) for each in weights)
    apply_format(coded, OptimizerState(first_moment="8bit", min_size=1, checkpoint="compact"), torch.nn.Module())
    states = [stepped(coded, weights[0]).state_dict(), stepped(exact, weights[1]).state_dict()]
    checkpoint = {"epoch": 3, "optimizer_states": states}
    assert isinstance(states[0]["state"][0]["exp_avg"], dict), "of codes"
    found = readable([plain], checkpoint)
    assert found["epoch"] == 3
    assert found["optimizer_states"][1] is states[1], "of an optimizer that is not there"
    assert checkpoint["optimizer_states"] == states, "the checkpoint itself stays"
    plain.load_state_dict(found["optimizer_states"][0])
    moments, expected = plain.state[weights[2]], exact.state[weights[1]]
    assert moments["step"] == 2
    for name in ("exp_avg", "exp_avg_sq"):
        assert moments[name].dtype == torch.float32
        largest = float(expected[name].abs().max())
        assert float((moments[name] - expected[name]).abs().max()) <= largest / 16
    assert readable([coded], checkpoint)["optimizer_states"][0] is states[0]


def test_hooks_that_would_see_no_gradients_are_named(monkeypatch):
    class Looks(L.Callback):
        def on_after_backward(self, trainer, pl_module):
            seen.append(pl_module.layer.weight.grad)

    seen, told = [], []
    monkeypatch.setattr(optimizer_changes, "rank_zero_info", told.append)
    module = Keeps()
    state = OptimizerState(first_moment="32bit", gradients="release")
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[MemSave(optimizer_state=state), Looks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(8, 32), 4))
    assert seen == [None, None]
    assert len(told) == 1
    assert "Looks.on_after_backward" in told[0]


def test_values_are_clipped_in_backward_where_gradients_are_released():
    def fitted(memsave):
        torch.manual_seed(0)
        module = Keeps()
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=[memsave],
            gradient_clip_val=1e-3,
            gradient_clip_algorithm="value",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(torch.ones(16, 32), 4))
        assert trainer.gradient_clip_val == 1e-3
        return module.layer.weight

    state = OptimizerState(first_moment="32bit", gradients="release")
    assert torch.equal(fitted(MemSave("measure", optimizer_state=state)), fitted(MemSave("measure")))
