"""Memory that is given to a storage, or taken from it, beside any operation: FSDP2 does so with gathered parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_watchers: list[Callable[[torch.UntypedStorage], None]] = []
_before = torch.UntypedStorage.resize_


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
    global _before
    if not _watchers:
        _before = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign, assignment]  # torch has no hook
    _watchers.append(by)
    try:
        yield
    finally:
        _watchers.remove(by)
        if not _watchers:
            torch.UntypedStorage.resize_ = _before  # type: ignore[method-assign]  # as it was


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    _before(storage, size)
    for watcher in _watchers:
        watcher(storage)
    return storage
