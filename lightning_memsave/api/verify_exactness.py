"""Does a setting do what it says on this model? One step with and without it, from the same weights and random numbers.

A step is taken by Lightning's own loop on a copy of the module. Compared are the loss, the gradients that the optimizer
gets, and the buffers afterwards, by module. The steps that follow tell peak and time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.verification import Verification
from lightning_memsave.lightning_compat import Batch, namespace_of
from lightning_memsave.loops.out_of_memory import is_out_of_memory
from lightning_memsave.prediction.dry_run import DoneError, fit, nothing_around
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.torch_internals.model_copies import copied

_NUM_STEPS = 8  # the second and the third are measured, the others timed
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Relative differences that rounding alone may make, in gradients of the widest parameters of a model."""


def verify(module: L.LightningModule, batch: Batch, memsave: MemSave | None = None, *, seed: int = 0) -> Verification:
    """Compare a training step with and without memory saving.

    Args:
        module: is copied, not changed.
        batch: what `training_step` takes.
        memsave: the settings; by default `MemSave()`.
        seed: of the random numbers of both.

    Raises:
        ValueError: the module trains by manual optimization, whose gradients nobody hands out; memory runs out
            without memory saving, which is what is compared with; or the first step has no gradient to compare.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> result = verify(BoringModel(), torch.ones(8, 32), MemSave(microbatch=2))
        >>> result.holds, result.loss_class, result.largest_difference < 1e-6
        (True, 'exact', True)
    """
    if not module.automatic_optimization:
        raise ValueError(
            "`verify` needs automatic optimization: under manual optimization no step hands its gradients out."
        )
    baseline = MemSave("measure")
    try:
        plain = _one_run(module, batch, baseline, seed)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise setting_error(
            "batch", "must fit without memory saving, which `verify` compares with", str(error), "Take fewer samples."
        ) from error
    if not plain.gradients:
        raise ValueError("`verify` needs gradients: in the first step no parameter that requires one has got it.")
    ours = _one_run(module, batch, memsave or MemSave(), seed)
    is_exact = ours.memsave.report.loss_class == "exact"
    return Verification(
        plain=plain.memsave.report,
        report=ours.memsave.report,
        loss_difference=_relative(ours.loss, plain.loss),
        gradient_differences=_by_module(ours.gradients, plain.gradients, is_exact),
        buffer_differences=_by_module(ours.buffers, plain.buffers, is_exact),
        tolerance=min(
            (_TOLERANCE.get(p.dtype, 5e-2) for p in module.parameters() if p.is_floating_point()), default=1e-3
        ),
    )


class _FirstStep(L.Callback):
    """Keeps what the first step was about, and ends the run after the last."""

    def __init__(self, memsave: MemSave) -> None:
        self.memsave = memsave
        self.gradients: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.loss = torch.tensor(math.nan)
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
        if batch_idx == _NUM_STEPS - 1:
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


def _one_run(module: L.LightningModule, batch: Batch, memsave: MemSave, seed: int) -> _FirstStep:
    first = _FirstStep(memsave)
    with Randomness.untouched(_accelerators()), _seeds_kept():
        L.seed_everything(seed, verbose=False)
        namespace = namespace_of(module)
        trainer = import_module(namespace).Trainer(
            max_steps=_NUM_STEPS, devices=1, callbacks=[memsave, first], **nothing_around(namespace)
        )
        try:
            fit(trainer, copied(module), batch)
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
    return torch.cat([torch.full((1,), math.inf) if t is None else t.double().flatten().cpu() for t in tensors])


def _relative(ours: Tensor, plain: Tensor) -> float:
    if ours.shape != plain.shape:
        return math.inf
    ours, plain = ours.double(), plain.double()
    difference, norm = float((ours - plain).norm()), float(plain.norm())
    if not difference:
        return 0.0
    # What is no number is infinitely far, so that it is the largest.
    return difference / norm if norm and math.isfinite(difference / norm) else math.inf
