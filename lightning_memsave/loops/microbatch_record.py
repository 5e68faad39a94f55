"""The record of microbatching in one run: what was cut, and what makes the result another than of whole batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import lightning as L
import torch
from torch import Tensor

from lightning_memsave.core.errors import MicrobatchWarning, NotLosslessWarning, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.core.units import counted
from lightning_memsave.loops.metric_inputs import MetricInputs
from lightning_memsave.loops.step_effects import StepEffects, gradients_set_aside, hooks_on_gradients
from lightning_memsave.techniques.microbatching import Microbatching, why_not_exact

_OTHER_MODULES = "microbatches change the result of"
_RUN_AGAIN = "a batch that was run again does not put back the parameters"
_HOOKS_AGAIN = "a batch that was run again calls once more"


class MicrobatchRecord:
    """What microbatching did in one run, and its loss class.

    Args:
        config: with `strict`, whatever changes the result is an error; `None` where nothing is cut.
        warns: whether a changed result is worth a warning.
    """

    def __init__(self, config: Microbatching | None, *, warns: bool) -> None:
        self._config, self._warns = config, warns
        self._summary: str | None = None  # once something was cut
        self._reasons: list[str] = []
        self._not_put_back: dict[str, None] = {}  # in order
        self._num_whole = self._num_cut = 0
        self._makes_gradients = self._has_warned_of_whole = self._has_warned_of_parts = False

    def applied(self, size: int | None, rule: str | None) -> Applied | None:
        """Return what microbatching did; `None` until a batch was cut, or run again with another result.

        Args:
            size: samples per microbatch now.
            rule: how the losses of microbatches add up, in words.
        """
        if self._summary is None:
            reasons = tuple(self._reasons)
            again = Applied(
                technique="microbatching", summary="batches run again", loss_class="changed", reasons=reasons
            )
            return again if reasons else None
        loss = f" (loss: {rule})" if rule else ""
        samples = f" of at most {counted(size, 'sample')}" if size is not None else ""
        whole = f"; {self._num_whole} batches ran whole" if self._num_whole else ""
        return Applied(
            technique="microbatching",
            summary=f"{self._summary}{samples}{loss}{whole}",
            loss_class="changed" if self._reasons else "exact",
            reasons=tuple(self._reasons),
        )

    def begin(self, module: L.LightningModule, what: str) -> None:
        """Note that a batch is about to be cut.

        Args:
            module: the LightningModule.
            what: is done in parts, in words.

        Raises:
            ValueError: `strict` is set, and the model has layers whose result microbatches change.
        """
        if self._summary is not None:
            return
        if modules := why_not_exact(module):
            self.changes(f"{_OTHER_MODULES} {_listed(modules)}")
        self._summary = f"{what} in parts"  # last: what is refused is asked again where recovery tries again

    def ran_whole(self, warning: str) -> None:
        """Note that a batch was not cut, and warn the first time."""
        self._num_whole += 1
        if not self._has_warned_of_whole:
            self._has_warned_of_whole = True
            warnings.warn(warning, MicrobatchWarning, stacklevel=2)

    def warn_of_evaluation(self) -> None:
        """Warn, once, that a batch of evaluation is about to be cut, where a mean is not told from a sum."""
        if not self._has_warned_of_parts:
            self._has_warned_of_parts = True
            warnings.warn(
                "Memory ran out in evaluation, so its batches are run in parts. These results are right: torchmetrics, "
                "logged tensors and scalars that are means over samples, and outputs with one entry per sample. Sums, "
                "counts and losses between samples are those of the parts. A smaller batch size in the loader avoids "
                "this.",
                MicrobatchWarning,
                stacklevel=2,
            )

    @property
    def looks(self) -> bool:
        """Whether the batch that runs is one of those whose side effects are looked for."""
        number = self._num_cut + 1
        return not number & (number - 1)

    def watch(self, module: L.LightningModule, device: torch.device) -> Callable[[int], AbstractContextManager[None]]:
        """Return a function of the number of a part, whose context is put around `training_step` for that part.

        It notes side effects of the step in the first two batches that are cut, and later in the fourth, the eighth
        and so on. What a step sets once, a cache or the number of the batch, does not change in the second part.
        """
        looks = self.looks

        @contextmanager
        def around(part: int) -> Iterator[None]:
            effects = StepEffects(module, device, reads_values=part > 0) if looks and part < 2 else None
            # A backward of the step's own: what it makes in later parts goes, as with `zero_grad` of a whole batch.
            with gradients_set_aside(module) if part and self._makes_gradients else nullcontext():
                yield
            if effects is not None:
                self._note(effects, module, part)

        return around

    def _note(self, effects: StepEffects, module: L.LightningModule, part: int) -> None:
        self._makes_gradients |= part == 0 and effects.has_made_gradients
        if effects.has_drawn and not any(reason.startswith(_OTHER_MODULES) for reason in self._reasons):
            self.changes(f"{_OTHER_MODULES} training_step (it draws random numbers)")
        if part and (changed := effects.changes()):
            self.changes(f"training_step changes {_listed(changed)} for each microbatch, and not once per batch")
        if hooked := hooks_on_gradients(module):
            self.changes(f"hooks get the gradients of each microbatch, of {_listed(hooked)}")

    def note_losses(self, losses: Sequence[Tensor | None]) -> None:
        """Note what `training_step` has returned for the parts of a batch, all of which have been run."""
        self._num_cut += len(losses) > 1
        if any(loss is None for loss in losses) and any(loss is not None for loss in losses):
            self.changes("training_step returned None for some microbatches, of which others have a loss")

    def note_failed_try(self, edited: Iterable[str]) -> None:
        """Note which parameters a try of a batch has edited in place: they are not put back for the next try.

        Nor does it help that the next one leaves them as it finds them: the first may have failed before it gave them
        their values back (averaged weights for a moment, a step of an adversary).
        """
        self._not_put_back.update(dict.fromkeys(edited))

    def note_good_try(self) -> None:
        """Note that the batch was run."""
        names, self._not_put_back = [*self._not_put_back], {}
        self.note_edited_again(names)

    def note_edited_again(self, names: Sequence[str]) -> None:
        """Note parameters that a batch has edited more than once."""
        if names:
            self.changes(f"{_RUN_AGAIN} {_listed([f'`{name}`' for name in names])}, which it edits in place")

    def note_hooks(self, names: Sequence[str]) -> None:
        """Note hooks of callbacks, which keep what they like, that have run more than once for a batch."""
        if names:
            self.changes(f"{_HOOKS_AGAIN} {_listed([f'`{name}`' for name in names])}")

    @contextmanager
    def noting_early_effects(self, effects: StepEffects | None) -> Iterator[None]:
        """Note what hooks that read gradients, or `optimizer_zero_grad`, change inside, before later microbatches.

        Args:
            effects: before; `None` where nobody looks.
        """
        yield
        if effects is not None and (changed := effects.changes()):
            what = f"what zeroes gradients, or reads them before that, changes {_listed(changed)}"
            self.changes(f"{what}, and later microbatches compute with that")

    def note_inputs(self, inputs: MetricInputs) -> None:
        """Note whether metrics have taken some parts of a batch for logits and others for probabilities."""
        if inputs.are_mixed:
            self.changes("metrics took logits of some microbatches for probabilities")

    def note_lost_gradients(self, reader: str | None) -> None:
        """Note that a method may have read the last batch's gradients, which a failed try has freed for another one."""
        if reader is not None:
            self.changes(f"{_HOOKS_AGAIN} {reader}, which may read gradients of the last batch: they are gone")

    def changes(self, reason: str) -> None:
        """Note that microbatches, or tries, do not give the result of whole batches.

        Raises:
            ValueError: `strict` is set.
        """
        if reason in self._reasons:
            return
        assert self._config is not None, "a batch is cut"
        if self._config.strict:
            raise setting_error(
                "Microbatching.strict",
                "forbids microbatches for a model whose result they change",
                reason,
                "Take smaller batches, or drop `strict=True`."
                if reason.startswith((_RUN_AGAIN, _HOOKS_AGAIN))
                else "Put these modules in eval mode, replace BatchNorm by GroupNorm, or drop `strict=True`."
                if reason.startswith(_OTHER_MODULES)
                else "Leave it out, take smaller batches, or drop `strict=True`.",
            )
        self._reasons.append(reason)
        if self._warns:
            what = "Another try changes" if reason.startswith((_RUN_AGAIN, _HOOKS_AGAIN)) else "Microbatches change"
            warnings.warn(
                f"{what} the result of this model: {reason.removeprefix(_OTHER_MODULES).strip()}. "
                "`Microbatching(strict=True)` refuses instead.",
                NotLosslessWarning,
                stacklevel=2,
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
