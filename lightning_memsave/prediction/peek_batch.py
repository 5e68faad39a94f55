"""The first training batch, before the run takes it: nothing that the run draws or reads moves on."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset

from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import Batch, loaders_of
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.techniques.microbatching import UnsplittableBatchError, batch_size

_REMEDY = "Plan before with `plan_training(module, batch, MemSave(budget=...))` and train with `MemSave(plan)`."


def first_batch(trainer: L.Trainer) -> Any:
    """Return what the first `training_step` of this run will get, or one like it, on the CPU.

    Loaders are asked for once more, and read by one worker where they have some; random states come back.

    Raises:
        ValueError: the loader is an iterator, of which a batch would be missing afterwards, or it is empty.
    """
    return first_batches(trainer, 1)[0]


def largest_first_batch(trainer: L.Trainer) -> Any:
    """Return the first batch of the process whose has most bytes; as `first_batch`, asked for in every process."""
    batch = first_batch(trainer)
    if trainer.world_size == 1:
        return batch
    sizes = [0] * trainer.world_size
    dist.all_gather_object(sizes, sum(tensor.nbytes for tensor in tensors_in(batch)))
    return batch if len(set(sizes)) == 1 else trainer.strategy.broadcast(batch, src=sizes.index(max(sizes)))


def first_batches(trainer: L.Trainer, most: int, setting: str = "budget", remedy: str = _REMEDY) -> list[Any]:
    """Return what the first `most` steps of this run will get, or fewer where there are not so many; as `first_batch`.

    Raises:
        ValueError: as `first_batch`, which names `setting` and `remedy`.
    """
    found = loaders_of(trainer)
    with Randomness.untouched(), contextlib.ExitStack() as stack:
        loaders, structure = tree_flatten(getattr(found, "iterables", found))  # of a CombinedLoader
        for loader in loaders:
            stack.enter_context(_as_it_was(loader))
        each = [_first_of(loader, most, setting, remedy) for loader in loaders]
        return [tree_unflatten(list(batches), structure) for batches in zip(*each, strict=False)]


def samples_per_batch(trainer: L.Trainer) -> int | None:
    """Return the samples that the loaders of this run name; else those of the first batch, where it can be read."""
    with Randomness.untouched():
        found = loaders_of(trainer)
    loaders, _ = tree_flatten(getattr(found, "iterables", found))
    sizes: list[Any] = [getattr(loader, "batch_size", None) for loader in loaders]
    if sizes and all(isinstance(size, int) for size in sizes):
        return int(sum(sizes))
    with contextlib.suppress(ValueError):
        return samples_of(first_batch(trainer))
    return None


def estimated_batches(trainer: L.Trainer) -> int | None:
    """Return how many batches the fit takes, as far as `Trainer` and loaders tell; `None` where they do not."""
    with Randomness.untouched():
        found = loaders_of(trainer)
    lengths = [len(loader) for loader in tree_flatten(getattr(found, "iterables", found))[0] if _has_length(loader)]
    limit = trainer.limit_train_batches
    per_epoch = [int(limit * length) if isinstance(limit, float) else min(limit, length) for length in lengths]
    num_epochs = trainer.max_epochs or -1
    epochs = max(per_epoch) * num_epochs if per_epoch and num_epochs > 0 else None
    steps = trainer.max_steps * trainer.accumulate_grad_batches if trainer.max_steps > 0 else None
    return min((each for each in (epochs, steps) if each is not None), default=None)


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False


def samples_of(batch: Batch) -> int | None:
    """Return the number of samples of a batch; `None` where it does not tell."""
    with contextlib.suppress(UnsplittableBatchError):
        return batch_size(batch)
    return None


def _first_of(loader: Any, most: int, setting: str, remedy: str) -> list[Any]:
    iterator = _iterator_of(loader) if isinstance(loader, DataLoader) else iter(loader)
    if iterator is loader:
        raise setting_error(setting, "needs data that can be read from the start again", type(loader).__name__, remedy)
    batches = list(itertools.islice(iterator, most))
    if not batches:
        raise setting_error(setting, "needs a batch to plan from", "a loader without any", remedy)
    return batches


def _iterator_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the iterator of a copy of a loader, as persistent workers would stay with the loader itself.

    Where items have indices it has one worker. It has one at all because a dataset may need it: a file that this
    process had opened would be shared by all that it starts.
    """
    loader = copy.copy(loader)
    vars(loader)["_iterator"] = None
    if loader.num_workers:
        vars(loader).update(persistent_workers=False, pin_memory=False)
        if not isinstance(loader.dataset, IterableDataset):  # of which workers share out the items
            vars(loader).update(num_workers=1, prefetch_factor=1)
    # A subclass may hold an iterator of its own, which the run takes.
    keeps_one = any(isinstance(value, Iterator) for value in vars(loader).values())
    return DataLoader.__iter__(loader) if keeps_one else iter(loader)


@contextlib.contextmanager
def _as_it_was(loader: Any) -> Iterator[None]:
    """Restore the attributes of a loader and its samplers, and the generators that they hold."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if g is not None}
    states = [(generator, generator.get_state()) for generator in found.values()]
    attributes = [(vars(owner), dict(vars(owner))) for owner in owners if hasattr(owner, "__dict__")]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for now, before in attributes:
            now.clear()
            now.update(before)
