"""Microbatching: the same step on a few samples at a time.

What shrinks: activations and the temporaries of forward and backward, by the ratio of microbatch to batch. Weights,
gradients and optimizer state stay. For n samples in k microbatches of sizes n_i, a loss that is a mean over samples
obeys L = sum_i (n_i / n) L_i, so the weighted gradients of the parts add up to the gradient of the whole, and the
optimizer steps once: nothing but the order of additions changes.

Loss class: `exact`, with two exceptions that no weighting can mend. Active BatchNorm normalises by the statistics of
the microbatch and updates its running statistics k times; active dropout draws other masks. Then it is `changed`, and
the modules are named.

Bytes: n_i / n of the activations for each sample's share; time: the same operations in smaller pieces.

Source: gradient accumulation is folklore. Huang et al., "GPipe", 2019 (https://arxiv.org/abs/1811.06965) names the
microbatch; Sohoni et al., "Low-Memory Neural Network Training", 2019 (https://arxiv.org/abs/1904.10631) uses it for
memory on one device. Different here: uneven sizes, sum losses, token weights, logs and metrics are exact as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import nn

from lightning_memsave.core.errors import check_unused, setting_error
from lightning_memsave.core.units import parse_bytes
from lightning_memsave.techniques.batchnorm import PooledBatchNorms, pooled_batchnorm
from lightning_memsave.techniques.microbatching.reduction import LabelCount, ReductionRule
from lightning_memsave.techniques.microbatching.split import (
    UnsplittableBatchError,
    batch_size,
    refuse_list_of_alike,
    split,
)

__all__ = [
    "LabelCount",
    "Microbatching",
    "UnsplittableBatchError",
    "batch_size",
    "microbatches",
    "split",
]


_OF_RECOVERY = "start goal growth_interval headroom_fraction max_bytes keeps_gradients"


@dataclass(frozen=True, kw_only=True)
class Microbatching:
    """Settings of microbatching.

    Raises:
        ValueError: a size below 1, an unknown choice, a number out of its range, or settings that nothing would read.
    """

    size: int | Literal["auto"] = "auto"
    """Samples whose activations may live at once; sizes of the parts differ by at most one. `"auto"`: all of them until
    memory runs out; then the same batch is run again with less, exact measures first, then half the samples."""
    start: int | None = None
    """Samples per microbatch to begin with, under `"auto"`; `None`: whole batches, or one sample with
    `goal="smallest"` (two where BatchNorm needs them)."""
    goal: Literal["fit", "smallest"] = "fit"
    """Goal of `"auto"`. `"fit"`: microbatches as large as memory allows. `"smallest"`: as small as lowers the peak;
    they are doubled after a measured step as long as activations and temporaries take less than half of what is held
    anyway."""
    reduction: Literal["auto", "mean", "sum"] = "auto"
    """How the loss depends on the batch. `"auto"` evaluates it on a few samples and on parts of them, in the first
    batch and now and then: a mean over samples, over labels that are not -100 or over unmasked tokens, or a sum. A
    loss that is none of these is run whole, with a warning."""
    weight_fn: Callable[[Any], float] | None = None
    """The weight of a (micro)batch in a mean, when it is not its number of samples: for example its unpadded tokens,
    `LabelCount()`. It is tried whether losses add up; where they do not, the loss class is `changed`."""
    split_fn: Callable[[Any, int], list[Any]] | None = None
    """Cuts (batch, size) into a list of microbatches, for batches whose structure does not tell."""
    strict: bool = False
    """Raise, instead of warning, when microbatches would change the result (active BatchNorm or dropout). Recovery then
    does not run modules with BatchNorm in tiles either."""
    batchnorm: Literal["ghost", "running"] = "ghost"
    """What active BatchNorm normalises a microbatch by: `"ghost"`, its own statistics; `"running"`, the running
    statistics, after `batchnorm_warmup` batches, which is the same for every size of microbatch. Either way the running
    statistics are updated once per batch, by those of all its microbatches together."""
    batchnorm_warmup: int = 100
    """Batches of `"ghost"` before `batchnorm="running"`: the running statistics must mean something first."""
    growth_interval: int | None = 500
    """Batches under `"auto"` that must go well before microbatches are doubled; twice as many after each failure of
    that. `None`: they stay small."""
    headroom_fraction: float = 0.1
    """Fraction of the device's memory that growth leaves free under `"auto"`, on devices that tell."""
    max_bytes: int | str | None = None
    """Peak under `"auto"` above which a measured step is held to be too large, as if memory had run out: for
    devices that never say so. The step itself has been taken; what follows takes less, unless weights, gradients and
    optimizer state alone are above it."""
    keeps_gradients: bool = True
    """Whether, under `"auto"`, a batch that adds to gradients of earlier ones (accumulation) starts with a copy of
    these, without which it cannot be run again. Where `"auto"` is only the default, and in plans, there is none."""

    def __post_init__(self) -> None:
        is_number = isinstance(self.size, int) and not isinstance(self.size, bool) and self.size > 0
        if not is_number and self.size != "auto":
            raise setting_error(
                "microbatch", 'must be a positive integer or "auto"', self.size, "Use 1 for single samples."
            )
        if self.reduction not in ("auto", "mean", "sum"):
            raise setting_error(
                "Microbatching.reduction",
                'must be "auto", "mean" or "sum"',
                self.reduction,
                "Use `weight_fn` for others.",
            )
        if self.reduction == "sum":
            check_unused(self, "weight_fn", 'reduction="auto" or "mean"')
        self._check_batchnorm()
        self._check_recovery()

    def _check_batchnorm(self) -> None:
        if self.batchnorm not in ("ghost", "running"):
            raise setting_error(
                "Microbatching.batchnorm", 'must be "ghost" or "running"', self.batchnorm, 'The default is "ghost".'
            )
        if not isinstance(self.batchnorm_warmup, int) or self.batchnorm_warmup < 0:
            raise setting_error(
                "Microbatching.batchnorm_warmup",
                "must be a number of batches",
                self.batchnorm_warmup,
                "Use 0 to normalise by running statistics from the start.",
            )
        if self.batchnorm != "running":
            check_unused(self, "batchnorm_warmup", 'batchnorm="running"')

    def _check_recovery(self) -> None:
        interval = self.growth_interval
        if interval is not None and (not isinstance(interval, int) or interval < 1):
            raise setting_error(
                "Microbatching.growth_interval", "must be a positive integer", interval, "Use `None` to never grow."
            )
        if not 0 <= self.headroom_fraction < 1:
            raise setting_error(
                "Microbatching.headroom_fraction", "must be in [0, 1)", self.headroom_fraction, "The default is 0.1."
            )
        if self.goal not in ("fit", "smallest"):
            raise setting_error("Microbatching.goal", 'must be "fit" or "smallest"', self.goal, 'The default is "fit".')
        if self.start is not None and (not isinstance(self.start, int) or self.start < 1):
            raise setting_error(
                "Microbatching.start", "must be a positive integer", self.start, "Use `None` for whole batches."
            )
        if self.max_bytes is not None:
            parse_bytes("Microbatching.max_bytes", self.max_bytes)
        if self.size != "auto":
            check_unused(self, _OF_RECOVERY, 'size="auto"')

    def of_size(self, size: int) -> Microbatching:
        """Return the same with a number of samples that is fixed, which needs no settings of `"auto"`."""
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in _OF_RECOVERY.split()}
        return replace(self, size=size, **defaults)

    @property
    def rows(self) -> tuple[str, ...]:
        """Its settings with rows of their own in the compatibility table."""
        recovers = ("out-of-memory recovery",) if self.size == "auto" else ()
        if self.goal == "smallest" or self.max_bytes is not None:
            recovers = (*recovers, "microbatches by measured peaks")
        return (*recovers, "running statistics") if self.batchnorm == "running" else recovers

    @classmethod
    def from_shorthand(cls, value: object) -> Microbatching:
        """Return the settings of `microbatch=10` (a size), `"auto"` or `True` (as large as fits), or `"smallest"`."""
        if value is True:
            return cls()
        if value == "smallest":
            return cls(goal="smallest")
        if isinstance(value, int) or value == "auto":
            return cls(size=value)  # checked in __post_init__
        raise setting_error(
            "microbatch",
            'must be a positive integer, "auto", "smallest" or `Microbatching(...)`',
            value,
            "For example `microbatch=10`.",
        )

    def parts(self, batch: Any) -> list[tuple[Any, float]]:
        """The microbatches of `batch`, each with its number of samples (where only `weight_fn` can tell, its weight).

        Raises:
            UnsplittableBatchError: the batch dimension cannot be told and there is no `split_fn`.
        """
        if self.size == "auto":
            return [(batch, 0.0)]
        if self.split_fn is None:
            return list(split(batch, self.size))
        return [(part, self._num_samples(part)) for part in self.split_fn(batch, self.size)]

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples of a batch; with a `split_fn`, as many as it cuts it into.

        Raises:
            UnsplittableBatchError: the batch dimension cannot be told and there is no `split_fn`.
        """
        return batch_size(batch) if self.split_fn is None else len(self.split_fn(batch, 1))

    def try_functions(self, batch: Any) -> None:
        """Call `weight_fn` and `split_fn` now: with `"auto"` they would be needed when memory has run out.

        Raises:
            ValueError: one of them has failed.
        """
        size = 1 if self.size == "auto" else self.size
        for name, function, arguments in (("weight_fn", self.weight_fn, ()), ("split_fn", self.split_fn, (size,))):
            try:
                if function is not None:
                    function(batch, *arguments)
            except UnsplittableBatchError:
                pass  # which is an answer: the batch is run whole
            except Exception as error:
                raise setting_error(
                    f"Microbatching.{name}",
                    "must work with the batches of the run",
                    f"{type(error).__name__}: {error}",
                    "It failed for the first of them.",
                ) from error

    def _num_samples(self, part: Any) -> float:
        try:
            return float(batch_size(part))
        except UnsplittableBatchError:
            if self.weight_fn is None:
                raise
            return float(self.weight_fn(part))

    def pooled_batchnorm(self, model: nn.Module, num_parts: int) -> AbstractContextManager[PooledBatchNorms]:
        """Return the context for the microbatches of a batch; with `"ghost"`, a whole batch needs none."""
        if num_parts == 1 and self.batchnorm == "ghost":
            return nullcontext(PooledBatchNorms([]))
        return pooled_batchnorm(model, self.batchnorm, self.batchnorm_warmup)


def why_not_exact(model: nn.Module) -> tuple[str, ...]:
    """Return the modules, by name, that make microbatches differ from the whole batch; empty when there are none."""
    reasons = []
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            reasons.append(f"{name} ({type(module).__name__}: statistics of each microbatch)")
        elif isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            reasons.append(f"{name} ({type(module).__name__}: other masks)")
        elif getattr(module, "dropout", 0) and isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            reasons.append(f"{name} ({type(module).__name__}: other dropout masks)")
        elif isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            reasons.append(f"{name} ({type(module).__name__}: running statistics of each microbatch)")
        elif (known := _CHANGED.get(type(module).__name__)) is not None:
            reasons.append(f"{name} ({type(module).__name__}: {known})")
    return tuple(reasons)


_CHANGED = {
    "DropPath": "other samples",  # timm's, and many models' own
    "StochasticDepth": "other samples",  # torchvision's
    "RReLU": "other slopes",
    "_SpectralNorm": "an iteration for each microbatch",
}
"""Names of classes, some of other packages; what a step draws by itself is seen when it is cut."""


_Active = tuple[Microbatching | None, Callable[[int], None]]
_ACTIVE: ContextVar[_Active] = ContextVar("active_microbatching", default=(None, lambda num_parts: None))


@contextmanager
def active_microbatching(config: Microbatching | None, on_use: Callable[[int], None]) -> Iterator[None]:
    """Make `config` what `microbatches(batch)` uses; the strategy does so around `training_step`.

    Args:
        config: the settings, or `None` for whole batches.
        on_use: called with the number of parts each time a batch is cut.
    """
    token = _ACTIVE.set((config, on_use))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def microbatches(batch: Any, size: int | None = None) -> Iterator[tuple[Any, float]]:
    """Return microbatches with weights, for loops that call backward themselves (manual optimization, plain torch).

    For a loss that is a mean over samples (a sum, with `Microbatching(reduction="sum")`), `backward(loss(part) *
    weight)` for each part gives the gradient of the whole batch.

    Args:
        batch: tensors that share their first dimension, in any nest of containers.
        size: samples per microbatch; by default what `MemSave(microbatch=...)` says, else the whole batch at once.

    Yields:
        The microbatch (views, no copy) and its weight; weights add up to 1, or are 1 each with `reduction="sum"`. One
        without weight is left out.

    Raises:
        UnsplittableBatchError: samples cannot be told, as in a list of alike items: its rows or its items may be them.

    Example:
        >>> import torch
        >>> x = torch.arange(5.0, requires_grad=True)
        >>> for part, weight in microbatches(x, size=2):
        ...     (part.square().mean() * weight).backward()
        >>> torch.equal(x.grad, 2 * x.detach() / 5)
        True
    """
    active, on_use = _ACTIVE.get()
    config = active if size is None else Microbatching(size=size) if active is None else active.of_size(size)
    if config is None:
        yield batch, 1.0
        return
    if config.split_fn is None:
        refuse_list_of_alike(batch)
    parts = config.parts(batch)
    on_use(len(parts))
    rule = ReductionRule("sum" if config.reduction == "sum" else "mean", config.weight_fn)
    for (part, _), weight in zip(parts, rule.weights(parts), strict=True):
        if weight:
            yield part, weight
