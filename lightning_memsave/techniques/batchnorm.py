"""BatchNorm in parts of a batch: what to normalise by, and one update of the running statistics per batch.

A BatchNorm that sees a microbatch, or a tile, does not see its batch. Two ways out, neither of them equal to the whole
batch:

* `"ghost"`: normalise by the microbatch's own statistics (Hoffer, Hubara, Soudry, "Train longer, generalize better",
  2017, https://arxiv.org/abs/1705.08741, where such ghost batches even helped). Fails for very few samples.
* `"running"`: normalise by the running statistics, as in evaluation; no gradient flows through them. The same for every
  size of microbatch. (Ioffe, "Batch Renormalization", 2017, https://arxiv.org/abs/1702.03275, with r and d unbounded,
  has these outputs; it differentiates through the statistics of the microbatch, though.)

Either way the running statistics are updated once per batch, by the statistics of all its microbatches together: with
counts n_i, means m_i and sums of squared deviations s_i, the mean is m = sum n_i m_i / n, and the deviations from it
are sum s_i + n_i (m_i - m)^2 (Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979). They are merged as they come, so that a hundred microbatches hold no more than two.

The hooks are compiled with the block that a layer is in, so this file is in no room that Dynamo is told to skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_memsave.torch_internals.autograd_graph import autograd_is_running

Mode = Literal["ghost", "running"]


class _Moments(NamedTuple):
    """Moments of some values, per channel."""

    num_values: int
    mean: Tensor
    deviations: Tensor
    """The sum of their squares."""

    def with_more(self, other: _Moments) -> _Moments:
        """Return the moments of the values of both."""
        total = self.num_values + other.num_values
        apart = other.mean - self.mean
        deviations = self.deviations + other.deviations + apart.square() * (self.num_values * other.num_values / total)
        return _Moments(total, self.mean + apart * (other.num_values / total), deviations)


class PooledStatistics:
    """The running statistics of one BatchNorm during one batch.

    Args:
        module: in training mode, with running statistics.
        mode: what it normalises by.
    """

    def __init__(self, module: Any, mode: Mode) -> None:
        self.module, self._mode, self._momentum = module, mode, module.momentum
        # Of sums, which 16 bits cannot hold.
        self._dtype = torch.promote_types(module.running_mean.dtype, torch.float32)
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers(recurse=False)]
        # For each call within a microbatch (a shared module has several): what all microbatches so far showed.
        self._seen: list[_Moments] = []
        self.num_calls: int | None = None
        """Calls in this microbatch so far; `None` while calls do not count."""
        self._is_evaluated_for_us = False
        if mode == "ghost":
            module.momentum = 1.0  # the running statistics are then those of the latest call
            self._handles = [module.register_forward_hook(self._see, with_kwargs=True)]
        else:
            self._handles = [
                module.register_forward_pre_hook(self._evaluate, with_kwargs=True),
                module.register_forward_hook(self._train_again, always_call=True),
            ]

    # Not compiled with the block that the layer is in: a change of mode would compile that anew for each batch.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _evaluate(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training:  # else the user's own `eval()`, as for layers that are frozen
            self._see(module, args, kwargs)
            module.training, self._is_evaluated_for_us = False, True

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def _train_again(self, module: Any, args: Any, output: Any) -> None:
        if self._is_evaluated_for_us:
            module.training, self._is_evaluated_for_us = True, False

    @torch.no_grad()
    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        # Where a backward goes on inside, a region is computed again; compiled blocks have no such backward.
        is_repeated = not torch.compiler.is_compiling() and autograd_is_running()
        if self.num_calls is None or not module.training or is_repeated:
            return
        x = (args[0] if args else kwargs["input"]).detach()  # [N, C, ...]
        count = x.numel() // x.shape[1]
        if self._mode == "ghost":
            mean = module.running_mean.to(self._dtype, copy=True)
            deviations = (count - 1) * module.running_var.to(self._dtype)
        else:
            x = x.to(self._dtype)
            variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
            deviations = count * variance
        seen = _Moments(count, mean, deviations)
        if self.num_calls == len(self._seen):
            self._seen.append(seen)
        else:
            self._seen[self.num_calls] = self._seen[self.num_calls].with_more(seen)
        self.num_calls += 1

    def close(self, update: bool) -> None:
        """Give the module back, its running statistics updated as by one call with all samples, or as they were."""
        for handle in self._handles:
            handle.remove()
        self.module.momentum = self._momentum
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
            for seen in self._seen if update else ():
                self._update(seen)

    def _update(self, seen: _Moments) -> None:
        module = self.module
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        # `momentum=None` is a cumulative average.
        momentum = 1 / float(module.num_batches_tracked) if self._momentum is None else self._momentum
        variance = seen.deviations / max(seen.num_values - 1, 1)
        for buffer, value in ((module.running_mean, seen.mean), (module.running_var, variance)):
            buffer.copy_(buffer.to(self._dtype).lerp(value, momentum))


class PooledBatchNorms:
    """All BatchNorms of a model during one batch."""

    def __init__(self, pools: list[PooledStatistics]) -> None:
        self.pools = pools

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Count calls inside as those of a microbatch; for its forward, not for its backward, which may repeat it."""
        for pool in self.pools:
            pool.num_calls = 0
        try:
            yield
        finally:
            for pool in self.pools:
                pool.num_calls = None


class _WithinMicrobatch(PooledBatchNorms):
    """BatchNorms during a call in slices within a microbatch: the calls on all slices count as the same calls."""

    def __init__(self, pools: list[PooledStatistics]) -> None:
        super().__init__(pools)
        self._starts = [pool.num_calls for pool in pools]

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Count calls inside from where the call in slices began."""
        for pool, start in zip(self.pools, self._starts, strict=True):
            pool.num_calls = start
        yield


_ACTIVE: ContextVar[PooledBatchNorms] = ContextVar("active_batchnorms", default=PooledBatchNorms([]))  # noqa: B039


@contextmanager
def unpooled() -> Iterator[None]:
    """Run a forward that is none of the batch's: what BatchNorms see inside is not counted."""
    pools = _ACTIVE.get().pools
    num_calls = [pool.num_calls for pool in pools]
    for pool in pools:
        pool.num_calls = None
    try:
        yield
    finally:
        for pool, before in zip(pools, num_calls, strict=True):
            pool.num_calls = before


@contextmanager
def pooled_batchnorm(model: nn.Module, mode: Mode = "ghost", warmup: int = 0) -> Iterator[PooledBatchNorms]:
    """Update running statistics of active BatchNorms once, at the end, around all microbatches of a batch.

    Args:
        model: what is trained.
        mode: what to normalise by.
        warmup: for `"running"`, batches that a module must have seen before; until then it is `"ghost"`.

    Example:
        >>> norm, x = nn.BatchNorm1d(3), torch.randn(8, 3)
        >>> with pooled_batchnorm(norm) as batch:
        ...     for part in x.split(2):
        ...         with batch.microbatch():
        ...             y = norm(part)
        >>> torch.allclose(norm.running_mean, 0.1 * x.mean(0)), int(norm.num_batches_tracked)
        (True, 1)
    """
    pools: list[PooledStatistics] = []
    updates, batch = False, PooledBatchNorms(pools)
    token = _ACTIVE.set(batch)
    try:
        for module in model.modules():
            if pools_statistics(module):
                num_batches: Any = module.num_batches_tracked
                is_warm = num_batches is None or int(num_batches) >= warmup
                pools.append(PooledStatistics(module, mode if is_warm else "ghost"))
        yield batch
        updates = True
    finally:
        _ACTIVE.reset(token)
        for pool in pools:
            pool.close(updates)


@contextmanager
def pooled_slices(module: nn.Module) -> Iterator[PooledBatchNorms]:
    """Update running statistics once for a call of `module` in slices, each of which is a `microbatch()`."""
    inside = set(module.modules())
    pools = [pool for pool in _ACTIVE.get().pools if pool.module in inside]
    if pools:
        yield _WithinMicrobatch(pools)
    else:
        with pooled_batchnorm(module) as batch:
            yield batch


def pools_statistics(module: nn.Module) -> bool:
    """Return whether this is an active BatchNorm with running statistics of its own.

    SyncBatchNorm's are those of all processes, and are left to it.
    """
    return (
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.training
        and module.track_running_stats  # Lightning freezes by it, and leaves the statistics in place
        and module.running_mean is not None
        and not nn.parameter.is_lazy(module.running_mean)
    )
