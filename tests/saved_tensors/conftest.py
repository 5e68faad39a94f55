"""Fixtures of the loss that is computed in chunks."""

from __future__ import annotations

import pytest

from lightning_memsave.saved_tensors import deferred_logits
from lightning_memsave.saved_tensors import linear_cross_entropy as module

from .head_nets import BATCH, TIME


@pytest.fixture(params=[True, False], ids=["deferred", "computed"])
def is_deferred(request, monkeypatch):
    """Whether a head's logits wait until somebody reads them."""
    if not request.param:
        monkeypatch.setattr(deferred_logits, "MIN_RATIO", 2**40)
    return request.param


@pytest.fixture
def calls(monkeypatch, is_deferred):
    """The shapes of the inputs whose loss was answered."""
    seen, forward = [], module._LinearCrossEntropy.forward

    def counted(ctx, rows, *args):
        seen.append(tuple(rows.shape))
        return forward(ctx, rows, *args)

    monkeypatch.setattr(module._LinearCrossEntropy, "forward", counted)
    return seen


@pytest.fixture(params=[2**18, 7 * BATCH * TIME], ids=["at once", "7 classes at a time"])
def chunk_numel(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK_NUMEL, "cpu", request.param)
