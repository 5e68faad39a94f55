"""Fixtures of the tests of strategies."""

import pytest

from lightning_memsave.strategies import mixin, recovery


@pytest.fixture
def lines(monkeypatch):
    """What is told to people."""
    told = []
    monkeypatch.setattr(mixin, "rank_zero_info", told.append)
    monkeypatch.setattr(recovery, "_tell", told.append)
    return told
