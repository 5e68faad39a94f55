"""Codecs in place of bounds of noise: in the settings that a planner tries, and in a run without a budget."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lightning_memsave.lightning_compat import Batch
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.code_noise import BoundedCodes, CodeNoise, classes_in
from lightning_memsave.prediction.peek_batch import first_batches
from lightning_memsave.prediction.real_run import Trial
from lightning_memsave.prediction.simulated_process_group import planning_groups, with_layers
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.registry import Config


class CodecChoice:
    """Puts codecs by module in place of a bound of noise.

    Args:
        noise: measures.
        unmeasured: what stands for a bound where noise cannot be measured; `None`: that is an error.
    """

    def __init__(self, noise: CodeNoise, unmeasured: Mapping[float, ActivationCompression] | None = None) -> None:
        self._noise, self._unmeasured = noise, unmeasured
        self.why_not = ""
        """Why noise could not be measured."""

    def of(self, config: ActivationCompression, *, is_measured: bool = True) -> BoundedCodes:
        """Return the codecs for the bound that settings have.

        Args:
            config: with a bound.
            is_measured: whether the noise of all codes together is measured; else the sites alone tell.

        Raises:
            ValueError: as `CodeNoise`.
        """
        bound = config.max_gradient_noise
        assert bound is not None, "it has one"
        try:
            return self._noise.within(bound) if is_measured else BoundedCodes(self._noise.expected_within(bound))
        except ValueError as error:
            if self._unmeasured is None:
                raise
            self.why_not = f"the noise of codes was not measured: {error}"
            enough = max((each for each in self._unmeasured if each <= bound), default=min(self._unmeasured))
            return BoundedCodes(self._unmeasured[enough])

    def settings(self, techniques: Sequence[Config], *, is_measured: bool = True) -> tuple[Config, ...]:
        """Return the settings with codecs instead of a bound, as `of`."""
        return tuple(self.of(t, is_measured=is_measured).config if is_bounded(t) else t for t in techniques)


def is_bounded(config: Config | None) -> TypeGuard[ActivationCompression]:
    """Return whether settings have a bound of noise instead of codecs."""
    return isinstance(config, ActivationCompression) and config.max_gradient_noise is not None


class NoiseBoundedRun:
    """A run whose codecs are chosen from its first batch.

    Args:
        recipe: with a bound of noise.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._codes: BoundedCodes | None = None
        self._made_for: int | None = None  # as `_kind_of` tells it

    @property
    def gradient_noise(self) -> float | None:
        """What was measured; `None` before the first fit."""
        return None if self._codes is None else self._codes.noise

    def decide(self, trainer: L.Trainer) -> Recipe:
        """Return the settings of this run; a later fit of the same modules takes the same codecs.

        Raises:
            ValueError: as `CodeNoise`, or the first batch cannot be read.
        """
        module = trainer.lightning_module
        if self._codes is None or self._made_for != _kind_of(module):
            with planning_groups(trainer):
                layers = with_layers(module, trainer)
                batch = first_batches(trainer, 1, "max_gradient_noise", "Leave it out.")[0]
                self._codes = self._codes_for(module, batch, trainer)
            self._made_for = _kind_of(layers)
            rank_zero_info(f"memsave: {self._codes}")
        return self._recipe.with_settings(self._codes.config)

    def recipe_for(self, module: L.LightningModule, batch: Batch) -> Recipe:
        """Return the settings for a module and batch outside of a run.

        Raises:
            ValueError: as `CodeNoise`.
        """
        return self._recipe.with_settings(self._codes_for(module, batch).config)

    def _codes_for(self, module: L.LightningModule, batch: Batch, trainer: L.Trainer | None = None) -> BoundedCodes:
        stays_whole = bool(Trial(module, batch, trainer).cut(Microbatching()).why_not)
        return CodecChoice(CodeNoise(module, batch, self._config, trainer, stays_whole)).of(self._config)

    @property
    def _config(self) -> ActivationCompression:
        return next(each for each in self._recipe.techniques if is_bounded(each))

    def may_cut(self, module: L.LightningModule) -> bool:
        """Return whether a smaller microbatch is allowed when a step takes more than planned: there is no plan."""
        return True

    @property
    def _asked(self) -> str:
        """What was set; the same in another process."""
        return re.sub(r" at 0x[0-9a-f]+", "", repr(self._config))

    def state_dict(self) -> dict[str, Any]:
        """Return the codecs, for a checkpoint: a resumed run trains on with the same."""
        if self._codes is None:
            return {}
        config = self._codes.config
        chosen = {"codecs": list(config.codecs), "modules": dict(config.modules), "sites": self._codes.codecs}
        made = {"asked": self._asked, "made_for": self._made_for, "noise": self._codes.noise}
        return {"chosen_codecs": {**chosen, **made}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Train on with the codecs of the run that is resumed, if it had the same settings."""
        chosen = state.get("chosen_codecs")
        if chosen is None or chosen["asked"] != self._asked:
            return
        config = replace(
            self._config,
            codecs=tuple(chosen["codecs"]),
            modules=dict(chosen["modules"]),
            operations=self._config.all_operations,
            max_gradient_noise=None,
        )
        self._codes, self._made_for = BoundedCodes(config, chosen["noise"], chosen["sites"]), chosen["made_for"]


def _kind_of(module: L.LightningModule) -> int:
    """Return what another module must have in common for its codecs to be taken again."""
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    return zlib.crc32(repr((classes_in(module), shapes)).encode())
