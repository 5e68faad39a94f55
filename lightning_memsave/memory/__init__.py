"""Measuring memory: the ledger (bytes by category), the meter (which steps), verification, the allocator's counters."""

from lightning_memsave.memory.ledger import Ledger, Measurement
from lightning_memsave.memory.meter import Meter
from lightning_memsave.memory.verify import allocation_peak

__all__ = ["Ledger", "Measurement", "Meter", "allocation_peak"]
