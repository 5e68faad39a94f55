"""Clip gradients by their norm where each ends in backward, so that the norm is needed before there are all of them.

`"two-pass"` runs each batch twice: forward and backward once for the norm alone, which frees each gradient when it has
been counted, and again with the factor that the norm calls for. Random numbers are the same in both, nothing is logged
in the first, and buffers are as before after it, so the result is that of gradients that are kept; it takes the time of
a second forward and backward. `"previous-step"` multiplies by the factor that the norm of the step before calls for:
no time, another result. Its first step takes two passes.

Source of the factor: `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_memsave.loops.side_effect_free import without_a_trace
from lightning_memsave.techniques.optimizer_state import InBackward
from lightning_memsave.techniques.optimizer_state.state_config import NormClipping
from lightning_memsave.torch_internals.fake_tensors import is_fake
from lightning_memsave.torch_internals.sharded_parameters import whole


class ClippingByNorm:
    """The norm of a batch's gradients, and what they are multiplied by.

    Args:
        max_norm: to which larger ones are scaled.
        kind: when the norm is found.
    """

    def __init__(self, max_norm: float, kind: NormClipping) -> None:
        self._max_norm, self._kind = max_norm, kind
        self._norms: dict[Tensor, Tensor] = {}
        self._factor: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether the norm is to be found before the next batch."""
        return self._kind == "two-pass" or self._factor is None

    def count(self, p: Tensor) -> None:
        """Count the gradient of `p`."""
        assert p.grad is not None
        self._norms[p] = torch.linalg.vector_norm(p.grad)

    def decide(self, parameters: Iterator[Tensor]) -> None:
        """Take up the factor that the counted norms call for.

        Args:
            parameters: of the optimizers, in order: sums of their norms have the bits of torch's.
        """
        norms = [self._norms[p] for p in parameters if p in self._norms]
        self._norms.clear()
        if not norms:  # a batch without a loss
            return
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        total = whole(total)
        # A prediction has no values.
        self._factor = 1.0 if is_fake(total) else float((self._max_norm / (total + 1e-6)).clamp(max=1.0))

    def clip(self, p: Tensor) -> None:
        """Multiply the gradient of `p`; without a pass of its own, it is counted for the next step."""
        assert p.grad is not None
        assert self._factor is not None, "the first batch has a pass for the norm"
        if self._kind == "previous-step":
            self.count(p)
        p.grad.mul_(self._factor)


def run_for_norm(
    trainer: L.Trainer, step: Callable[[], Any], args: tuple[Any, ...], release: InBackward, clipping: ClippingByNorm
) -> None:
    """Run forward and backward of a batch that is run again, and count its gradients.

    Args:
        trainer: Lightning's, in its fit loop.
        step: `training_step(*args)`.
        args: the batch, and its number.
        release: of gradients.
        clipping: counts them, and takes up their norm.

    Raises:
        RuntimeError: the step changes what cannot be restored.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    with without_a_trace(trainer, module, args[0]) as start, release.observed(clipping.count):
        output = step()
        loss = output["loss"] if isinstance(output, dict) else output
        if loss is not None:
            with release.own_backward():
                strategy.precision_plugin.backward(loss, module, strategy.optimizers[0])
            release.finish_backward()
        del output, loss
        why_not = start.what_stays()
    for name in start.edits.edited():
        why_not = f"`training_step` changes the parameter {name}"
    if why_not is not None:
        raise RuntimeError(
            f'`OptimizerState(norm_clipping="two-pass")` runs each batch twice, which is not possible here: {why_not}. '
            'Use `gradients="keep"`.'
        )
    clipping.decide(release.parameters())
