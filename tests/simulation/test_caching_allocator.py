"""The replay of CUDA's allocator over several steps."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.core.units import MIB
from lightning_memsave.measuring.allocation_trace import Allocations
from lightning_memsave.simulation.caching_allocator import cublas_workspaces, replay


@pytest.mark.parametrize(("size", "segment"), [(10 * MIB, 10 * MIB), (11 * MIB, 12 * MIB), (11 * MIB + 1, 12 * MIB)])
def test_a_gradient_takes_the_place_of_the_one_before(size, segment):
    """Also where its block is larger than it, as the rest of a segment is too small to be cut off."""
    step = Allocations((size,), ((-size, 0), (size, 1)))
    assert replay(step).reserved_bytes == segment
    assert replay(step).allocated_bytes == segment
    together = Allocations((size,), ((size, 1), (-size, 0)))
    assert replay(together).reserved_bytes == 2 * segment


def test_what_lasts_comes_first_and_is_never_given_back():
    step = Allocations((10 * MIB,), ((30 * MIB, 1), (-30 * MIB, 1)))
    plain, found = replay(step), replay(step, lasting=(32 * MIB, 32 * MIB))
    assert found.allocated_bytes == plain.allocated_bytes + 64 * MIB
    assert found.reserved_bytes == plain.reserved_bytes + 64 * MIB


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("", 32 * MIB), (":4096:2:16:8", 1024 * (2 * 4096 + 8 * 16)), (":16:8", 128 * 1024), ("nonsense", 32 * MIB)],
)
def test_the_workspace_of_cublas_is_what_its_setting_says(monkeypatch, setting, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    assert cublas_workspaces() == (expected, expected)


def test_gpus_before_hopper_have_a_smaller_workspace(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, size in (((8, 0), 8_519_680), ((9, 0), 32 * MIB)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert cublas_workspaces() == (size, size)
