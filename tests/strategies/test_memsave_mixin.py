"""Strategies that are adopted for a run: what they are in it, and what is left of it."""

from __future__ import annotations

import copy
import gc
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_memsave import MemSave, MemSaveStrategy, Sparsity
from lightning_memsave.lightning_compat import namespace_of
from lightning_memsave.loops.session import Session
from lightning_memsave.planner.recipes import RECIPES
from lightning_memsave.strategies.memsave_mixin import MemSaveMixin, adopt, release
from tests.strategies.quiet_runs import QUIET


def test_the_loop_is_put_back_after_fit():
    trainer = L.Trainer(callbacks=[MemSave(microbatch=1)], **QUIET)
    before = trainer.fit_loop.epoch_loop.automatic_optimization
    trainer.fit(BoringModel())
    assert trainer.fit_loop.epoch_loop.automatic_optimization is before
    assert trainer.global_step == 3


def test_adoption_keeps_the_users_strategy():
    trainer = L.Trainer(callbacks=[MemSave()], **QUIET)
    chosen = trainer.strategy
    chosen.optimizer_step = wrapped = chosen.optimizer_step  # somebody's own, which stays
    trainer.fit(BoringModel())
    assert trainer.strategy is chosen
    assert vars(chosen)["optimizer_step"] is wrapped
    assert type(chosen) is L.pytorch.strategies.SingleDeviceStrategy  # again
    assert namespace_of(chosen) == "lightning.pytorch"


@pytest.mark.parametrize(
    "where", ["setup", "configure_optimizers", "on_fit_start", "training_step", "validation_step", "on_fit_end"]
)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fit_that_fails_gives_the_strategy_back(where, error):
    def fails(*_, **__):
        raise error("mine")

    module, trainer = BoringModel(), L.Trainer(callbacks=[MemSave()], **QUIET)
    setattr(module, where, fails)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(module)
    assert type(trainer.strategy) is L.pytorch.strategies.SingleDeviceStrategy
    assert not [name for name in vars(trainer.strategy) if "memsave" in name]
    memsave = MemSave()
    options = {name: value for name, value in QUIET.items() if name != "accelerator"}
    trainer = L.Trainer(callbacks=[memsave], strategy=trainer.strategy, **options)  # it can be used again
    trainer.fit(BoringModel())
    assert memsave.report.peak_bytes


SLOTS = [{}, {"recipe": "measure"}, {"activations": "exact"}, {"checkpointing": "sqrt"}, {"microbatch": 2},
         {"precision": "bf16-sr"}, {"recipe": "balanced"},
         {"sparsity": Sparsity(sparsity=0.5, min_size=1)}, {"low_rank": 1}]  # fmt: skip


def fitted(slots):
    trainer = L.Trainer(**QUIET, limit_val_batches=0, callbacks=[MemSave(**slots)])
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
        is_compact = {"sparsity", "low_rank"} & slots.keys()  # such a strategy goes on writing checkpoints
        assert type(twin.strategy).__module__.startswith("lightning_memsave.") == bool(is_compact)
        for other in (twin, copy.deepcopy(trainer)):
            for a, b in zip(trainer.lightning_module.parameters(), other.lightning_module.parameters(), strict=True):
                assert torch.equal(a, b)
        del trainer, twin, other
        gc.collect()  # references that were copied would be freed twice


def test_the_class_of_a_strategy_that_is_adopted_derives_from_it_until_it_is_released():
    class Theirs(SingleDeviceStrategy):
        """A user's own."""

    strategy = Theirs(accelerator=CPUAccelerator())
    session = Session(RECIPES["lossless"])
    adopt(strategy, session)
    adopted = type(strategy)
    assert adopted.__mro__[:3] == (adopted, MemSaveMixin, Theirs)
    assert adopted.__name__ == "MemSaveTheirs"
    assert strategy.memsave is session
    other = Session(RECIPES["measure"])
    adopt(strategy, other)  # a second callback, or a second fit
    assert type(strategy) is adopted
    assert strategy.memsave is other
    strategy._is_down = True  # as after a run
    release(strategy)
    assert type(strategy) is Theirs
    assert not [name for name in vars(strategy) if "memsave" in name]


def test_ours_by_name_goes_back_to_the_recipe_that_it_had():
    strategy = MemSaveStrategy()
    own = strategy.memsave
    adopt(strategy, Session(RECIPES["measure"]))
    assert strategy.memsave.recipe == RECIPES["measure"]
    release(strategy)
    assert strategy.memsave is own
    assert type(strategy) is MemSaveStrategy


def test_what_was_not_adopted_is_left_alone_and_what_is_no_strategy_is_refused():
    strategy = SingleDeviceStrategy(accelerator=CPUAccelerator())
    release(strategy)
    assert type(strategy) is SingleDeviceStrategy
    with pytest.raises(TypeError, match="is not a Lightning object"):
        adopt(object(), Session(RECIPES["lossless"]))


def test_an_adopted_strategy_is_copied_in_the_middle_of_a_run():
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            twin = copy.copy(trainer.strategy)
            twins.append((type(twin), twin.memsave.recipe))

    twins = []
    trainer = L.Trainer(callbacks=[MemSave("measure"), Copies()], limit_val_batches=0, **QUIET)
    trainer.fit(BoringModel())
    assert len(twins) == 3
    for cls, recipe in twins:
        assert issubclass(cls, MemSaveMixin)
        assert recipe == RECIPES["measure"]


def test_a_step_that_reads_gradients_finds_them():
    class Reads(BoringModel):
        def training_step(self, batch, batch_idx):
            seen.append(self.layer.weight.grad is not None)
            return super().training_step(batch, batch_idx)

    runs = []
    for callbacks in ([], [MemSave()]):
        seen = []
        L.Trainer(callbacks=callbacks, limit_val_batches=0, **QUIET).fit(Reads())
        runs.append(seen)
    assert runs == [[False, True, True]] * 2
