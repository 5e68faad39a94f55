"""Measuring memory: the ledger (bytes by category), the meter (which steps), verification, the allocator's counters."""

from lightning_memsave.measuring.ledger import Ledger, Measurement
from lightning_memsave.measuring.meter import Meter
from lightning_memsave.measuring.profiler_peak import allocation_peak

__all__ = ["Ledger", "Measurement", "Meter", "allocation_peak"]
