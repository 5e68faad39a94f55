"""What one operation costs: time, and workspace in its kernel; modelled, so that it means the same on fake tensors.

Time is the larger of arithmetic over the speed of a matrix product and bytes over the speed of a copy (the roofline of
Williams, Waterman and Patterson, 2009, https://doi.org/10.1145/1498765.1498785), with a constant for each operation.
Both speeds are measured once; of a device without room for that, those of a data sheet count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from lightning_memsave.measuring.storages import storages
from lightning_memsave.torch_internals.autograd_graph import unwatched
from lightning_memsave.torch_internals.fake_tensors import device_of

_OVERHEAD_SECONDS = 5e-6
_SCRATCH = {"aten.convolution": 1, "aten.convolution_backward": 2, "aten.native_batch_norm_backward": 1}
"""What kernels take and give back inside, on CPU in float32 (measured), in multiples of their largest input."""


def cost_of(
    func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[float, int]:
    """Return the seconds and workspace bytes of one operation of `torch.ops`, with all tensors that it got and gave."""
    packet = func.overloadpacket
    device = next((device_of(t).type for t in (*outputs, *inputs)), "cpu")
    scratch = _SCRATCH.get(str(packet), 0) if device == "cpu" else 0
    workspace_bytes = scratch * max(map(_num_bytes, inputs), default=0)
    if func.is_view:
        return 0.0, workspace_bytes
    flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
    speed = measure_speed("cpu" if device == "meta" else device)
    moved = sum(map(_num_bytes, (*inputs, *outputs)))
    return max(flops / speed.flops, moved / speed.bytes) + _OVERHEAD_SECONDS, workspace_bytes


def _num_bytes(tensor: Tensor) -> int:
    """Return what an operation reads or writes of a tensor; sparse ones have no `nbytes`."""
    return tensor.nbytes if tensor.layout is torch.strided else sum(s.nbytes() for s in storages(tensor))


@dataclass(frozen=True)
class Speed:
    """What a device does in a second."""

    flops: float
    bytes: float


NOMINAL = Speed(flops=19.5e12, bytes=2.0e12)
"""An A100 in float32 (NVIDIA's data sheet, 2021). It compares large operations well, while small ones cost alike."""


_speeds: dict[str, Speed] = {}


def measure_speed(device_type: str) -> Speed:
    """Measure the speed of a matrix product and of a copy, in float32, once; `NOMINAL` where there is no room for it.

    It may be asked for amid a step whose memory has run out.
    """
    if device_type not in _speeds:
        try:
            # Not in a thread of its own, for which cuBLAS would take another workspace of 32 MiB, and keep it.
            with torch.no_grad(), unwatched(), _disable_current_modes(), torch.autocast(device_type, enabled=False):
                _speeds[device_type] = _measure_speed(device_type)
        except (RuntimeError, AssertionError, ImportError):  # out of memory, or a device that computes nothing here
            _speeds[device_type] = NOMINAL
    return _speeds[device_type]


def measure_again() -> None:
    """Let speeds that could not be measured be measured when they are asked for next."""
    for device_type in [each for each, speed in _speeds.items() if speed is NOMINAL]:
        del _speeds[device_type]


_NUM_TIMED = 5
"""Runs, of which the fastest counts."""


def _measure_speed(device_type: str) -> Speed:
    size = 512
    matrix = torch.ones(size, size, dtype=torch.float32, device=device_type)
    block = torch.ones(4 * 2**20, dtype=torch.float32, device=device_type)
    product = _best_seconds(lambda: matrix @ matrix, device_type)
    copy = _best_seconds(lambda: block.clone(), device_type)
    return Speed(flops=2 * size**3 / product, bytes=2 * block.nbytes / copy)


def _best_seconds(run: Callable[[], object], device_type: str) -> float:
    def timed() -> Iterator[float]:
        for _ in range(_NUM_TIMED):
            start = time.perf_counter()
            run()
            if device_type != "cpu":
                torch.accelerator.synchronize()
            yield time.perf_counter() - start

    return min(timed())
