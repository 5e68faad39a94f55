"""A trial: a few real steps of a copy of the module under some settings, to see what they take.

Lightning's own loop trains the copy, so that whatever a run does is in the figure: microbatches, the optimizer's state
and its temporaries, gradients that are held through the next forward pass, regions that are planned from the first
batch. As in a run, the first step creates state and is not measured, the second and the third are; on CPU the fifth is
profiled for what kernels take inside, and further ones are timed. Of a batch that is cut, two microbatches are enough,
as later ones meet what the second meets; their time is extended by the number of samples. The profiled step also asks
how the loss depends on the batch, as some steps of a run do, so there are at least as many samples as that takes.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import lightning as L
import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.lightning_compat import Batch, data_module_of, namespace_of
from lightning_memsave.loops.optimizer_changes import most_accumulated
from lightning_memsave.loops.out_of_memory import is_out_of_memory
from lightning_memsave.loops.probe_samples import FEWEST_SAMPLES
from lightning_memsave.loops.session import Session
from lightning_memsave.measuring import allocator
from lightning_memsave.measuring.ledger import Ledger, Measurement
from lightning_memsave.measuring.profiler_peak import AllocationProfile
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.planner.search_space import NOT_TILED, Tiled
from lightning_memsave.prediction.dry_run import NO_STEP, DoneError, enough_steps, fit, nothing_around, silence
from lightning_memsave.prediction.microbatch_extrapolation import as_if_whole, first_microbatches, rest_bytes
from lightning_memsave.prediction.simulated_process_group import planning_groups_of, with_layers
from lightning_memsave.saved_tensors.codec_names import HEAD
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.simulation.global_state_guard import names_kept
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.strategies.memsave_mixin import adopt
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.checkpointing.region_selection import repeated_blocks
from lightning_memsave.techniques.microbatching import Microbatching, UnsplittableBatchError, batch_size
from lightning_memsave.techniques.microbatching.split import take
from lightning_memsave.techniques.registry import Config
from lightning_memsave.techniques.tiling import Tiles, Tiling
from lightning_memsave.torch_internals.model_copies import collect_copies, copied
from lightning_memsave.torch_internals.private_names import require

_NUM_TIMED = 3  # steps; the fastest counts
_LONG_SECONDS = 0.2  # of a step, which then is timed once: relative to it, little happens by chance


class StepFailedError(ValueError):
    """A step cannot be taken under some settings."""


class Trial:
    """Predicts by doing it: call it with Configs.

    Args:
        module: is copied, not changed.
        batch: what `training_step` takes, on the CPU.
        trainer: whose device, precision, gradient clipping, accumulation and data module are taken; `None`: defaults.

    Raises:
        ValueError: when called: the settings cannot be used, or the step fails.
    """

    def __init__(self, module: L.LightningModule, batch: Batch, trainer: L.Trainer | None = None) -> None:
        self._module, self._batch, self._trainer = module, batch, trainer
        self._groups = planning_groups_of(trainer)
        self.times_steps = True
        """Whether further steps are taken on CPU for their time."""

    def __call__(self, techniques: Sequence[Config]) -> Prediction:
        """Return the peak under these settings."""
        try:
            return self._measured(techniques)
        finally:
            collect_copies(self._module)

    def _measured(self, techniques: Sequence[Config]) -> Prediction:
        batch, missing_bytes, whole = self._as_much_as_shows(techniques)

        def stepped(techniques: Sequence[Config], batch: Batch, whole: float) -> _Steps | None:
            steps = _Steps(Recipe("trial", tuple(techniques)), self._num_batches, whole, self.times_steps)
            return steps if self._has_room(steps, batch) else None

        steps = as_if_whole(lambda part: stepped(part, batch, whole), techniques, missing_bytes)
        if steps is not None and missing_bytes and not steps.is_cut:  # the run will not cut it either
            missing_bytes, steps = 0, stepped(techniques, self._batch, 1.0)
        return self._too_large() if steps is None else steps.result(missing_bytes)

    def cut(self, config: Microbatching, *others: Config) -> Cut:
        """Return whether the run will cut its batches, as far as a few samples tell.

        Args:
            config: what is set besides a number of samples.
            others: settings of other techniques.
        """
        try:
            num_samples = batch_size(self._batch)
        except UnsplittableBatchError:
            return Cut()
        if config.split_fn is not None or num_samples < 2:
            return Cut()
        few = min(8, num_samples)
        step = _Asking(Recipe("trial", (config.of_size(few // 2), *others)))
        try:
            has_room = self._has_room(step, take(self._batch, 0, few, num_samples))
        except ValueError:  # which says nothing about other numbers of samples
            return Cut()
        if not has_room or not step.is_done:
            return Cut()
        if not step.is_cut and not self._module.automatic_optimization:
            return Cut(
                "with manual optimization only `lightning_memsave.microbatches(batch)` in `training_step` cuts them."
            )
        return Cut(step.session.cutter.why_whole, step.asking_bytes // min(few, max(few // 2, FEWEST_SAMPLES)))

    def tiled(self) -> Tiled:
        """Return the modules that treat samples independently, the outermost, as far as a few samples tell."""
        try:
            num_samples = batch_size(self._batch)
        except UnsplittableBatchError:
            return NOT_TILED
        few = min(8, num_samples)
        tiles = self._tiles(take(self._batch, 0, few, num_samples), Tiling(dim=0, size=max(1, few // 2)))
        return NOT_TILED if tiles is None else Tiled(self._names(tiles), num_samples, dim=0)

    def tiled_positions(self) -> Tiled:
        """Return the modules that treat positions independently, the outermost, as far as one sample tells.

        What rank 0 finds holds for all.
        """
        try:
            one = take(self._batch, 0, 1, batch_size(self._batch))
        except UnsplittableBatchError:
            one = self._batch
        others: list[Config] = [ActivationCompression(codecs=("exact", HEAD))]
        if repeated_blocks(with_layers(self._module, self._trainer)):
            others.append(Checkpointing())
        tiles = self._tiles(one, Tiling(dim=1), *others)
        found = NOT_TILED if tiles is None else Tiled(self._names(tiles), tiles.longest, dim=1)
        if self._trainer is not None and self._trainer.world_size > 1:
            found = self._trainer.strategy.broadcast(found)
        return found

    def _tiles(self, batch: Batch, config: Tiling, *others: Config) -> Tiles | None:
        """Return what a step in tiles has cut."""
        step = OneStep(Recipe("trial", (*others, config)))
        with contextlib.suppress(ValueError):  # tiles, or few samples, cannot be had
            if self._has_room(step, batch):
                return step.session.scopes.tiles
        return None

    def _names(self, tiles: Tiles) -> tuple[str, ...]:
        """Return the names of the modules that run in tiles, as selectors of these alone."""
        classes = {type(module).__name__ for module in with_layers(self._module, self._trainer).modules()}
        return tuple(name for name in tiles.cut if name not in classes)

    def run(self, steps: OneStep) -> bool:
        """Train a copy until `steps` ends that; `False` where memory ran out."""
        try:
            return self._has_room(steps, self._batch)
        finally:
            collect_copies(self._module)

    def _has_room(self, steps: OneStep, batch: Batch) -> bool:
        """Train a copy for these steps; `False` where memory ran out."""
        collect_copies(self._module)
        with (
            _without_a_trace(self._module),
            silence(),
            warnings.catch_warnings(),
            torch.compiler.set_stance("force_eager"),  # around the ledger, which puts back the one that it finds
        ):
            warnings.simplefilter("ignore")  # what is said of a trial would be taken for the run's
            try:
                self._fit(steps, batch)
                raise ValueError(NO_STEP)
            except DoneError:
                pass
            except ValueError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    return False
                raise StepFailedError(f"{type(error).__name__}: {error}") from error
            finally:
                steps.abandon()
        return True

    @property
    def _num_batches(self) -> int:
        return 1 if self._trainer is None else most_accumulated(self._trainer)

    def _as_much_as_shows(self, techniques: Sequence[Config]) -> tuple[Any, int, float]:
        """Return some microbatches of the batch, the bytes of the rest, and how many times as many samples there are.

        There are enough samples to ask how the loss depends on the batch.
        """
        shown = first_microbatches(techniques, self._batch, FEWEST_SAMPLES)
        if shown is None:
            return self._batch, 0, 1.0
        num_samples, num_used = batch_size(self._batch), shown.num_samples
        return take(self._batch, 0, num_used, num_samples), rest_bytes(self._batch, shown), num_samples / num_used

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._trainer is None else self._trainer.strategy.root_device

    def _fit(self, steps: Any, batch: Batch) -> None:
        data = None if self._trainer is None else data_module_of(self._trainer)
        with nullcontext() if self._groups is None else self._groups.alone():
            fit(self._new_trainer(steps), copied(self._module), batch, data)

    def _new_trainer(self, steps: Any) -> Any:
        if self._trainer is None:
            namespace = namespace_of(self._module)
            return import_module(namespace).Trainer(
                accelerator="cpu", devices=1, max_epochs=1, callbacks=[steps], **nothing_around(namespace)
            )
        outer, device, namespace = self._trainer, self._device, namespace_of(self._trainer.strategy)
        one_device = import_module(f"{namespace}.strategies").SingleDeviceStrategy
        return import_module(namespace).Trainer(
            strategy=one_device(device=device) if self._groups is None else self._groups.sharded_alone(),
            accelerator="gpu" if device.type == "cuda" else device.type,
            devices=1 if device.index is None or device.type == "cpu" else [device.index],
            plugins=[copy.deepcopy(outer.precision_plugin)],
            gradient_clip_val=outer.gradient_clip_val,
            gradient_clip_algorithm=outer.gradient_clip_algorithm,
            accumulate_grad_batches=self._num_batches,
            max_epochs=outer.max_epochs,
            max_steps=enough_steps(outer.max_steps),
            callbacks=[steps],
            **nothing_around(namespace),
        )

    def _too_large(self) -> Prediction:
        """Return a prediction of more than the device has, for a step that ran out of memory."""
        total = allocator.total_bytes(self._device) or sys.maxsize // 2
        flags = ("memory ran out in a trial; its peak is not known",)
        split = dict.fromkeys(CATEGORIES, 0) | {"activations": total + 1}
        return Prediction(peak_bytes=total + 1, by_category=split, source="measured", flags=flags)


class Cut(NamedTuple):
    """Whether a run cuts its batches into microbatches."""

    why_not: str = ""
    """Why it will not; empty where it will, or may."""
    asking_bytes: int = 0
    """What finding out how the loss depends on the batch takes for each of the samples that it is evaluated on."""


class OneStep(pl.Callback):
    """Adopts the trial's strategy, and ends it after one batch."""

    def __init__(self, recipe: Recipe) -> None:
        self.session = Session(recipe)
        self.is_done = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hand the recipe to the strategy."""
        adopt(trainer.strategy, self.session)

    @property
    def is_cut(self) -> bool:
        """Whether a batch was cut into microbatches."""
        return self.session.cutter.applied is not None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """End the trial."""
        self.is_done = True
        raise DoneError

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the trial where a step has ended the epoch."""
        raise DoneError

    def abandon(self) -> None:
        """Stop what measures, wherever a step has ended."""


class _Asking(OneStep):
    """Counts what it takes to find out how the loss depends on the batch, on top of what was there."""

    _ledger: Ledger | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._ledger = self.session.cutter.rules.watch = Ledger(trainer.strategy.root_device)

    @property
    def asking_bytes(self) -> int:
        """Bytes at the most; 0 where nothing was asked."""
        found = None if self._ledger is None else self._ledger.measurement
        return 0 if found is None else found.peak_bytes - found.held_bytes


class _Steps(OneStep):
    """Measures some steps."""

    def __init__(self, recipe: Recipe, num_batches: int, whole: float, is_timed: bool) -> None:
        super().__init__(recipe)
        require("allocation events", "budget")
        self._num_batches, self._is_timed = num_batches, is_timed
        self._whole = whole  # times as many samples as are used
        self._began_seconds = self._updates_seconds = 0.0
        self._seconds: list[float] = []
        self._ledger: Ledger | None = None
        self._profile: AllocationProfile | None = None
        self._profiled_bytes: int | None = None
        self._highest: Measurement | None = None
        self._latest: Measurement | None = None
        self._allocated: allocator.AllocatorBytes | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        step, position = divmod(batch_idx, self._num_batches)
        device = trainer.strategy.root_device
        if position == 0 and step in (1, 2):
            if step == 2 and device.type != "cpu":
                self.session.cutter.rules.ask_next()
            allocator.reset_peak(device)
            assert trainer.strategy.model is not None, "it trains"
            self._ledger = Ledger(device).watching(trainer.strategy.model, trainer.optimizers, batch)
            self._ledger.__enter__()
        elif position == 0 and step == 3:
            self._profile = AllocationProfile()
            self._profile.__enter__()
        elif position == 0 and step == 4:
            assert self._profile is not None, "it was opened a step before"
            self.session.cutter.rules.ask_next()  # how the loss depends on the batch, as some steps of the run do
            self._profile.mark()
        elif position == 0:
            self._began_seconds = self._updates_seconds = time.thread_time()  # the latter where nothing is updated

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._updates_seconds = time.thread_time()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        step, position = divmod(batch_idx, self._num_batches)
        if position < self._num_batches - 1 or step in (0, 3):
            return
        device = trainer.strategy.root_device
        if step > 4:
            forward_and_backward = self._updates_seconds - self._began_seconds
            update = time.thread_time() - self._updates_seconds
            self._seconds.append(self._whole * forward_and_backward + update)
            if forward_and_backward + update > _LONG_SECONDS or len(self._seconds) == _NUM_TIMED:
                raise DoneError
        elif step == 4:
            profile = self._profile
            assert profile is not None, "it was opened a step before"
            self.abandon()
            self._profiled_bytes = profile.peak_bytes
            if not self._is_timed:
                raise DoneError
        if step >= 4:
            return
        assert self._ledger is not None, "it was opened at the start of the step"
        ledger = self._ledger
        self.abandon()
        self._keep_highest(ledger.measurement, allocator.read_peak(device))
        if step == 2 and device.type != "cpu":
            raise DoneError

    def _keep_highest(self, measured: Measurement | None, allocated: allocator.AllocatorBytes | None) -> None:
        assert measured is not None, "the ledger has been left"
        self._latest = measured
        if self._highest is None or measured.peak_bytes > self._highest.peak_bytes:
            self._highest, self._allocated = measured, allocated

    def abandon(self) -> None:
        ledger, profile = self._ledger, self._profile
        self._ledger = self._profile = None
        for each in (ledger, profile):
            if each is not None:
                each.__exit__(None, None, None)

    def result(self, missing_bytes: int) -> Prediction:
        """Return what was measured, with bytes of the batch that were left out."""
        measured, latest = self._highest, self._latest
        if measured is None or latest is None:
            raise ValueError(NO_STEP)
        split = dict(measured.by_category)
        split["data"] += missing_bytes
        workspace = 0
        if self._allocated is not None:  # what the ledger did not see, and what lies between tensors
            split["temporary"] += self._allocated.allocated_bytes - measured.peak_bytes
            workspace = self._allocated.reserved_bytes - self._allocated.allocated_bytes
        elif self._profiled_bytes is not None:
            workspace = max(0, latest.held_bytes + self._profiled_bytes - latest.peak_bytes)
        return Prediction(
            peak_bytes=sum(split.values()),
            by_category=split,
            workspace_bytes=workspace,
            source="measured",
            seconds=min(self._seconds, default=None),
            is_timed=bool(self._seconds),
        )


@contextlib.contextmanager
def _without_a_trace(module: L.LightningModule) -> Iterator[None]:
    """Restore random states, gradient mode and what steps keep outside of the module."""
    devices = {p.device for p in module.parameters()}
    if (accelerator := torch.accelerator.current_accelerator()) is not None and torch.accelerator.is_available():
        devices.add(torch.device(accelerator.type, torch.accelerator.current_device_index()))
    is_enabled = torch.is_grad_enabled()
    with Randomness.untouched(devices), names_kept(module):
        try:
            yield
        finally:
            torch.set_grad_enabled(is_enabled)
