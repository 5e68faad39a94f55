"""A budget through real trainers: what is measured stays within it, and nothing else notices."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from lightning_memsave import BudgetWarning, MemoryMonitor, MemSave, Microbatching, OptimizerState, Plan, plan_training
from lightning_memsave.planner.search import Search
from lightning_memsave.prediction import budgeted_run, run_predictions
from lightning_memsave.prediction.real_run import Trial
from lightning_memsave.reporting.messages import outcome
from tests.prediction.budget_runs import ONLY_PARTS, Net, Wide, data, train


class Noisy(Net):
    norm = nn.BatchNorm1d


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture(scope="module", autouse=True)
def same_plans_at_any_load():
    """Plans by the model of times alone; `tests/planner/test_search.py` has measured ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_fastest", lambda self, level, best, limit_bytes: best)
        yield


@pytest.fixture(scope="module")
def plain():
    return train(None)[1]


@pytest.fixture(scope="module")
def planned():
    memsave, monitor = MemSave(budget="0.6x"), MemoryMonitor(workspace=True)
    _, module = train(memsave, callbacks=[monitor])
    return memsave, module


def test_a_planned_run_stays_within_its_budget_and_is_the_plain_run(plain, planned):
    memsave, ours = planned
    report, plan = memsave.report, memsave.plan
    assert report.peak_bytes + report.workspace_bytes <= plan.budget_bytes
    assert (
        0 <= plan.peak_bytes - report.peak_bytes <= 1024
    )  # the trial is the run, but for what is noted of microbatches
    assert report.predicted_peak_bytes == plan.peak_bytes
    assert report.loss_class == plan.loss_class == "exact"
    assert report.baseline_source == "predicted"
    assert report.factor > 1
    assert ours.seen == plain.seen  # the same batches, in the same order
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert plan.num_predictions <= 101


def test_the_report_and_the_plan_tell_what_came_of_it(planned):
    memsave, _ = planned
    text = outcome(memsave.plan, memsave.report)
    assert "measured" in text
    assert "limited by" in text
    assert "Plan for a budget of" in str(memsave.plan)
    assert memsave.plan.steps
    assert all(step.saves_bytes > 0 for step in memsave.plan.steps)
    assert all("above the budget" in step.reason for step in memsave.plan.steps)
    assert memsave.plan.next_step.endswith("of its budget free")
    assert memsave.report.metrics()["memsave/budget_bytes"] == memsave.plan.budget_bytes
    assert Plan.from_json(memsave._config()["plan"]) == memsave.plan


def test_a_plan_is_replayed_elsewhere_to_the_bit(planned):
    memsave, first = planned
    again = MemSave(Plan.from_json(memsave.plan.to_json()))
    _, second = train(again)
    assert same_bits(first, second)
    assert again.report.peak_bytes == memsave.report.peak_bytes


def test_a_fit_ends_with_one_line_on_its_plan(planned, info):
    train(MemSave(planned[0].plan))
    told = [record.message for record in info.records if record.message.startswith("memsave: budget")]
    assert len(told) == 1
    assert re.search(r"KiB measured \([+-]0\.[0-3]%\)", told[0])


def test_steps_that_are_large_are_planned_for_their_shapes_and_confirmed(monkeypatch):
    monkeypatch.setattr(budgeted_run, "SMALL_BYTES", 0)
    trials = []
    real = Trial.__call__

    def counted(self, techniques):
        trials.append(techniques)
        return real(self, techniques)

    monkeypatch.setattr(Trial, "__call__", counted)
    lines = []
    monkeypatch.setattr(budgeted_run, "rank_zero_info", lines.append)
    memsave = MemSave(budget="0.6x", **ONLY_PARTS)
    train(memsave, callbacks=[MemoryMonitor(workspace=True)])
    plan, report = memsave.plan, memsave.report
    assert plan.num_predictions > len(trials) > 0  # shapes are what most was asked of, real steps confirm
    assert report.peak_bytes + report.workspace_bytes <= plan.budget_bytes
    assert lines[0].startswith("memsave: looking for a plan within 0.6x")


def test_what_fits_anyway_is_left_alone_to_the_bit(plain):
    memsave = MemSave(budget="100%")
    _, ours = train(memsave)
    assert memsave.plan.steps == ()
    assert same_bits(plain, ours)
    assert plain.seen == ours.seen


def test_what_cannot_fit_is_refused_before_training_and_the_smallest_that_can_is_named():
    module = Net()
    before = copy.deepcopy(module.state_dict())
    few = {"checkpointing": False, "sparsity": False}
    with pytest.raises(ValueError, match=r'must be at least .* under "lossless"') as caught:
        train(MemSave(budget=100_000, **few), module)
    assert module.seen == []
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    text = str(caught.value)
    assert re.search(r'"extreme" reaches .*, too much as well', text)
    smallest = int(re.search(r"\((\d+) bytes\)", text)[1])
    made = plan_training(module, next(iter(data())), MemSave(budget=smallest, **few))
    assert smallest / 1.01 <= made.needed_bytes <= smallest


@pytest.mark.slow
def test_less_than_the_smallest_that_a_refusal_names_is_refused_as_well():
    few = {"checkpointing": False, "sparsity": False}
    with pytest.raises(ValueError, match="must be at least") as caught:
        plan_training(Net(), next(iter(data())), MemSave(budget=100_000, **few))
    smallest = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])
    with pytest.raises(ValueError, match="must be at least"):
        plan_training(Net(), next(iter(data())), MemSave(budget=int(smallest / 1.02), **few))


def test_lossless_never_cuts_a_batch_whose_statistics_count():
    few = {"checkpointing": False, "optimizer_state": False}
    memsave = MemSave(budget="0.85x", **few)
    _, plain = train(None, Noisy)
    _, ours = train(memsave, Noisy)
    assert memsave.report.loss_class == "exact"
    assert [step.technique for step in memsave.plan.steps] == ["activation_compression"]
    assert same_bits(plain, ours)
    with pytest.raises(ValueError, match="must be at least"):
        train(MemSave(budget="0.3x", **few), Noisy)


def test_what_is_set_stays_as_it_is_set():
    memsave = MemSave(budget="0.6x", **{**ONLY_PARTS, "activations": "exact"})
    made = plan_training(Net(), next(iter(data())), memsave)
    stems = made.as_recipe().stems()
    assert "activation_compression" in stems
    assert "checkpointing" not in stems
    assert all(step.technique == "microbatching" for step in made.steps)


def test_a_resumed_run_has_the_plan_of_the_first_one(tmp_path, monkeypatch):
    path, memsave = tmp_path / "half.ckpt", MemSave(budget="0.7x", **ONLY_PARTS)
    trainer, _ = train(memsave, loader=data(shuffle=False))
    trainer.save_checkpoint(path)
    assert "plan" in next(iter(torch.load(path, weights_only=True)["callbacks"].values()))
    _, straight = train(MemSave(budget="0.7x", **ONLY_PARTS), max_epochs=4, loader=data(shuffle=False))

    resumed = MemSave(budget="0.7x", **ONLY_PARTS)
    plan_training(Wide(), next(iter(data())), resumed)  # another module's

    def predict(self, techniques):
        raise AssertionError("a resumed run does not plan")

    monkeypatch.setattr(Trial, "__call__", predict)
    _, module = train(resumed, max_epochs=4, loader=data(shuffle=False), ckpt_path=path)
    assert resumed.plan == memsave.plan
    assert same_bits(straight, module)
    with pytest.raises(AssertionError, match="does not plan"):
        train(MemSave(budget="0.71x", **ONLY_PARTS), max_epochs=4, loader=data(shuffle=False), ckpt_path=path)


@pytest.fixture
def asked(monkeypatch, planned):
    """Batches that each trainer adds up at most, of the runs that a plan was asked for; it is always the same."""
    found = []

    def plan_for(module, batch, budget, recipe, trainer=None, seconds=None):
        found.append(None if trainer is None else run_predictions.options_of(trainer)["accumulate_grad_batches"])
        return planned[0].plan

    monkeypatch.setattr(budgeted_run, "plan_for", plan_for)
    return found


def test_a_plan_is_taken_again_by_a_run_of_its_kind_only(asked):
    memsave, module = MemSave(budget="0.6x"), Net()
    half = DataLoader(data().dataset, 48)
    by_sampler = DataLoader(data().dataset, batch_sampler=BatchSampler(range(384), 96, drop_last=True))
    for loader, options, num_asked in (
        (data(), {}, 1),
        (data(), {}, 1),
        (half, {}, 2),
        (half, {"accumulate_grad_batches": 2}, 3),
        (half, {}, 4),
        (by_sampler, {}, 5),
        (data(), {}, 5),
    ):
        train(memsave, module, max_epochs=1, loader=loader, **options)
        assert len(asked) == num_asked
    assert asked == [1, 1, 2, 1, 1]
    plan_training(module, next(iter(half)), memsave)
    train(memsave, module, max_epochs=1, loader=half)
    assert len(asked) == 6
    train(memsave, module, max_epochs=1, loader=half, precision="bf16-mixed")
    assert len(asked) == 7


def test_a_checkpoints_plan_is_for_batches_of_its_size(asked, tmp_path):
    path = tmp_path / "half.ckpt"
    trainer, _ = train(MemSave(budget="0.6x"), max_epochs=1)
    trainer.save_checkpoint(path)
    train(MemSave(budget="0.6x"), ckpt_path=path)
    assert len(asked) == 1
    train(MemSave(budget="0.6x"), ckpt_path=path, loader=DataLoader(data().dataset, 48))
    assert len(asked) == 2


def test_batches_that_are_added_up_later_are_planned_for(asked):
    for more in ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, {"accumulate_grad_batches": 2}, {}):
        train(MemSave(budget="0.6x"), max_epochs=1, **more)
    assert asked == [2, 2, 1]


class TooLow(Trial):
    """Overlooks half of the activations."""

    def __call__(self, techniques):
        found = super().__call__(techniques)
        split = dict(found.by_category)
        split["activations"] //= 2
        return dataclasses.replace(found, by_category=split, peak_bytes=sum(split.values()), workspace_bytes=0)


def test_a_miss_is_told_and_corrected_in_the_run_without_losing_a_step(monkeypatch, caplog):
    monkeypatch.setattr(budgeted_run, "Trial", TooLow)
    _, plain = train(None, max_epochs=4)
    memsave = MemSave(budget="0.8x", checkpointing=False, optimizer_state=False)
    lines = []
    monkeypatch.setattr(budgeted_run, "rank_zero_info", lines.append)
    _, ours = train(memsave, max_epochs=4, callbacks=[MemoryMonitor(every=1)])
    assert any("too little activations predicted" in line for line in lines)
    assert memsave.report.peak_bytes > memsave.plan.budget_bytes  # the first measured step
    assert sum(memsave.current.values()) <= memsave.plan.budget_bytes  # the latest
    assert ours.seen == plain.seen
    assert memsave.report.loss_class == "exact"


def test_when_nothing_is_left_a_miss_is_warned_of(monkeypatch):
    monkeypatch.setattr(budgeted_run, "Trial", TooLow)
    with pytest.warns(BudgetWarning, match="goes beyond the budget"):
        train(MemSave(budget=400_000, microbatch=False, **ONLY_PARTS))


def test_a_finder_of_batch_sizes_is_refused():
    module = Net()
    module.batch_size = 8
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[MemSave(budget="0.5x"), BatchSizeFinder()],
        max_epochs=1,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match="cannot be planned with batch size finder"):
        trainer.fit(module, datamodule=L.LightningDataModule.from_datasets(data().dataset, batch_size=8))


class Late(Noisy):
    """Its layers are made when a run begins."""

    def __init__(self, hook):
        L.LightningModule.__init__(self)
        self.seen = []
        setattr(self, hook, self._make)

    def _make(self, stage=None):
        if not hasattr(self, "net"):
            self.net = Noisy().net


def test_layers_that_a_run_makes_are_planned_for(monkeypatch):
    """BatchNorm among them sees microbatches."""
    found = []
    make_plan = budgeted_run.make_plan
    monkeypatch.setattr(budgeted_run, "make_plan", lambda *args: found.append(args[2]) or make_plan(*args))
    batch = next(iter(data(shuffle=False)))
    module = Late("configure_model")
    memsave = MemSave(budget="0.9x")
    plan_training(module, batch, memsave)
    assert not found[0].is_cut_exact
    assert found[0].num_blocks == 3
    assert not list(module.parameters())
    made_for = budgeted_run._shapes(budgeted_run._with_all_layers(module))
    assert memsave.budgeted._made_for[0] == made_for  # as a run will see it
    with pytest.raises(ValueError, match=r"`budget` needs a module that has its layers, got 'Late without parameters'"):
        plan_training(Late("setup"), batch, MemSave(budget="0.9x"))

    def fails():
        raise RuntimeError("no mesh")

    module.configure_model = fails
    with pytest.raises(ValueError, match=r"configure_model` fails outside of a run \(RuntimeError: no mesh\)"):
        plan_training(module, batch, MemSave(budget="0.9x"))


def test_modules_of_the_other_lightning_have_hooks_as_well():
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        pass

    module = Other()
    assert budgeted_run._with_all_layers(module) is module
    Other.configure_model = lambda self: setattr(self, "net", torch.nn.Linear(2, 2))
    assert len(list(budgeted_run._with_all_layers(Other()).parameters())) == 2


def test_a_step_that_fails_is_named():
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no such thing")

    with pytest.raises(ValueError, match=r"cannot be planned, as it cannot be run .* no such thing"):
        train(MemSave(budget="0.5x"), Broken)


def test_a_trial_leaves_nothing_behind():
    module, batch = Net(), next(iter(data()))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    plain = Trial(module, batch)(())
    cut = Trial(module, batch)((Microbatching(size=8),))
    assert plain.source == "measured"
    assert sum(plain.by_category.values()) == plain.peak_bytes > cut.peak_bytes
    assert module.seen == []
    assert module._trainer is None
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    with pytest.raises(ValueError, match="gradient release"):
        Trial(module, batch)((Microbatching(size=8), OptimizerState(first_moment="32bit", gradients="release")))


def test_a_trial_times_two_microbatches_as_all_and_the_update_once(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(ticks)))  # one from each reading to the next
    module, batch = Net(), next(iter(data()))
    num_samples = len(batch[0])
    assert Trial(module, batch)(()).seconds == 1 + 1
    assert Trial(module, batch)((Microbatching(size=4),)).seconds == num_samples / 8 + 1


@pytest.mark.parametrize("num_batches", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_accumulated_gradients_are_within_the_budget(num_batches, info):
    memsave = MemSave(budget="0.6x")
    trainer, _ = train(memsave, accumulate_grad_batches=num_batches, max_epochs=4)
    assert memsave.plan.recipe == "lossless"
    assert trainer.fit_loop.total_batch_idx >= 3 * num_batches  # more than one step is measured whole
    assert memsave.report.peak_bytes + memsave.plan.workspace_bytes <= memsave.plan.budget_bytes
    assert "a step took" not in info.text
