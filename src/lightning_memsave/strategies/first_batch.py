"""The first training batch, before the run takes it: nothing that the run draws or reads moves on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_memsave.core.errors import setting_error
from lightning_memsave.strategies.namespaces import loaders_of
from lightning_memsave.strategies.random_state import random_state_kept

_REMEDY = "Plan before with `plan_training(module, batch, MemSave(budget=...))` and train with `MemSave(plan)`."


def first_batch(trainer: Any) -> Any:
    """What the first `training_step` of this run will get, or one like it, on the CPU.

    Loaders are asked for once more, and read without workers; random states come back.

    Raises:
        ValueError: the loader is an iterator, of which a batch would be missing afterwards, or it is empty.
    """
    found = loaders_of(trainer)
    with random_state_kept(), contextlib.ExitStack() as stack:
        loaders, structure = tree_flatten(getattr(found, "iterables", found))  # of a CombinedLoader
        for loader in loaders:
            stack.enter_context(_generators_of(loader))
        return tree_unflatten([_first_of(loader) for loader in loaders], structure)


def _first_of(loader: Any) -> Any:
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.dataset, IterableDataset):
        with contextlib.suppress(StopIteration):
            return _collated(loader)
    # A copy: persistent workers would stay with the loader.
    iterator = iter(copy.copy(loader) if isinstance(loader, DataLoader) else loader)
    if iterator is loader:
        raise setting_error(
            "budget", "needs data that can be read from the start again", type(loader).__name__, _REMEDY
        )
    try:
        return next(iterator)
    except StopIteration:
        raise setting_error("budget", "needs a batch to plan from", "a loader without any", _REMEDY) from None


def _collated(loader: DataLoader[Any]) -> Any:
    """The first batch of a loader, made here: its workers are not started for one batch."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed of workers comes first
    if loader.batch_sampler is None:
        return loader.collate_fn(loader.dataset[next(iter(loader.sampler))])
    indices = next(iter(loader.batch_sampler))
    return loader.collate_fn([loader.dataset[index] for index in indices])


@contextlib.contextmanager
def _generators_of(loader: Any) -> Iterator[None]:
    """The generators that a loader and its samplers hold leave as they came."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if g is not None}
    states = [(generator, generator.get_state()) for generator in found.values()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
