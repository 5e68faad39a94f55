"""pytest's plugin: what runs on the simulated device takes the kernels that it has."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure() -> None:
    """Load the kernels; nothing of cuDNN's, Triton's or bitsandbytes' is there, nor flash attention."""
    torch.ops.load_library(os.environ["MEMSAVE_SIMULATED_CUDA"])
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    from lightning_memsave.numerics import kernels
    from lightning_memsave.techniques import optimizer_state

    kernels._has_triton = lambda: False
    optimizer_state.find_spec = lambda name: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a real device's kernels."""
    for item in items:
        if item.get_closest_marker("kernels"):
            item.add_marker(pytest.mark.skip(reason="needs the kernels of a real CUDA device"))
