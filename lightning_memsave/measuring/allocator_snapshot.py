"""A snapshot of CUDA's caching allocator: each block of the first batches with the lines that made it.

It is torch's own record, a pickle for https://pytorch.org/memory_viz. What it adds to the ledger: reserved memory,
fragmentation, and what libraries allocate. Recording costs time and host memory while it runs, so it stops early.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html, which documents two functions that are private by
their names.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_memsave.core.errors import setting_error
from lightning_memsave.torch_internals.private_names import require

_MAX_ENTRIES = 1_000_000  # the latest are kept


class Snapshot:
    """Records from now on.

    Args:
        path: of the file, which `save` writes.
        device: whose allocator.

    Raises:
        ValueError: `device` is not a CUDA device, or the file cannot be there.
    """

    def __init__(self, path: str | Path, device: torch.device) -> None:
        require("allocator snapshot", "MemoryMonitor.snapshot")
        self._path = Path(path)
        if device.type != "cuda":
            raise setting_error(
                "MemoryMonitor.snapshot",
                "records CUDA's caching allocator",
                device.type,
                "Leave it out on other devices: the report's `by_category` and timeline need no allocator.",
            )
        if not self._path.parent.is_dir():
            raise setting_error("MemoryMonitor.snapshot", "must lie in a folder", str(path), "Make the folder first.")
        torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES, device=device)

    def save(self) -> Path:
        """Write the file and stop recording.

        Returns:
            Its path.
        """
        try:
            torch.cuda.memory._dump_snapshot(str(self._path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return self._path
