"""The replay of CUDA's allocator over several steps."""

from __future__ import annotations

import pytest

from lightning_memsave.core.units import MIB
from lightning_memsave.measuring.allocation_trace import Allocations
from lightning_memsave.simulation.caching_allocator import replay


@pytest.mark.parametrize(("size", "segment"), [(10 * MIB, 10 * MIB), (11 * MIB, 12 * MIB), (11 * MIB + 1, 12 * MIB)])
def test_a_gradient_takes_the_place_of_the_one_before(size, segment):
    """Also where its block is larger than it, as the rest of a segment is too small to be cut off."""
    step = Allocations((size,), ((-size, 0), (size, 1)))
    assert replay(step).reserved_bytes == segment
    assert replay(step).allocated_bytes == segment
    together = Allocations((size,), ((size, 1), (-size, 0)))
    assert replay(together).reserved_bytes == 2 * segment
