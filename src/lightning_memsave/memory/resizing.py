"""Memory that is given to a storage, or taken from it, beside any operation: FSDP2 does so with gathered parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_watchers: list[Callable[[torch.UntypedStorage], None]] = []


@contextmanager
def resizes_seen(by: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `by` with every storage whose size was changed by `storage.resize_`.

    Example:
        >>> tensor, sizes = torch.ones(2), []
        >>> with resizes_seen(lambda storage: sizes.append(storage.nbytes())):
        ...     _ = tensor.untyped_storage().resize_(0)
        >>> sizes
        [0]
    """
    if not _watchers:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]  # torch has no hook
    _watchers.append(by)
    try:
        yield
    finally:
        _watchers.remove(by)
        if not _watchers:
            torch.UntypedStorage.resize_ = _BEFORE  # type: ignore[method-assign]  # as it was


_BEFORE = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    _BEFORE(storage, size)
    for watcher in _watchers:
        watcher(storage)
    return storage
