import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_memsave.measuring import allocator


class FakeDevice:
    """Counts as `torch.cuda` does; a test stands in for the allocator by setting `now`."""

    def __init__(self):
        self.now, self.peak, self.reserved, self.resets = 0, 0, 0, []

    def is_available(self):
        return False  # what there is to count with, but no clock

    def allocate(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self.reserved = max(self.reserved, -(-self.now // 2**21) * 2**21)

    def reset_peak_memory_stats(self, device):
        self.resets.append(device)
        self.peak = self.now

    def memory_allocated(self, device):
        return self.now

    def memory_reserved(self, device):
        return self.reserved

    def mem_get_info(self, device):
        return 2**30 - self.reserved, 2**30

    def max_memory_allocated(self, device):
        return self.peak

    def max_memory_reserved(self, device):
        return self.reserved


@pytest.fixture
def fake_device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_devices_without_counters(name):
    device = torch.device(name)
    assert not allocator.counts_peaks(device)
    assert allocator.read_peak(device) is None
    assert allocator.read_current(device) is None
    assert allocator.total_bytes(device) is None
    allocator.reset_peak(device)


def test_a_device_module_without_peaks(monkeypatch):
    # As MPS: a module, but no maxima.
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_allocated_memory=lambda: 1))
    assert not allocator.counts_peaks(torch.device("mps"))
    assert allocator.read_peak(torch.device("mps")) is None
    allocator.reset_peak(torch.device("mps"))


def test_peaks_since_the_reset(fake_device):
    device = torch.device("cuda", 0)
    fake_device.allocate(5000)
    fake_device.allocate(-4000)
    allocator.reset_peak(device)
    fake_device.allocate(2000)
    fake_device.allocate(-3000)
    assert allocator.counts_peaks(device)
    assert fake_device.resets == [device]
    assert allocator.read_peak(device) == allocator.AllocatorBytes(allocated_bytes=3000, reserved_bytes=2**21)
    assert allocator.read_current(device) == allocator.AllocatorBytes(
        allocated_bytes=fake_device.now, reserved_bytes=2**21
    )
    assert allocator.total_bytes(device) == 2**30


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_torch_still_has_the_names(kind):
    module = getattr(torch, kind)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        assert callable(getattr(module, name, None)), f"torch.{kind}.{name} has moved"


@pytest.mark.gpu
def test_a_real_device():
    device = torch.device("cuda", 0)
    allocator.reset_peak(device)
    before = torch.cuda.memory_allocated(device)
    x = torch.empty(2**20, device=device)
    del x
    assert allocator.read_peak(device).allocated_bytes == before + 2**22


LIMITED = """
import resource, sys
from lightning_memsave.measuring.allocator import address_space_left

assert address_space_left() == float("inf")
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))
before = address_space_left()
assert 0 < before <= 2**28, before
held = bytearray(2**26)
assert before - address_space_left() >= 2**26
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of addresses are told by /proc")
def test_addresses_that_are_left_under_a_limit():
    subprocess.run([sys.executable, "-c", LIMITED], check=True)
