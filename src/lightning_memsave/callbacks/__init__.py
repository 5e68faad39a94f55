"""What users put into `Trainer(callbacks=[...])`."""

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.callbacks.monitor import MemoryMonitor

__all__ = ["MemSave", "MemoryMonitor"]
