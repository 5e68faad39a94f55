"""LAMB with 8-bit moments: the ratio of norms that bitsandbytes' own leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def lamb_config(get_config: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return what bitsandbytes asks for, of a bare step."""

    def lamb(self: Any, gindex: int, pindex: int, group: Mapping[str, Any]) -> dict[str, Any]:
        # The kernel takes a bare Adam step of size one; `lamb_step` scales it.
        return get_config(self, gindex, pindex, group) | {"lr": 1.0, "weight_decay": 0.0}

    return lamb


def lamb_step(adam_step: Callable[..., None]) -> Callable[..., None]:
    """Return LAMB's step: Adam's direction plus decay, times the ratio of the norms of parameter and direction.

    Source: You et al., https://arxiv.org/abs/1904.00962, algorithm 2. bitsandbytes' 8-bit LAMB leaves the ratio out.
    """

    @torch.no_grad()
    def update_step(self: Any, group: Mapping[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        before = p.detach().float().clone()
        p.data.zero_()  # so that the step itself is what remains, at full precision
        adam_step(self, group, p, gindex, pindex)
        direction = p.detach().float().neg_().add_(before, alpha=float(group["weight_decay"]))
        norms = before.norm(), direction.norm()
        trust = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else before.new_ones(())
        p.data.copy_(before.sub_(direction.mul_(trust * float(group["lr"]))))

    return update_step
