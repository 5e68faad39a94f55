"""Codecs in place of bounds of noise: in the settings that a planner tries, and in a run without a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lightning_memsave.lightning_compat import Batch
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.code_noise import BoundedCodes, CodeNoise
from lightning_memsave.prediction.peek_batch import first_batch
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.registry import Config


class CodecChoice:
    """Puts codecs by module in place of a bound of noise; with several processes those that rank 0 chooses.

    Args:
        noise: measures.
        trainer: of the run, or `None`.
        unmeasured: what stands for a bound where noise cannot be measured; `None`: that is an error.
    """

    def __init__(
        self,
        noise: CodeNoise,
        trainer: L.Trainer | None = None,
        unmeasured: Mapping[float, ActivationCompression] | None = None,
    ) -> None:
        self._noise, self._trainer, self._unmeasured = noise, trainer, unmeasured
        self._chosen: dict[float, BoundedCodes] = {}
        self.why_not = ""
        """Why noise could not be measured."""

    def of(self, config: ActivationCompression) -> BoundedCodes:
        """Return the codecs for the bound that settings have.

        Raises:
            ValueError: as `CodeNoise`.
        """
        bound = config.max_gradient_noise
        assert bound is not None, "it has one"
        if bound not in self._chosen:
            self._chosen[bound] = self._agreed(bound)
        return self._chosen[bound]

    def _agreed(self, bound: float) -> BoundedCodes:
        found: BoundedCodes | ValueError
        try:
            found = self._noise.within(bound)
        except ValueError as error:
            found = error
        if self._trainer is not None and self._trainer.world_size > 1:
            found = self._trainer.strategy.broadcast(found)
        if isinstance(found, ValueError):
            if self._unmeasured is None:
                raise found
            self.why_not = f"the noise of codes was not measured: {found}"
            enough = max((each for each in self._unmeasured if each <= bound), default=min(self._unmeasured))
            return BoundedCodes(self._unmeasured[enough], None, "")
        return found

    def settings(self, techniques: Sequence[Config]) -> tuple[Config, ...]:
        """Return the settings with codecs instead of a bound."""
        return tuple(self.of(each).config if is_bounded(each) else each for each in techniques)

    def noise_of(self, techniques: Sequence[Config]) -> float | None:
        """Return the noise that was measured for settings with a bound; `None` where none was."""
        return next((self.of(each).noise for each in techniques if is_bounded(each)), None)


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
        names = {name for name, _ in module.named_modules()}
        if self._codes is None or not names >= self._codes.config.modules.keys():
            self._codes = CodecChoice(self._noise_in(module, first_batch(trainer), trainer), trainer).of(self._config)
            rank_zero_info(f"memsave: {self._codes}")
        return self._recipe_with(self._codes)

    def recipe_for(self, module: L.LightningModule, batch: Batch) -> Recipe:
        """Return the settings for a module and batch outside of a run.

        Raises:
            ValueError: as `CodeNoise`.
        """
        return self._recipe_with(CodecChoice(self._noise_in(module, batch)).of(self._config))

    def _noise_in(self, module: L.LightningModule, batch: Batch, trainer: L.Trainer | None = None) -> CodeNoise:
        return CodeNoise(module, batch, self._config, trainer)

    def _recipe_with(self, codes: BoundedCodes) -> Recipe:
        techniques = (codes.config if is_bounded(each) else each for each in self._recipe.techniques)
        return replace(self._recipe, techniques=tuple(techniques))

    @property
    def _config(self) -> ActivationCompression:
        return next(each for each in self._recipe.techniques if is_bounded(each))

    def may_cut(self, module: L.LightningModule) -> bool:
        """Return whether a smaller microbatch is allowed when a step takes more than planned: there is no plan."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the codecs, for a checkpoint: a resumed run trains on with the same."""
        if self._codes is None:
            return {}
        config = self._codes.config
        chosen = {"codecs": list(config.codecs), "modules": dict(config.modules), "sites": self._codes.codecs}
        return {"chosen_codecs": {**chosen, "noise": self._codes.noise, "bound": self._config.max_gradient_noise}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Train on with the codecs of the run that is resumed, if it had the same bound."""
        chosen, config = state.get("chosen_codecs"), self._config
        if chosen is None or chosen["bound"] != config.max_gradient_noise:
            return
        codecs = replace(
            config, codecs=tuple(chosen["codecs"]), modules=dict(chosen["modules"]), max_gradient_noise=None
        )
        self._codes = BoundedCodes(codecs, chosen["noise"], chosen["sites"])
