"""Memory that storages get and lose beside any operation."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memsave import Ledger
from lightning_memsave.measuring.storage_resizing import resizes_seen


def test_torch_is_as_before_afterwards():
    before = torch.UntypedStorage.resize_
    with Ledger(), resizes_seen(lambda _: None):
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


def test_watchers_may_leave_in_any_order():
    storage, seen = torch.ones(4).untyped_storage(), []
    first, second = (
        resizes_seen(lambda s: seen.append(("first", s.nbytes()))),
        resizes_seen(lambda s: seen.append(("second", s.nbytes()))),
    )
    first.__enter__()
    second.__enter__()
    storage.resize_(0)
    first.__exit__(None, None, None)
    assert storage.resize_(8) is storage
    second.__exit__(None, None, None)
    storage.resize_(4)
    assert seen == [("first", 0), ("second", 0), ("second", 8)]


def test_what_was_there_without_memory_counts_while_it_has_some():
    parameter, x = torch.empty(256), torch.ones(256)
    parameter.untyped_storage().resize_(0)
    with Ledger().watching(nn.Module(), batch=x) as ledger:
        parameter.untyped_storage().resize_(1024)
        y = x * parameter.fill_(2)
        parameter.untyped_storage().resize_(0)
        assert ledger.live_bytes == 2 * 1024
        del y
    assert ledger.measurement.peak_bytes == 3 * 1024
    assert ledger.measurement.by_category["weights"] == 0  # of a module without shards


def test_what_an_operation_made_is_the_same_when_it_has_its_memory_back():
    x = torch.ones(256, requires_grad=True)
    with Ledger().watching(nn.Module(), batch=x) as ledger:
        y = x.exp()  # kept for backward
        kept = y.detach().tolist()
        y.untyped_storage().resize_(0)
        assert ledger.live_bytes == 1024
        y.untyped_storage().resize_(1024)
        y.data.copy_(torch.tensor(kept))
        y.sum().backward()
    assert ledger.measurement.by_category["activations"] >= 1024
    torch.testing.assert_close(x.grad, y.detach())
