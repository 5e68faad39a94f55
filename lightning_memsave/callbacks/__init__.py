"""What users put into `Trainer(callbacks=[...])`."""

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.callbacks.monitor import MemoryMonitor
from lightning_memsave.callbacks.planning import plan_training
from lightning_memsave.callbacks.prediction import predict
from lightning_memsave.callbacks.progress import MemoryProgressBar
from lightning_memsave.callbacks.verification import verify

__all__ = ["MemSave", "MemoryMonitor", "MemoryProgressBar", "plan_training", "predict", "verify"]
