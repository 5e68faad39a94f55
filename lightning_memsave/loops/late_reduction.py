"""DDP where a batch may be run again: no process waits for another before its own batch is done.

DDP averages gradients while the last backward runs, and sends rank 0's buffers out in the next forward. A process that
ran out of memory in between could not start over: the others are waiting for it. Here both happen once, outside of what
may be repeated: buffers before the first try, gradients after the last. Each process may then cut its batch as it
needs. The price: communication no longer overlaps with backward, and DDP's communication hooks are not called.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_memsave.techniques.optimizer_state.gradient_exchange import (
    dense_gradient,
    in_any_process,
    in_buckets,
)

_BUCKET_BYTES = 25 * 2**20  # as DDP's own


class LateReduction:
    """The exchange of one batch.

    Args:
        ddp: the wrapped model; its buffers are sent out now, if they are due.
        steps: whether the optimizer steps after this batch; gradients stay local while they accumulate.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel, steps: bool) -> None:
        self._ddp, self._steps = ddp, steps
        self.has_begun = False
        """Whether gradients are on their way, after which a batch cannot be run again."""
        if ddp.will_sync_module_buffers():
            ddp._sync_buffers()
        ddp.require_forward_param_sync = False

    def finish(self) -> None:
        """Average the gradients over all processes; once."""
        if self.has_begun:
            return
        self.has_begun = True
        self._ddp.require_forward_param_sync = self._steps
        if self._steps:
            _average_gradients(self._ddp)


def bytes_on_top(module: nn.Module, peak_bytes: int, lasting_bytes: int) -> int:
    """Return how many bytes a process of DDP takes beyond one that trains alone, with a peak of `peak_bytes`.

    Its buckets, one copy of all gradients; or more, where the exchange after backward becomes the peak: a flat copy of
    as many gradients as are exchanged at once, beside what lasts (`lasting_bytes`: weights, optimizer state, data).
    """
    gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    exchange = lasting_bytes + 2 * gradients + min(gradients, _BUCKET_BYTES)
    return max(gradients, exchange - peak_bytes)


def num_collectives() -> int:
    """Return how many collectives this process has taken part in; 0 where no other process waits in them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
        return 0
    world: Any = dist.group.WORLD
    return int(world._get_sequence_number_for_group())


def _average_gradients(ddp: nn.parallel.DistributedDataParallel) -> None:
    group, parameters = ddp.process_group, [p for p in ddp.parameters() if p.requires_grad]
    # What no process has a gradient of keeps none, as with `find_unused_parameters`.
    found = in_any_process([p.grad is not None for p in parameters], ddp.device, group)
    for p in itertools.compress(parameters, found):
        p.grad = dense_gradient(p)
    gradients = sorted([p.grad for p in parameters if p.grad is not None], key=lambda g: (str(g.dtype), str(g.device)))
    world_size = dist.get_world_size(group)
    for bucket in in_buckets(gradients, _BUCKET_BYTES):
        flat = torch.cat([gradient.flatten() for gradient in bucket]) if len(bucket) > 1 else bucket[0].flatten()
        dist.all_reduce(flat.div_(world_size), group=group)
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))
