"""The layers of a sparse update, chosen for its budget before a run, by real steps of copies of the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import Batch, session_of
from lightning_memsave.loops.partial_training import as_saved
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.dry_run import DoneError
from lightning_memsave.prediction.peek_batch import first_batches
from lightning_memsave.prediction.real_run import OneStep, Trial
from lightning_memsave.simulation.fake_model import optimizer_state_bytes
from lightning_memsave.techniques.sparse_update import GainMeter, SparseUpdate, planned

_NUM_BATCHES = 4
_REMEDY = "Give the layers: `SparseUpdate(layers={...})`, which `plan_sparse_update` finds as well."
_ASKED = "sparse_update_asked"


def needs_a_plan(recipe: Recipe) -> bool:
    """Return whether layers of a sparse update are still to be chosen."""
    config = recipe.get(SparseUpdate)
    return config is not None and config.needs_a_plan


def with_layers(recipe: Recipe, module: Any, batches: Sequence[Batch], trainer: L.Trainer | None = None) -> Recipe:
    """Return a recipe whose sparse update has its layers.

    Args:
        recipe: with a sparse update that has a budget.
        module: the LightningModule; it is copied, not changed.
        batches: what steps take, on the CPU.
        trainer: of the run, or `None`.

    Raises:
        ValueError: a step cannot be taken, or nothing can be trained within the budget.
    """
    config = recipe.get(SparseUpdate)
    assert config is not None, "it has been asked for"
    step = _GainStep()
    for batch in batches:
        if not Trial(module, batch, trainer).run(step):
            rule = "is planned by a step that trains everything, for which there is no memory"
            raise setting_error("sparse_update", rule, config.budget, _REMEDY)
    if not step.has_gains:
        raise setting_error("sparse_update", "needs a first batch with a loss", config.budget, _REMEDY)
    return recipe.with_settings(planned(step.meter, config, step.state_bytes))


class PlannedUpdate:
    """What chooses the layers of a run's sparse update when the run begins (`loops.session.RecipeSource`).

    Args:
        recipe: with a sparse update that has a budget.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._asked_before: Any = None

    @property
    def _asked(self) -> list[Any]:
        config = self._recipe.get(SparseUpdate)
        assert config is not None, "it has been asked for"
        return [config.budget, config.biases if isinstance(config.biases, bool) else list(config.biases)]

    def decide(self, trainer: L.Trainer) -> Recipe:
        """Return the settings of this run: those of the run that is resumed, or planned from its first batches.

        Raises:
            ValueError: as `with_layers`, or this way of training cannot be planned.
        """
        saved = session_of(trainer).saved_training.get("sparse_update")
        if saved is not None and self._asked_before == self._asked:
            return self._recipe.with_settings(as_saved(saved))
        _refuse(self._asked[0], ways_of_training(trainer))
        batches = first_batches(trainer, _NUM_BATCHES, "sparse_update", _REMEDY)
        found = trainer.strategy.broadcast(with_layers(self._recipe, trainer.lightning_module, batches, trainer))
        rank_zero_info(f"memsave: a sparse update for {self._asked[0]} trains {_in_words(found.get(SparseUpdate))}")
        return found

    def may_cut(self, module: L.LightningModule) -> bool:
        """Return that microbatches may become smaller, as nothing is planned about them."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what was asked for."""
        return {_ASKED: self._asked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the choice of the run that is resumed, if it was asked for the same."""
        self._asked_before = state.get(_ASKED)


def _in_words(config: SparseUpdate | None) -> str:
    assert config is not None, "it has been asked for"
    assert config.layers is not None, "it is planned"
    parts = [f"{len(share)} channels of {n}" if isinstance(share, tuple) else n for n, share in config.layers.items()]
    return ", ".join(parts)


def _refuse(budget: object, ways: Sequence[str]) -> None:
    for way in ("manual optimization", "dataloader_iter", "FSDP", "model parallel (FSDP2)", "DeepSpeed"):
        if way in ways:
            raise setting_error("sparse_update", f"cannot be planned with {way}", budget, _REMEDY)


class _GainStep(OneStep):
    """Measures the gains of one step, and ends the trial before the optimizer's."""

    def __init__(self) -> None:
        super().__init__(Recipe("trial"))
        self.meter, self.has_gains, self.state_bytes = GainMeter(), False, 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        parameters = [p for each in trainer.optimizers for group in each.param_groups for p in group["params"]]
        num_bytes = sum(map(optimizer_state_bytes, trainer.optimizers))
        self.state_bytes = num_bytes / max(1, sum(p.numel() for p in parameters))
        self.meter.start(pl_module, batch)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self.meter.end_forward()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.meter.end()
        self.has_gains = True
        raise DoneError

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.meter.end()
