"""Activation compression in a run: `training_step` runs inside the store's scope."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L

from lightning_memsave.core.errors import NoEffectWarning
from lightning_memsave.core.report import Applied
from lightning_memsave.lightning_compat import is_compiled
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.saved_tensors import DifferentiatedTwiceError, LogitsAskedError, refuses_hooks
from lightning_memsave.saved_tensors.seeds import NoiseSeeds
from lightning_memsave.techniques.activation_compression import (
    ActivationCompression,
    has_wide_head,
    open_store,
    what_happened,
)
from lightning_memsave.torch_internals.compiled_regions import NAME as COMPILED
from lightning_memsave.torch_internals.compiled_regions import compiled_functions, compiled_regions
from lightning_memsave.torch_internals.sharded_parameters import frees_weights

_NUM_RUNS_UNTIL_COMPILED = 3  # measured steps, which may run eagerly, are among the first ones


class ForwardScope:
    """The store of one fit.

    Args:
        trainer: Lightning's trainer; its module is set up, and of its batches the store counts the noise.
        config: how to keep what is kept.

    Raises:
        ValueError: as `open_store`.
    """

    def __init__(self, trainer: L.Trainer, config: ActivationCompression) -> None:
        # Each process has noise of its own.
        self._config = dataclasses.replace(config, seed=config.seed + 0x9E3779B9 * trainer.global_rank)
        self._store, self._applied = open_store(trainer.lightning_module, self._config)
        self._is_compiled, self._is_on, self._num_runs = is_compiled(trainer.lightning_module), True, 0

    def run(self, trainer: L.Trainer, step: Callable[[], Any]) -> Any:
        """Call `step`, which runs `training_step` on a batch or a part of one."""
        if not self._is_on:
            return step()
        # Counted by the trainer, so that a resumed run goes on where the first one stopped.
        self._store.draw_for(trainer.fit_loop.total_batch_idx)
        module = trainer.lightning_module
        # What torch.func refuses is seen in the first batch: the second try starts as the first one did.
        start = None if self._num_runs else BatchStart(module, None, "watched", noise=self.noise, small_bytes=math.inf)
        self._num_runs += 1
        self._store.weights_stay = not frees_weights(module)
        try:
            with self._store.scope(), self._shield:
                result = step()
                self._store.compute_held_logits()
            if self._num_runs == _NUM_RUNS_UNTIL_COMPILED:
                self._check_compiled(module)
            return result
        except RuntimeError as error:
            # Under manual optimization the step may have updated parameters already: it cannot be run again.
            is_twice, asks_logits = isinstance(error, DifferentiatedTwiceError), isinstance(error, LogitsAskedError)
            if not (is_twice or asks_logits or refuses_hooks(error)) or not module.automatic_optimization:
                raise
        if start is not None:
            start.restore(gradients=False)
        if is_twice:
            self._store.keeps_derivatives = False
            _warn("Activations are kept as codes of their inputs: `training_step` differentiates a backward pass.")
            return self.run(trainer, step)
        if asks_logits:
            self._store.chunk_loss = False
            _warn("Logits are computed and kept: `training_step` asks for their gradient.")
            return self.run(trainer, step)
        self._is_on = False
        _warn(
            "Activation compression is switched off: `training_step` uses torch.func, which refuses saved-tensor hooks."
        )
        return step()

    def evaluate(self, trainer: L.Trainer, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call `step`, which evaluates a batch or a part of one; the logits that it leaves somewhere are computed."""
        with self.evaluating(trainer):
            result = step(*args)
            self._store.compute_held_logits()
        return result

    def evaluating(self, trainer: L.Trainer) -> AbstractContextManager[None]:
        """What `training_step` is evaluated in without gradients."""
        self._store.weights_stay = not frees_weights(trainer.lightning_module)
        return self._store.evaluating() if self._is_on and not self._is_compiled else nullcontext()

    def _check_compiled(self, module: L.LightningModule) -> None:
        """Say where compiled code codes nothing, or runs eagerly."""
        if not self._is_compiled and (functions := compiled_functions(module)):
            warnings.warn(
                f"Functions that are compiled ({', '.join(functions)}) run eagerly where activations are kept by "
                "`MemSave(activations=...)`, a recipe or recovery. Compile modules instead: `module.compile()`.",
                NoEffectWarning,
                stacklevel=3,
            )
        regions = ["training_step"] if self._is_compiled else [name for name, _ in compiled_regions(module)]
        if regions and not self._config.is_exact and not self._store.consequences.is_compiled:
            warnings.warn(
                f"What is compiled ({', '.join(regions)}) keeps its activations as they are: the compiler has made "
                "nothing of it (before torch 2.15 as of torch's own containers: `nn.Sequential(...).compile()`), its "
                "backend is not Inductor, or nothing that it keeps bears noise.",
                NoEffectWarning,
                stacklevel=3,
            )

    @property
    def _shield(self) -> AbstractContextManager[None]:
        """What keeps the store's function mode out of a `training_step` that is compiled itself."""
        return self._store.unseen(COMPILED) if self._is_compiled else nullcontext()

    @property
    def noise(self) -> NoiseSeeds:
        """Seeds of the codes' noise."""
        return self._store.noise

    @property
    def applied(self) -> Applied:
        """What was done so far."""
        if not self._is_on:
            summary = "off: torch.func refuses saved-tensor hooks"
            return dataclasses.replace(self._applied, summary=summary, loss_class="exact", reasons=())
        return what_happened(self._applied, self._config, self._store) if self._num_runs else self._applied

    def close(self) -> None:
        """Take the hooks off the model; twice is safe."""
        self._applied.undo()


def may_drop_logits(module: L.LightningModule) -> bool:
    """Return whether losses of a module may keep no logits without anybody having asked for it, and that may help.

    Where the module itself calls `backward` and `step`, it may read logits after the weight has changed. Under FSDP2
    weights are freed before backward, and logits are computed anyway.
    """
    return has_wide_head(module) and module.automatic_optimization and not frees_weights(module)


def _warn(what: str) -> None:
    again = "This batch is run again; what it logged, and metrics counted, before that is there twice."
    warnings.warn(f"{what} {again}", NoEffectWarning, stacklevel=3)
