"""The peak of a step before it is run: Lightning's own loop, with the run's own settings, on fake tensors.

Nothing here models what a technique does. A copy of the module that is made of fake tensors is trained for three steps
by a real `Trainer`, and the ledger counts what the real one would have allocated: so gradients that are held through
the next forward, optimizer state, microbatches, regions, codes and sparse weights are all there, in the code that
trains. A module whose step reads values is run on real samples instead, few of them, twice, and what that took is
extended to the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from lightning_memsave.core.errors import BudgetWarning, MicrobatchWarning, NoEffectWarning, NotLosslessWarning
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.memory.breakdown import Breakdown, BreakdownLedger
from lightning_memsave.memory.facts import FactsMode
from lightning_memsave.memory.fake import Copying, fake_copy, fakes_of
from lightning_memsave.memory.ledger import Measurement, tensors_in
from lightning_memsave.memory.predict import Prediction, extended
from lightning_memsave.numerics.fakes import is_fake
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.strategies.mixin import adopt
from lightning_memsave.strategies.namespaces import NAMESPACES, namespace_of
from lightning_memsave.strategies.run_state import MemSaveState
from lightning_memsave.techniques.microbatching import Microbatching, UnsplittableBatchError, batch_size
from lightning_memsave.techniques.microbatching.split import resized, take

_NUM_STEPS = 3  # the second and the third are measured, as in a run
_TOLD = (MicrobatchWarning, NotLosslessWarning, NoEffectWarning, BudgetWarning)


class Predictor:
    """Predicts steps of one module on one batch.

    Args:
        module: a LightningModule, or a function that makes one: called among fake tensors, so that no memory is taken.
            It is copied, not changed.
        batch: what `training_step` takes, or a function that makes it.
        trainer: arguments of the `Trainer` that steps depend on: `precision`, `accumulate_grad_batches`,
            `gradient_clip_val`, `gradient_clip_algorithm`.

    Raises:
        ValueError: `module` is no LightningModule.
    """

    def __init__(self, module: Any, batch: Any, **trainer: Any) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._make = module if callable(module) and not isinstance(module, nn.Module) else None
        with self._mode if self._make else contextlib.nullcontext(), _random_state_kept():
            self._module = self._make() if self._make else module
        with self._mode if callable(batch) else contextlib.nullcontext(), _random_state_kept():
            self._batch = batch() if callable(batch) else batch
        self._namespace, self._trainer = namespace_of(self._module), trainer
        self._why: str | None = None  # not on fake tensors

    @property
    def num_samples(self) -> int | None:
        """Of the batch; `None` where they cannot be told."""
        try:
            return batch_size(self._batch)
        except UnsplittableBatchError:
            return None

    def __call__(self, techniques: Recipe | Sequence[Any] = (), *, num_samples: int | None = None) -> Prediction:
        """Predict a step.

        Args:
            techniques: what is switched on: a recipe, or Configs.
            num_samples: in the batch, instead of as many as it has.

        Raises:
            ValueError: settings cannot be combined, a technique refuses the model, or a step reads values and the
                module exists as fake tensors only.
        """
        recipe = techniques if isinstance(techniques, Recipe) else Recipe("predicted", tuple(techniques))
        if self._why is None:
            try:
                return self._fake(recipe, num_samples)
            except ValueError:
                raise
            except Exception as error:  # a value is read, or there is no kernel for shapes alone
                self._why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return self._measured(recipe, num_samples)

    def _fake(self, recipe: Recipe, num_samples: int | None) -> Prediction:
        module: Any = fake_copy(self._module, self._mode)
        batch = fakes_of(self._batch, self._mode)
        with self._mode, FactsMode(), Copying(), _as_if_real():
            if num_samples is not None:
                batch = resized(batch, batch_size(batch), num_samples)
            watch = self._train(module, batch, recipe, fake=True)
        return _prediction(watch, "fake", watch.flags)

    def _measured(self, recipe: Recipe, num_samples: int | None) -> Prediction:
        if any(is_fake(p) for p in self._module.parameters()) or any(map(is_fake, tensors_in(self._batch))):
            raise ValueError(
                f"The step reads values ({self._why}), so that it can only be run on real tensors: hand a module and a "
                "batch over that exist."
            )
        present = self.num_samples
        wanted = num_samples or present
        config = recipe.get(Microbatching)
        least = config.size if config is not None and isinstance(config.size, int) else 1
        small = max(least, (present or 0) // 8)
        if present is None or (2 * small >= present and wanted == present):
            watch = self._train(copy.deepcopy(self._module), self._batch, recipe, fake=False)
            return _prediction(watch, "measured", (*watch.flags, f"the step reads values ({self._why}): measured"))
        sizes = (small, min(2 * small, present)) if 2 * small <= present else (max(1, present // 2), present)
        found = []
        for size in sizes:
            part = take(self._batch, 0, size, present)
            part = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, part)
            watch = self._train(copy.deepcopy(self._module), part, recipe, fake=False)
            found.append(_prediction(watch, "measured", watch.flags))
        why = f"the step reads values ({self._why}): measured with {sizes[0]} and {sizes[1]} samples, and extended"
        assert wanted is not None, "what can be cut has a size"
        return extended(found[0], found[1], sizes, wanted, why)

    def _train(self, module: Any, batch: Any, recipe: Recipe, *, fake: bool) -> Any:
        """Three steps; returns who has watched them."""
        accumulate = self._trainer.get("accumulate_grad_batches", 1)
        watch = _watch_class(self._namespace)(MemSaveState(recipe), fake)
        with _random_state_kept(), _silence(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = import_module(self._namespace).Trainer(
                strategy=_strategy_class(self._namespace)(device="cpu"),
                accelerator="cpu",
                devices=1,
                max_epochs=1,
                callbacks=[watch],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                limit_val_batches=0,
                **self._trainer,
            )
            with contextlib.suppress(_Done):
                trainer.fit(module, _Batches(batch, _NUM_STEPS * accumulate))
        watch.flags = tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, _TOLD)))
        return watch


def _prediction(watch: Any, source: Any, flags: tuple[str, ...]) -> Prediction:
    measured: Measurement | None = watch.measured
    if measured is None:
        raise ValueError("No step was taken: `training_step` returned no loss.")
    found: Breakdown = watch.breakdown
    return Prediction(
        peak_bytes=measured.peak_bytes,
        by_category=dict(measured.by_category),
        by_module=found.by_module,
        timeline=measured.timeline,
        top=found.top,
        source=source,
        flags=flags,
        seconds=found.seconds,
    )


class _Done(Exception):
    """All steps are taken."""


class _Batches:
    """The same batch some times; each in containers of its own, of which a step may take things away."""

    def __init__(self, batch: Any, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield tree_map(lambda leaf: leaf, self._batch)


@functools.cache
def _watch_class(namespace: str) -> Any:
    class Watch(import_module(namespace).Callback):  # type: ignore[misc]  # a base known at run time
        """Hands the recipe to the strategy, and counts the bytes of the second and the third step."""

        def __init__(self, state: MemSaveState, fake: bool) -> None:
            self._state, self._fake = state, fake
            self._num_batches = 0
            self._ledger: BreakdownLedger | None = None
            self.measured: Measurement | None = None
            self.breakdown: Breakdown | None = None
            self.flags: tuple[str, ...] = ()

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            adopt(trainer.strategy, self._state)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self._num_batches >= trainer.accumulate_grad_batches:
                ledger = BreakdownLedger("cpu", fake=self._fake)
                ledger.watching(trainer.strategy.model, trainer.optimizers, batch)
                self._ledger = ledger
                ledger.__enter__()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._num_batches += 1
            self._close()
            if self._num_batches == _NUM_STEPS * trainer.accumulate_grad_batches:
                raise _Done

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._close()

        def _close(self) -> None:
            ledger, self._ledger = self._ledger, None
            if ledger is None:
                return
            ledger.__exit__(None, None, None)
            found = ledger.measurement
            if found is not None and (self.measured is None or found.peak_bytes > self.measured.peak_bytes):
                self.measured, self.breakdown = found, ledger.breakdown

    return Watch


@functools.cache
def _strategy_class(namespace: str) -> Any:
    class OnPaper(import_module(f"{namespace}.strategies").SingleDeviceStrategy):  # type: ignore[misc]  # as above
        """Neither moves a module, which torch refuses for fake parameters, nor brings it back."""

        def model_to_device(self) -> None:
            pass

        def teardown(self) -> None:
            pass

    return OnPaper


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """A prediction is no run that anybody wants to read about."""
    loggers = [
        logging.getLogger(name)
        for name in (*NAMESPACES, "lightning.fabric", "lightning_fabric", "torch._subclasses.fake_tensor")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _as_if_real() -> Iterator[None]:
    """Fake tensors are hidden from transformers, which takes other ways with them that take more memory.

    Private name of transformers (seen in 5.23).
    """
    module = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if module is None or before is None:
        yield
        return
    module.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]  # told by `getattr`
    try:
        yield
    finally:
        module.is_fake_tensor = before  # type: ignore[attr-defined]  # as above
