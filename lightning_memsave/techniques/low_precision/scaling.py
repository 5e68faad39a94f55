"""Dynamic loss scaling: float16 gradients are those of a multiple of the loss, so that small ones do not vanish.

The factor halves with each step whose gradients overflow, which is skipped, and doubles after a number of good ones.
Gradients stay scaled until they are float32 copies: divided in float16, the small ones would vanish after all.

Source: Micikevicius et al., "Mixed Precision Training", 2018 (https://arxiv.org/abs/1710.03740).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.torch_internals.fake_tensors import truth
from lightning_memsave.torch_internals.optimizer_class import original

_GROWTH, _BACKOFF = 2.0, 0.5
_SMALLEST = 2.0**-14
"""Below it, it is not the factor that makes gradients overflow."""


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Return whether no element of `gradients` is infinite or NaN; one synchronisation."""
    largest = [torch.linalg.vector_norm(gradient, torch.inf).float() for gradient in gradients if gradient.numel()]
    return not largest or truth(torch.stack([each.to(largest[0].device) for each in largest]).isfinite().all(), True)


class LossScaling:
    """The factor of the loss.

    Args:
        initial: where it starts.
        growth_interval: good steps after which it doubles.
    """

    def __init__(self, initial: float, growth_interval: int) -> None:
        self.factor = initial
        self.num_skipped = 0
        """Steps that were skipped since this was made."""
        self._growth_interval, self._num_good = growth_interval, 0
        self._of_gradients: float | None = None
        self._clipped: dict[Tensor, Tensor] = {}  # what float16 gradients are still to be multiplied by

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on."""
        self._of_gradients = self.factor
        for p in list(self._clipped):  # they go on with what is added now
            self.fold(p)
        return (loss.float() if loss.dtype == torch.float16 else loss) * self.factor

    @property
    def of_gradients(self) -> float:
        """The factor that present gradients carry.

        Raises:
            RuntimeError: no loss was scaled.
        """
        if self._of_gradients is None:
            raise RuntimeError(
                'With `precision="fp16-scaled"` backward starts from a scaled loss: call '
                "`optimizer.scale_loss(loss).backward()`, or `self.manual_backward(loss)` under Lightning."
            )
        return self._of_gradients

    def unscaled(self, p: Tensor) -> Tensor:
        """Return the gradient of `p`, or of what it is a part of, in float32: without the factor, and clipped."""
        assert p.grad is not None
        gradient = p.grad.to(torch.float32, copy=True).div_(self.of_gradients)
        factor = self._clipped.get(original(p))
        return gradient if factor is None else gradient.mul_(factor)

    def fold(self, p: Tensor) -> None:
        """Clip the gradient of `p` itself, where that is still to be done."""
        factor = self._clipped.pop(p, None)
        if factor is not None and p.grad is not None:
            p.grad.mul_(factor)

    def update(self, overflown: bool) -> None:
        """Adapt the factor of the next loss to how this step went."""
        if overflown:
            self.num_skipped += 1
            self.factor, self._num_good = max(self.factor * _BACKOFF, _SMALLEST), 0
            return
        self._num_good += 1
        if self._num_good == self._growth_interval:
            self.factor, self._num_good = self.factor * _GROWTH, 0

    # ---------------------------------------------------------------- limits are those of gradients without the factor
    @torch.no_grad()
    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients so that their norm, computed in float32, is at most `max_norm`; float16 ones in their step.

        Returns:
            The norm before, without the factor of the loss.
        """
        parameters = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return torch.zeros((), device="cpu")
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        together = torch.stack([each.to(norms[0].device) for each in norms])
        norm: Tensor = torch.linalg.vector_norm(together) / self.of_gradients
        for p, gradient in zip(parameters, gradients, strict=True):
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradient.device)
            if gradient.dtype == torch.float16:  # the small ones would vanish
                self._clipped[p] = self._clipped.get(p, 1.0) * factor
            else:
                gradient.mul_(factor)
        return norm

    @torch.no_grad()
    def clip_by_value(self, parameters: Iterable[Tensor], value: float) -> None:
        """Limit the elements of gradients to +-`value`; one that is not finite stays, and the step is skipped."""
        limit = value * self.of_gradients
        for p in parameters:
            if p.grad is not None:
                self.fold(p)
                bound = min(limit, torch.finfo(p.grad.dtype).max)  # beyond which torch refuses on CPU
                p.grad.copy_(torch.where(p.grad.isfinite(), p.grad.clamp(-bound, bound), p.grad))

    # ------------------------------------------------------------------ as torch's GradScaler writes it
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "scale": self.factor,
            "growth_factor": _GROWTH,
            "backoff_factor": _BACKOFF,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._num_good,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; settings stay."""
        if state:
            self.factor, self._num_good = float(state["scale"]), int(state["_growth_tracker"])
