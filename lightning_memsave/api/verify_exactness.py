"""Does a setting do what it says on this model? One step with and without it, from the same weights and random numbers.

A step is taken by Lightning's own loop on a copy of the module. Compared are the loss, the gradients that the optimizer
gets, and the buffers afterwards, by module. The steps that follow tell peak and time.

Where activations are kept with noise, the first step is taken several times, each with another draw of it: the mean of
the gradients must approach the plain one as fast as noise that averages to zero does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.verification import Noise, Verification
from lightning_memsave.lightning_compat import Batch, namespace_of
from lightning_memsave.loops.out_of_memory import is_out_of_memory
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.dry_run import DoneError, fit, nothing_around, silence
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.torch_internals.model_copies import copied

_NUM_STEPS = 8  # the second and the third are measured, the others timed
_NUM_DRAWS = 8  # of noise: a bias as large as that is told from chance
_MOST_ELEMENTS = 2**16  # of each gradient that are kept of each draw
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Relative differences that rounding alone may make, in gradients of the widest parameters of a model."""


def verify(
    module: L.LightningModule,
    batch: Batch,
    memsave: MemSave | None = None,
    *,
    seed: int = 0,
    data_module: Any = None,
) -> Verification:
    """Compare a training step with and without memory saving.

    Args:
        module: is copied, not changed.
        batch: what `training_step` takes.
        memsave: the settings; by default `MemSave()`.
        seed: of the random numbers of both.
        data_module: of the run, whose hooks see the batch.

    Raises:
        ValueError: the module is compiled as a whole, or trains by manual optimization, whose gradients nobody hands
            out; memory runs out without memory saving, which is what is compared with; or the first step has no
            gradient to compare.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> result = verify(BoringModel(), torch.ones(8, 32), MemSave(microbatch=2))
        >>> result.holds, result.loss_class, result.largest_difference < 1e-6
        (True, 'exact', True)
    """
    if hasattr(module, "_orig_mod"):
        rule, remedy = (
            "must be a LightningModule itself",
            "Pass what was compiled; layers inside of it may be compiled.",
        )
        raise setting_error("module", rule, "`torch.compile(module)`", remedy)
    if not module.automatic_optimization:
        raise ValueError(
            "`verify` needs automatic optimization: under manual optimization no step hands its gradients out."
        )
    run = functools.partial(_one_run, module, batch, data_module, seed)
    try:
        plain = run(MemSave("measure"))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise setting_error(
            "batch", "must fit without memory saving, which `verify` compares with", str(error), "Take fewer samples."
        ) from error
    if not plain.gradients:
        raise ValueError("`verify` needs gradients: in the first step no parameter that requires one has got it.")
    ours = run(memsave or MemSave())
    is_exact = ours.memsave.report.loss_class == "exact"
    found = Verification(
        plain=plain.memsave.report,
        report=ours.memsave.report,
        loss_difference=_relative(ours.loss, plain.loss),
        gradient_differences=_by_module(ours.gradients, plain.gradients, is_exact),
        buffer_differences=_by_module(ours.buffers, plain.buffers, is_exact),
        tolerance=min(
            (_TOLERANCE.get(p.dtype, 5e-2) for p in module.parameters() if p.is_floating_point()), default=1e-3
        ),
    )
    config = _recipe_of(ours.memsave).get(ActivationCompression)
    if config is None or is_exact or found.loss_class == "changed" or not math.isfinite(found.largest_difference):
        return found
    draws = [_sampled(ours.gradients, plain.gradients)]
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run above has said what there is to say
        for draw in range(1, _NUM_DRAWS):
            again = run(_redrawn(ours.memsave, draw), num_steps=1)
            draws.append(_sampled(again.gradients, plain.gradients))
    expected = _sampled(plain.gradients, plain.gradients)
    differences = (torch.stack(draws) - expected) / expected.norm()
    return replace(found, noise=noise_of(differences, _lossy_codecs(config)))


def noise_of(differences: Tensor, codecs: tuple[str, ...]) -> Noise:
    """Return what draws of noise do on average.

    The chance is that of an analysis of variance: `num_draws` times the square of the mean, over the variance of the
    draws about it, is F-distributed where nothing but noise is there. Its degrees of freedom are Satterthwaite's, from
    how much the draws resemble each other, and its tail is Paulson's approximation.

    Args:
        differences: [draws, elements].
        codecs: what makes the noise.
    """
    num = len(differences)
    products = differences @ differences.T
    squared_size, squared_mean = float(products.diagonal().mean()), float(products.mean().clamp(min=0))
    first, second = torch.triu_indices(num, num, 1, device="cpu")
    resemblance = float(products[first, second].square().mean())
    variance = (squared_size - squared_mean) * num / (num - 1)
    chance = 1.0
    if squared_mean:
        a = 2 * resemblance / (9 * squared_size**2)
        b = a / (num - 1)
        root = (num * squared_mean / variance) ** (1 / 3) if variance > 0 else math.inf
        deviations = (1 - b - (1 - a) / root) / (math.sqrt(b + a / root**2) or 1.0)
        chance = math.erfc(deviations / math.sqrt(2)) / 2
    return Noise(codecs=codecs, num_draws=num, size=squared_size**0.5, mean_size=squared_mean**0.5, chance=chance)


def _recipe_of(memsave: MemSave) -> Recipe:
    return memsave.recipe if memsave.plan is None else memsave.plan.as_recipe()


def _redrawn(memsave: MemSave, draw: int) -> MemSave:
    """Return the same settings with another noise."""
    recipe = _recipe_of(memsave)
    config = recipe.get(ActivationCompression)
    return MemSave(recipe if config is None else recipe.with_settings(replace(config, seed=config.seed + draw)))


def _lossy_codecs(config: ActivationCompression) -> tuple[str, ...]:
    named = dict.fromkeys([*config.codecs, *config.modules.values(), *config.operations.values()])
    return tuple(codec for codec in named if not ActivationCompression(codecs=(codec,)).is_exact)


def _sampled(gradients: dict[str, Tensor], plain: dict[str, Tensor]) -> Tensor:
    """Return evenly spaced elements of the gradients that the plain step has; zeros for one that is missing."""
    found = [gradients.get(name, torch.zeros_like(p)).flatten() for name, p in plain.items()]
    return torch.cat([flat[:: max(1, len(flat) // _MOST_ELEMENTS)].double().cpu() for flat in found])


class _FirstStep(L.Callback):
    """Keeps what the first step was about, and ends the run after the last."""

    def __init__(self, memsave: MemSave, num_steps: int) -> None:
        self.memsave, self._num_steps = memsave, num_steps
        self.gradients: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.loss = torch.tensor(math.nan, device="cpu")
        self._hooks: list[RemovableHandle] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        configure = pl_module.configure_optimizers

        @functools.wraps(configure)
        def watched() -> Any:  # once all layers are there, and before anybody's hooks free gradients
            is_copy = getattr(pl_module, "_trainer", None) is not trainer  # for a plan
            for name, p in pl_module.named_parameters():
                if p.requires_grad and not is_copy:
                    keep = functools.partial(self._keep, trainer, name)
                    self._hooks.append(p.register_post_accumulate_grad_hook(keep))
            return configure()

        pl_module.configure_optimizers = watched  # type: ignore[method-assign]  # of this copy

    def end(self) -> None:
        """Take the hooks off, which hold the model: a parameter that holds itself is never freed."""
        for hook in self._hooks:
            hook.remove()

    def _keep(self, trainer: L.Trainer, name: str, p: Tensor) -> None:
        """Keep a gradient, the latest of which is the sum over microbatches: it may be released in backward."""
        if trainer.global_step == 0 and p.grad is not None:
            self.gradients[name] = p.grad.clone()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if batch_idx == 0 and outputs:  # none where `training_step` returned none
            self.loss = outputs["loss"].detach().clone()
            self.buffers = {n: b.clone() for n, b in pl_module.named_buffers() if b.is_floating_point()}
        if batch_idx == self._num_steps - 1:
            raise DoneError


@contextlib.contextmanager
def _seeds_kept() -> Iterator[None]:
    """Restore the environment variables by which Lightning seeds workers and samplers."""
    before = {name: os.environ.pop(name, None) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _accelerators() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _one_run(
    module: L.LightningModule, batch: Batch, data_module: Any, seed: int, memsave: MemSave, num_steps: int = _NUM_STEPS
) -> _FirstStep:
    first = _FirstStep(memsave, num_steps)
    with Randomness.untouched(_accelerators()), _seeds_kept():
        L.seed_everything(seed, verbose=False)
        namespace = namespace_of(module)
        trainer = import_module(namespace).Trainer(
            max_steps=num_steps, devices=1, callbacks=[memsave, first], **nothing_around(namespace)
        )
        try:
            fit(trainer, copied(module), batch, data_module)
        except DoneError:
            pass
        finally:
            first.end()
    return first


def _by_module(ours: dict[str, Tensor], plain: dict[str, Tensor], is_exact: bool) -> dict[str, float]:
    """Return the relative difference of all tensors of each module together; the largest first.

    What changes the model may have other tensors (values instead of weights, corrections): those are left out.
    """
    names: dict[str, list[str]] = {}
    for name in plain.keys() | ours.keys() if is_exact else plain.keys() & ours.keys():
        names.setdefault(name.rpartition(".")[0], []).append(name)
    found = {
        owner: _relative(*(_joined([tensors.get(name) for name in sorted(parts)]) for tensors in (ours, plain)))
        for owner, parts in names.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _joined(tensors: list[Tensor | None]) -> Tensor:
    """Join tensors to one; infinity stands for a missing one, which is a difference of its own."""
    return torch.cat(
        [torch.full((1,), math.inf, device="cpu") if t is None else t.double().flatten().cpu() for t in tensors]
    )


def _relative(ours: Tensor, plain: Tensor) -> float:
    if ours.shape != plain.shape:
        return math.inf
    ours, plain = ours.double(), plain.double()
    difference, norm = float((ours - plain).norm()), float(plain.norm())
    if not difference:
        return 0.0
    # What is no number is infinitely far, so that it is the largest.
    return difference / norm if norm and math.isfinite(difference / norm) else math.inf
