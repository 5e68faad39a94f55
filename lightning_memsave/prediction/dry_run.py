"""A run on paper: Lightning's own loop for two or three steps, watched by a ledger, with nothing around it.

For predictions: no device, a logger that writes nothing, no checkpoints, no progress bar, no trace in the random state.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, Dataset

from lightning_memsave.core.errors import BudgetWarning, MicrobatchWarning, NoEffectWarning, NotLosslessWarning
from lightning_memsave.lightning_compat import Batch, counterpart, namespace_of
from lightning_memsave.loops.session import Session
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.measuring.module_attribution import Breakdown, BreakdownLedger
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.simulated_process_group import on_paper
from lightning_memsave.saved_tensors.object_state import ObjectState, is_object
from lightning_memsave.saved_tensors.randomness import Randomness, generators_in
from lightning_memsave.simulation.known_sizes import ReadsValueError
from lightning_memsave.strategies.memsave_mixin import adopt
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.microbatching.split import cloned
from lightning_memsave.torch_internals.containers import nested

_NUM_STEPS = {True: 2, False: 3}  # fake or not: those behind the first are measured; without values they are equal
_MANY = 10_000
_SMALL_BYTES, _MOST_ENTRIES = 2**20, 2**12
_TOLD = (MicrobatchWarning, NotLosslessWarning, NoEffectWarning, BudgetWarning)


def dry_run(
    namespace: str,
    module: Any,
    batch: Batch,
    recipe: Recipe,
    settings: dict[str, Any],
    data_module: Any = None,
    *,
    fake: bool,
) -> StepWatch:
    """Take some steps and return the watch that saw them: `measured`, `breakdown`, `flags`, `is_cut`, `has_parts`.

    Args:
        namespace: of Lightning.
        module: is trained.
        batch: of each step.
        recipe: what is switched on.
        settings: further arguments of `Trainer`; of `devices` on `num_nodes`, all but one are left out.
        data_module: of the run, which a step may ask.
        fake: whether module and batch are of fake tensors.

    Raises:
        ValueError: no step was taken to its end.
    """
    watch: StepWatch = counterpart(StepWatch, namespace)(Session(recipe), fake)
    with (
        on_paper(namespace, settings) as options,
        Randomness.untouched(),
        silence(),
        warnings.catch_warnings(record=True) as caught,
        torch.compiler.set_stance("force_eager"),  # around the ledger as well, which puts back the stance that it finds
    ):
        warnings.simplefilter("always")
        options = {**options, "max_steps": enough_steps(options.get("max_steps", -1))}
        trainer = import_module(namespace).Trainer(callbacks=[watch], **nothing_around(namespace), **options)
        try:
            with contextlib.suppress(DoneError):
                fit(trainer, module, batch, data_module)
        finally:
            watch.abandon()
    if watch.measured is None:
        raise ValueError(NO_STEP)
    watch.flags = tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, _TOLD)))
    return watch


def enough_steps(max_steps: int) -> int:
    """Return the `max_steps` of a run for a trial of a few steps, raised so that the trial can take them."""
    return max_steps if max_steps < 0 else max(max_steps, _MANY)


NO_STEP = "No step can be predicted: `training_step` stopped the training, or there is no batch."


class DoneError(Exception):
    """All steps are taken: ends a run before Lightning's hooks at the end of an epoch."""


class _Batches:
    """The same batch again and again, each time in tensors and containers of its own: a step may change them.

    There are more than anybody takes: whoever watches ends the run.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[Any]:
        for _ in range(_MANY):
            yield cloned(self._batch)


def nothing_around(namespace: str) -> dict[str, Any]:
    """Return the arguments of a `Trainer` that only trains. It has a logger, as steps may use theirs."""
    return {
        "logger": import_module(f"{namespace}.loggers.logger").DummyLogger(),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }


def fit(trainer: L.Trainer, module: Any, batch: Batch, data_module: Any = None) -> None:
    """Train a copy of a module on one batch; its own callbacks stay out of it: they write files.

    What is compiled runs eagerly: where a mode of ours met it, it would never compile again in this process.

    Args:
        trainer: with a callback that ends the run.
        module: is trained.
        batch: of each step.
        data_module: whose hooks see the batch, as in the run.
    """
    module.configure_callbacks = lambda: []
    if dist.is_available() and dist.is_initialized():
        _has_prepared(module, "LightningModule")
    batches = _Batches(batch)
    if data_module is None:
        with torch.compiler.set_stance("force_eager"):
            trainer.fit(module, batches)
        return
    with _kept(data_module) as data:
        _has_prepared(data, "LightningDataModule")
        for name in ("setup", "teardown"):
            setattr(data, name, lambda *_, **__: None)
        data.train_dataloader, data.val_dataloader = lambda: batches, lambda: []
        with torch.compiler.set_stance("force_eager"):
            trainer.fit(module, datamodule=data)


@contextlib.contextmanager
def _kept(data_module: Any) -> Iterator[Any]:
    """Yield a copy of a data module, whose hooks change nothing of the original's.

    Lists that grow, running statistics and counters are the copy's own; random generators are put back. Shared is what
    is large (containers of more than 4096 entries, tensors of more than 1 MiB), what cannot be written down, and what
    has a state of another kind: datasets, modules, iterators.
    """
    data = copy.copy(data_module)
    data.trainer = None
    owned = {name: value for name, value in vars(data).items() if _is_small(value)}
    with _disable_current_modes():  # a prediction's, in which clones would be fake
        vars(data).update(_copied_together(owned))
    for name, value in vars(data).items():
        if isinstance(value, types.MethodType) and value.__self__ is data_module:
            vars(data)[name] = types.MethodType(value.__func__, data)
    with Randomness.untouched((), generators_in(data_module)):
        yield data


def _is_small(value: Any) -> bool:
    """Return whether a value can be copied in no time: a tensor, or something that holds few others."""
    small, large = nested(value, _MOST_ENTRIES)
    if isinstance(value, (Dataset, DataLoader)):
        return False
    return not large and (type(value) is torch.Tensor or bool(small) or is_object(value))


def _copied_together(owned: dict[str, Any]) -> dict[str, Any]:
    """Return copies, of which two hold the same where the originals do; without those that cannot be copied."""
    copies: dict[str, Any] = {}
    for names in ([*owned], *([name] for name in owned)):  # one by one where all together cannot be
        try:
            state = ObjectState({name: owned[name] for name in names})
            copies = {**state.copy([_cloned_if_small(each) for each in state.references]), **copies}
        except Exception:  # whatever the methods of a class raise
            continue
        if len(copies) == len(owned):
            break
    return copies


def _cloned_if_small(held: Any) -> Any:
    return held.detach().clone() if type(held) is torch.Tensor and held.nbytes <= _SMALL_BYTES else held


def _has_prepared(owner: Any, base: str) -> None:
    """Give `owner` the empty `prepare_data` of its base: for any other, Lightning makes a process group."""
    empty = getattr(import_module(namespace_of(owner)), base).prepare_data
    owner.prepare_data = types.MethodType(empty, owner)


class StepWatch(L.Callback):
    """Hands the recipe to the strategy, and counts the bytes of all steps but the first."""

    def __init__(self, session: Session, fake: bool) -> None:
        self._session, self._fake = session, fake
        self._num_batches = 0
        self._ledger: BreakdownLedger | None = None
        self._breakdown: Breakdown | None = None
        self.measured: Measurement | None = None
        self.flags: tuple[str, ...] = ()
        self.is_cut = False
        """Whether a batch was cut on the assumption that this can be done."""
        self.has_parts = False
        """Whether a batch was run in microbatches."""

    @property
    def breakdown(self) -> Breakdown:
        """What the peak consists of."""
        assert self._breakdown is not None, "a step was taken"
        return self._breakdown

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hand the recipe to the strategy."""
        adopt(trainer.strategy, self._session)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse optimizers whose state depends on values, on fake tensors.

        Raises:
            ReadsValueError: LBFGS is among them, which decides by values how often it evaluates and what it keeps.
        """
        if self._fake and any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers):
            raise ReadsValueError("LBFGS decides by values how often it evaluates, and what it keeps")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Count bytes from here on, in all steps but the first."""
        self.abandon()  # a batch that was skipped has no end
        if self._num_batches >= trainer.accumulate_grad_batches:
            ledger = BreakdownLedger("cpu", fake=self._fake)
            assert trainer.strategy.model is not None, "it trains"
            ledger.watching(trainer.strategy.model, trainer.optimizers, batch)
            self._ledger = ledger
            ledger.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """Keep the step if it is the highest so far, and end the run when all were seen."""
        self._num_batches += 1
        self._close()
        config = self._session.recipe.get(Microbatching)
        self.is_cut = bool(self._session.cutter.rules.known) and config is not None and config.reduction == "auto"
        self.has_parts = self._session.cutter.applied is not None
        if self._num_batches == _NUM_STEPS[self._fake] * trainer.accumulate_grad_batches:
            self._session.cutter.warn_if_unused(pl_module)
            raise DoneError

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the run where a step has ended the epoch."""
        raise DoneError

    def abandon(self) -> BreakdownLedger | None:
        """Stop counting, wherever a step has ended, and return what counted."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.__exit__(None, None, None)
        return ledger

    def _close(self) -> None:
        ledger = self.abandon()
        found = None if ledger is None else ledger.measurement
        if found is not None and (self.measured is None or found.peak_bytes > self.measured.peak_bytes):
            assert ledger is not None, "it has measured"
            self.measured, self._breakdown = found, ledger.breakdown


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Silence the log: a reader would take a trial's messages for those of the run."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.CRITICAL))  # what has no kernel for shapes is an error to the fake mode
    try:
        yield
    finally:
        logging.disable(before)
