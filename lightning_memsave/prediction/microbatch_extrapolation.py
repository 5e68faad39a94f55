"""A few microbatches stand for a batch that is cut: what their step takes, and what the other samples would add."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from lightning_memsave.core.errors import BudgetTooSmallError
from lightning_memsave.core.units import parse_bytes
from lightning_memsave.lightning_compat import Batch
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.microbatching import Microbatching, UnsplittableBatchError, batch_size
from lightning_memsave.techniques.microbatching.split import even_sizes
from lightning_memsave.techniques.registry import Config

T = TypeVar("T")
_NOTED_BYTES = 64  # losses and logs of a microbatch, more than they are


class Shown(NamedTuple):
    """The first microbatches of a batch."""

    num_samples: int
    num_left_out: int
    """Number of microbatches that are not among them."""


def first_microbatches(techniques: Sequence[Config], batch: Batch, least: int = 0) -> Shown | None:
    """Return the microbatches that show the peak of a cut batch: two, as later ones meet what the second meets.

    Args:
        techniques: that are on.
        batch: all of it.
        least: number of samples, for which there may be more of them.

    Returns:
        `None`: all.
    """
    config = next((t for t in techniques if isinstance(t, Microbatching)), None)
    if config is None or config.size == "auto" or config.split_fn is not None:
        return None
    try:
        num_samples = batch_size(batch)
    except UnsplittableBatchError:
        return None
    sizes = even_sizes(num_samples, config.size) if num_samples else []
    sums = list(itertools.accumulate(sizes))
    num_used = next((number for number in range(2, len(sizes)) if sums[number - 1] >= least), None)
    return None if num_used is None else Shown(sums[num_used - 1], len(sizes) - num_used)


def rest_bytes(batch: Batch, shown: Shown) -> int:
    """Return what the samples of a batch that are not used would add.

    Their bytes, and what is noted of their microbatches.

    Args:
        batch: all of it.
        shown: what is used.
    """
    total = sum(tensor.nbytes for tensor in tensors_in(batch))
    return total - total * shown.num_samples // batch_size(batch) + _NOTED_BYTES * shown.num_left_out


class Few(NamedTuple):
    """A few of many microbatches."""

    sizes: list[int]
    """Numbers of samples, the larger ones first."""
    more: list[tuple[int, int]]
    """Sizes of which there are more, and how many."""


def few_of_many(sizes: Sequence[int]) -> Few | None:
    """Return three or four microbatches that show what all take, if steps with one more of each size show the rest.

    Args:
        sizes: numbers of samples, as `even_sizes` returns them.

    Returns:
        `None` where that would run more than half as many microbatches as there are.

    >>> few_of_many([4] * 23 + [3] * 5)
    Few(sizes=[4, 4, 4, 3], more=[(4, 20), (3, 4)])
    >>> few_of_many([4] * 13)
    """
    sizes_left, few = Counter(sizes), list[int]()
    for size, num in Counter(sizes).items():
        few += [size] * min(num, max(1, 3 - len(few)))
    sizes_left.subtract(few)
    more = [(size, num) for size, num in sizes_left.items() if num]
    num_run = len(few) + len(more) * (len(few) + 1)
    return Few(few, more) if 0 < 2 * num_run <= len(sizes) else None


def as_if_whole(predict: Callable[[Sequence[Config]], T], techniques: Sequence[Config], missing_bytes: int) -> T:
    """Predict with a part of a batch: budgets of regions are the run's, so they are less what is missing.

    Raises:
        BudgetTooSmallError: with the smallest that the run could meet.
    """

    def less(config: Config) -> Config:
        if not isinstance(config, Checkpointing) or config.budget is None or isinstance(config.budget, float):
            return config
        return dataclasses.replace(config, budget=max(1, parse_bytes("budget", config.budget) - missing_bytes))

    try:
        return predict([less(config) for config in techniques])
    except BudgetTooSmallError as error:
        error.lowest_bytes += missing_bytes
        raise
