"""Averages of gradients over processes inside of backward: what DDP does, without a second copy of all gradients.

DDP copies every gradient into buckets that live as long as it does, so a gradient that is freed in backward frees
nothing. Here DDP does not wrap the model. A bucket exists from its last gradient on until it is averaged; then each
gradient goes to whoever uses it, and is gone. One bucket is on its way while the next fills.

All processes exchange the same buckets in the same order: first that of the parameters backwards, and from the second
backward on the order in which gradients came on rank 0. A gradient that a process does not have counts as zero there.

Source of buckets, their order and the zeros: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", 2020 (https://arxiv.org/abs/2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_LARGEST_BUCKET, _SMALLEST_BUCKET = 25 * 2**20, 2**20  # bytes; the former is DDP's own
_NUM_BUCKETS = 64
"""Into which all gradients are divided, where buckets of these sizes allow it."""


class GradientExchange:
    """Averages gradients over all processes.

    Args:
        parameters: those that have gradients, the same in the same order on every process.
        finds_unused: whether a process may have no gradient of some; else that raises, as under DDP.
        broadcast: returns what rank 0 gives.
        group: of the processes; `None`: all of them.
        bucket_bytes: largest size of a bucket; a larger gradient is alone in one. `None`: a 64th of all gradients,
            from 1 to 25 MiB.

    Raises:
        RuntimeError: the parameters of this process are not those of rank 0.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        finds_unused: bool,
        broadcast: Callable[[Any], Any],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._check_same(broadcast)
        self._finds_unused, self._broadcast, self._group = finds_unused, broadcast, group
        self._bucket_bytes = bucket_bytes or default_bucket_bytes(self._parameters)
        self._known = set(self._parameters)
        self._buckets = in_buckets(self._parameters[::-1], self._bucket_bytes)
        self._is_first, self._arrived = True, dict[Tensor, None]()
        """Whether this is the first backward; whose gradients have come in this one, in order."""
        self._ready, self._unused = set[Tensor](), set[Tensor]()
        """Parameters that wait for their averages; those that had no gradient of this process's to add to it."""
        self._num_sent = 0
        self._on_its_way: tuple[list[Tensor], Tensor, Any] | None = None

    def _check_same(self, broadcast: Callable[[Any], Any]) -> None:
        ours = [(tuple(p.shape), str(p.dtype)) for p in self._parameters]
        theirs = broadcast(ours)
        if ours != theirs:
            raise RuntimeError(
                f"This process trains {len(ours)} parameters, and rank 0 {len(theirs)}, or others: gradients cannot be "
                "averaged. As under DDP, all processes need the same model."
            )

    def __contains__(self, p: Tensor) -> bool:
        return p in self._known

    use: Callable[[Tensor], None]
    """Function of a parameter whose gradient is the average now; frees it."""

    def add(self, p: Tensor) -> None:
        """Take the gradient of `p`, which is complete on this process.

        Raises:
            RuntimeError: it has come before in this step.
        """
        if p in self._arrived:
            raise RuntimeError(
                "A parameter got a second gradient in one step, and gradients that end in backward are averaged once. "
                "There can be no second backward pass, nor reentrant checkpointing of a module that is called twice. "
                'Use `OptimizerState(gradients="keep")`.'
            )
        self._arrived[p] = None
        self._ready.add(p)
        while self._num_sent < len(self._buckets) and self._ready.issuperset(self._buckets[self._num_sent]):
            self._send_next()

    def finish(self) -> None:
        """Exchange what is left at the end of a backward.

        Raises:
            RuntimeError: a parameter has no gradient here, and `finds_unused` is false.
        """
        while self._num_sent < len(self._buckets):
            self._send_next()
        self._receive()
        self._num_sent = 0
        if self._unused and not self._finds_unused:
            raise RuntimeError(
                f"{len(self._unused)} of {len(self._parameters)} parameters had no gradient in a backward. As under "
                'DDP, that needs `Trainer(strategy="ddp_find_unused_parameters_true")`.'
            )
        if self._finds_unused and self._parameters:
            self._use_those_of_others()
        if self._is_first:
            self._order_as_rank_0()
        self._arrived.clear()

    def _send_next(self) -> None:
        bucket = self._buckets[self._num_sent]
        self._num_sent += 1
        gradients = [dense_gradient(p) for p in bucket]
        for p in bucket:
            p.grad = None
        flat = torch.cat([g.flatten() for g in gradients]) if len(gradients) > 1 else gradients[0].flatten()
        del gradients
        work = dist.all_reduce(flat.div_(dist.get_world_size(self._group)), group=self._group, async_op=True)
        self._receive()
        self._on_its_way = bucket, flat, work

    def _receive(self) -> None:
        if self._on_its_way is None:
            return
        bucket, flat, work = self._on_its_way
        self._on_its_way = None
        if work is not None:
            work.wait()
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = mean.view_as(p)
            if p in self._ready:
                self._ready.remove(p)
                self.use(p)
            else:
                self._unused.add(p)

    def _use_those_of_others(self) -> None:
        """Use averages of gradients that other processes have; what no process has, stays without."""
        flags = [p not in self._unused for p in self._parameters]
        found = in_any_process(flags, self._parameters[0].device, self._group)
        for p, is_used in zip(self._parameters, found, strict=True):
            if p in self._unused and is_used:
                self.use(p)
            p.grad = None
        self._unused.clear()

    def _order_as_rank_0(self) -> None:
        numbers = {p: number for number, p in enumerate(self._parameters)}
        order = self._broadcast([numbers[p] for p in self._arrived])
        rest = sorted(set(numbers.values()).difference(order), reverse=True)
        self._buckets = in_buckets([self._parameters[number] for number in [*order, *rest]], self._bucket_bytes)
        self._is_first = False


def default_bucket_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the largest size of a bucket: a 64th of all gradients, from 1 to 25 MiB."""
    total = sum(p.nbytes for p in parameters)
    return min(_LARGEST_BUCKET, max(_SMALLEST_BUCKET, total // _NUM_BUCKETS))


def in_buckets(tensors: Iterable[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Return neighbours of one dtype and device together, up to a number of bytes.

    >>> [len(bucket) for bucket in in_buckets([torch.zeros(2), torch.zeros(1), torch.zeros(9)], 12)]
    [2, 1]
    """
    buckets: list[list[Tensor]] = []
    for tensor in tensors:
        latest = buckets[-1] if buckets else []
        fits = sum(t.nbytes for t in latest) + tensor.nbytes <= max_bytes
        if latest and fits and (latest[0].dtype, latest[0].device) == (tensor.dtype, tensor.device):
            latest.append(tensor)
        else:
            buckets.append([tensor])
    return buckets


def send_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Give every process the values of the first.

    Raises:
        RuntimeError: an expanded tensor, whose elements share memory.
    """
    present = sorted((t.detach() for t in tensors if t.numel()), key=lambda t: (str(t.dtype), str(t.device)))
    for bucket in in_buckets(present, _LARGEST_BUCKET):
        flat = torch.cat([t.flatten() for t in bucket])  # memory of its own, without holes
        dist.broadcast(flat, group=group, group_src=0)
        for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(values.view_as(tensor))


def exchanged_bytes(module: nn.Module, bucket_bytes: int | None = None) -> int:
    """Return the most bytes that an exchange takes beyond a process alone, where gradients come in rank 0's order.

    A bucket fills, another is copied, and a third is on its way.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    buckets = in_buckets(parameters, bucket_bytes or default_bucket_bytes(parameters))
    return 3 * max((sum(p.nbytes for p in bucket) for bucket in buckets), default=0)


def dense_gradient(p: Tensor) -> Tensor:
    """Return the gradient of `p`, zeros where it has none."""
    if p.grad is None:
        return torch.zeros_like(p, dtype=p.grad_dtype)
    return p.grad.to_dense() if p.grad.is_sparse else p.grad  # processes differ in the rows that they have


def in_any_process(flags: list[bool], device: torch.device, group: dist.ProcessGroup | None = None) -> list[bool]:
    """Return which flags are true in any process; in a prediction this one is alone."""
    if dist.get_backend(group) == "fake":
        return flags
    found = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return list(map(bool, found.tolist()))
