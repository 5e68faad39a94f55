"""What users put into `Trainer(callbacks=[...])`."""

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.callbacks.monitor import MemoryMonitor
from lightning_memsave.callbacks.progress import MemoryProgressBar

__all__ = ["MemSave", "MemoryMonitor", "MemoryProgressBar"]
