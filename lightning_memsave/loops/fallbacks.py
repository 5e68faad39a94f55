"""Fallbacks: the measures against too little memory besides smaller microbatches, in the order of their cost.

All are exact but the last, tiles with BatchNorm. They take time, so they wait until memory runs out. Techniques that
the user has set, or switched off, are left as they are; inputs of regions leave the device in any case.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import lightning as L

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.lightning_compat import is_compiled, session_of
from lightning_memsave.loops.deferred_logs import refusing_logs
from lightning_memsave.loops.forward_scope import ForwardScope, may_drop_logits
from lightning_memsave.loops.planned_checkpointing import PlannedCheckpointing, has_room
from lightning_memsave.loops.step_scopes import StepScopes
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.techniques.activation_compression import ActivationCompression, with_head
from lightning_memsave.techniques.batchnorm import pools_statistics
from lightning_memsave.techniques.checkpointing import Checkpointing, apply_checkpointing, input_store
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.tiling import Tiles, Tiling

_FEWER = 4  # times fewer samples in a tile, with each try
_POSITIONS = Tiling(dim=1)
_KINDS = (0, None), (1, None), (0, "ghost")  # dimension, and what becomes of BatchNorm


class Fallbacks:
    """The measures of one run, each of which is taken once.

    Args:
        scopes: of `training_step`, which the measures open or replace.
    """

    def __init__(self, scopes: StepScopes) -> None:
        self._scopes = scopes
        self._num_taken = 0
        self.num_learned = 0
        """Measures that an earlier run has found to be needed."""
        self.tiling: Tiling | None = None
        """How modules run in tiles, because the batch cannot be cut, or cannot be cut further."""
        self._tiles_refused = False
        self.are_joint = False
        """Whether processes wait for each other inside of a batch: regions and tiles that a model refuses could not be
        withdrawn there."""
        self.regions_refused = False
        """Whether the model cannot be checkpointed, as regions have shown that were withdrawn."""

    @property
    def num_needed(self) -> int:
        """How many measures this run has needed, or an earlier one."""
        return max(self._num_taken, self.num_learned)

    def take_next(self, trainer: L.Trainer) -> str | None:
        """Take the next measure and return what it is, in words; `None` when there is none left."""
        measures = [_compress, _checkpoint_blocks, _plan_regions, _offload_inputs]
        while self._num_taken < len(measures):
            measure = measures[self._num_taken]
            self._num_taken += 1
            if (self.regions_refused or self.are_joint) and measure is not _compress:
                continue
            with suppress(ValueError):  # nothing to work on, or not possible in this way of training
                if (taken := measure(trainer, session_of(trainer).recipe, self._scopes)) is not None:
                    return taken
        return None

    def take_learned(self, trainer: L.Trainer) -> bool:
        """Take the measures that an earlier run has needed; return whether there were any to take."""
        has_taken = False
        while self._num_taken < self.num_learned:
            has_taken |= self.take_next(trainer) is not None
        if self.tiling is not None and self._scopes.tiles is None:
            if self._is_allowed(trainer, self.tiling):
                self._tile(trainer, self.tiling)
                has_taken = True
            else:
                self.tiling = None
        return has_taken

    def take_tiles(self, trainer: L.Trainer, num_samples: int, batchnorm: Literal["ghost"] | None = None) -> str | None:
        """Run modules in tiles of fewer samples than before, and return that in words; `None` where none is left.

        For batches that cannot be cut, as their loss relates samples: the loss sees all of them.

        Args:
            trainer: Lightning's.
            num_samples: of the batch.
            batchnorm: `"ghost"` for modules with active BatchNorm, which change the result: the last measure.
        """
        kind = Tiling(dim=0, batchnorm=batchnorm)
        has_batchnorm = any(map(pools_statistics, trainer.lightning_module.modules()))
        if not self._may_take(trainer, kind) or (batchnorm is not None and not has_batchnorm):
            return None
        is_next = self.tiling is not None and _place(self.tiling) == _place(kind)
        size, least = self.tiling.size if self.tiling and is_next else num_samples, 1 if batchnorm is None else 2
        if isinstance(size, str) or size <= least:
            return None
        size = max(least, size // _FEWER)
        self._tile(trainer, replace(kind, size=size))
        each = "" if batchnorm is None else ", each with BatchNorm statistics of its own"
        return f"modules in tiles of {size} samples, where these are independent{each}"

    def take_position_tiles(self, trainer: L.Trainer) -> str | None:
        """Run modules in tiles of fewer positions than before, and return that in words; `None` where none is left.

        For batches of one sample, and those that cannot be cut in any way.
        """
        if not self._may_take(trainer, _POSITIONS):
            return None
        tiles, size = self._scopes.tiles, None
        if tiles is not None and (tiles.cut or tiles.config.dim == _POSITIONS.dim):
            if tiles.config.dim != _POSITIONS.dim or tiles.largest <= 1:
                return None
            size = max(1, tiles.largest // _FEWER)
        self._tile(trainer, _POSITIONS if size is None else replace(_POSITIONS, size=size))
        return f"modules in tiles of {'' if size is None else f'{size} '}positions, where these are independent"

    def _may_take(self, trainer: L.Trainer, kind: Tiling) -> bool:
        """Return whether tiles of a kind are possible: not after those of a later kind, or if its own have cut nothing.

        Raises:
            ValueError: not in this way of training.
        """
        tiles = self._scopes.tiles
        if not self._is_allowed(trainer, kind):
            return False
        if self.tiling is None or _place(self.tiling) < _place(kind):
            return True
        return _place(self.tiling) == _place(kind) and (tiles is None or not tiles.is_useless)

    def _is_allowed(self, trainer: L.Trainer, kind: Tiling) -> bool:
        """Return whether the settings allow tiles of a kind.

        Raises:
            ValueError: not in this way of training.
        """
        recipe = session_of(trainer).recipe
        microbatching = recipe.get(Microbatching)
        is_strict = microbatching is not None and microbatching.strict
        if self.are_joint or self._tiles_refused or not recipe.leaves_open(Tiling) or (kind.batchnorm and is_strict):
            return False
        check_compatibility(["tiling", *recipe.rows(), *ways_of_training(trainer)])
        return True

    def _tile(self, trainer: L.Trainer, config: Tiling) -> None:
        scopes, recipe = self._scopes, session_of(trainer).recipe
        # Groups of calls were planned without tiles; with tiles of positions inside, blocks take less.
        has_regions = config.dim == _POSITIONS.dim and recipe.leaves_open(Checkpointing) and scopes.undo_regions()
        if scopes.tiles is not None:
            scopes.tiles.applied.undo()
        self.tiling = config
        scopes.tiles = Tiles(
            trainer.lightning_module, config, is_asked_for=False, apart=partial(refusing_logs, trainer)
        )
        if has_regions:
            scopes.regions = scopes.planned = None
            try:
                _checkpoint_blocks(trainer, recipe, scopes)
            except ValueError:  # there are none
                _plan_regions(trainer, recipe, scopes)

    def withdraw(self, trainer: L.Trainer) -> bool:
        """Undo the tiles or regions of a measure, or of a recipe by default, which the model has refused.

        Returns:
            Whether there were any.
        """
        scopes, recipe = self._scopes, session_of(trainer).recipe
        if self.tiling is not None and scopes.tiles is not None:
            scopes.tiles.applied.undo()
            scopes.tiles, self.tiling, self._tiles_refused = None, None, True
            return True
        is_open = recipe.leaves_open(Checkpointing) or Checkpointing in recipe.by_default
        if not is_open or not scopes.undo_regions():
            return False
        scopes.regions = scopes.planned = scopes.region_inputs = None
        self.regions_refused = True
        return True


def _place(tiling: Tiling) -> int:
    """Return the place of a kind of tiles in the order in which kinds are tried."""
    return _KINDS.index((tiling.dim, tiling.batchnorm))


def _compress(trainer: L.Trainer, recipe: Recipe, scopes: StepScopes) -> str | None:
    # What a compiled module keeps is the compiler's choice: there, nothing more is recomputed.
    module = trainer.lightning_module
    if not recipe.leaves_open(ActivationCompression) or is_compiled(module):
        return None
    check_compatibility(["activation_compression", *recipe.rows(), *ways_of_training(trainer)])
    drops_logits = may_drop_logits(module)
    scopes.activations = ForwardScope(trainer, with_head(ActivationCompression(), drops_logits))
    return "activations recomputed where that is cheap" + (", and a loss without logits" if drops_logits else "")


def _checkpoint_blocks(trainer: L.Trainer, recipe: Recipe, scopes: StepScopes) -> str | None:
    if not recipe.leaves_open(Checkpointing):
        return None
    scopes.regions = apply_checkpointing(trainer.lightning_module, Checkpointing())
    return f"checkpointing of {scopes.regions.summary}"


def _plan_regions(trainer: L.Trainer, recipe: Recipe, scopes: StepScopes) -> str | None:
    if not recipe.leaves_open(Checkpointing) or not has_room():
        return None
    planned = PlannedCheckpointing(trainer, Checkpointing(method="sqrt"), is_asked_for=False)
    scopes.undo_regions()
    scopes.regions, scopes.planned = None, planned
    return "checkpointing of the best groups of calls"


def _offload_inputs(trainer: L.Trainer, recipe: Recipe, scopes: StepScopes) -> str | None:
    has_regions = any(applied.technique == "checkpointing" for applied in scopes.applied)
    if scopes.region_inputs is not None or not has_regions:
        return None
    scopes.region_inputs = input_store()
    return "the inputs of checkpointed regions outside of the device's memory"
