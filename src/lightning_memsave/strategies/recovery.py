"""Recovery: a batch that ran out of memory is put back to its start and run again with less, in the same step.

What a failed try may have changed is kept before each batch (`batch_start`): the generators of Python, numpy and torch,
the buffers that a step changes, plain attributes of the LightningModule, gradients when they accumulate. Metrics and
logs are deferred by the loop. Then the next measure is taken: exact ones first, then microbatches of half the size. A
batch that is run again has the same bits as one that had this setting from the start.

Not recovered: the optimizer's own update, as parameters may be half new, and steps in which processes wait for each
other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_memsave.core.units import format_bytes
from lightning_memsave.memory.ledger import tensors_in
from lightning_memsave.techniques.microbatching.split import batch_size

_MESSAGES = (
    "out of memory",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "ur_result_error_out_of_device_memory",
    "ur_result_error_out_of_host_memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's class, Python's, or the texts of CUDA, cuDNN, XPU and CPU.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    True
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (is_oom_error(error) or any(m in text for m in _MESSAGES))


class OutOfMeasuresError(torch.OutOfMemoryError):
    """Memory ran out, and there is nothing left to do about it."""


class Recovery:
    """What has been done about memory so far, and what is done next.

    Args:
        climb: takes the next exact measure and says which, or says `None` when all are taken.
    """

    def __init__(self, climb: Callable[[Any], str | None]) -> None:
        self._climb = climb
        self.limit_elements: float | None = None
        """Numbers of input in a microbatch, so that long samples come in small ones; `None`: whole batches."""
        self.size: int | None = None
        """The microbatch that the latest batch was cut into; `None`: whole."""
        self.num_recovered = 0
        self.changing: set[str] | None = None

    def size_for(self, batch: Any) -> int | None:
        """Samples per microbatch of this batch; `None` for all of them."""
        if self.limit_elements is not None:
            self.size = max(1, int(self.limit_elements / _elements_per_sample(batch)))
        return self.size

    def do_with_less(self, trainer: Any, batch: Any, can_cut: bool, error: str) -> None:
        """Take the next measure; `batch` is then run again.

        Raises:
            OutOfMeasuresError: there is none.
        """
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        taken = self._climb(trainer)
        if taken is None:
            taken = self._cut(trainer, batch, can_cut, error)
        self.num_recovered += 1
        rank_zero_info(f"memsave: out of memory in batch {trainer.fit_loop.batch_idx}; run again with {taken}.")

    def _cut(self, trainer: Any, batch: Any, can_cut: bool, error: str) -> str:
        num_samples = batch_size(batch) if can_cut else 1
        size = min(self.size_for(batch) or num_samples, num_samples) if can_cut else 1
        if size <= 1:
            raise OutOfMeasuresError(_nothing_left(trainer, can_cut, error))
        num_parts = 2 * -(-num_samples // size)
        smaller = max(1, min(size - 1, -(-num_samples // num_parts)))
        self.limit_elements = smaller * _elements_per_sample(batch)
        return f"microbatches of at most {smaller} samples"


def _elements_per_sample(batch: Any) -> float:
    return max(1.0, sum(tensor.numel() for tensor in tensors_in(batch)) / max(1, batch_size(batch)))


def _nothing_left(trainer: Any, can_cut: bool, error: str) -> str:
    module = trainer.lightning_module
    weights = 2 * sum(p.nbytes for p in module.parameters())
    states = (state for optimizer in trainer.optimizers for state in optimizer.state.values())
    state_bytes = sum(leaf.nbytes for state in states for leaf in state.values() if isinstance(leaf, torch.Tensor))
    parts = sorted(
        [
            (weights, "weights and gradients", 'sharding them over devices (`strategy="memsave_fsdp"`)'),
            (state_bytes, "optimizer state", '`optimizer_state="8bit"`'),
        ],
        reverse=True,
    )
    sizes = ", ".join(f"{name} ({format_bytes(size)})" for size, name, _ in parts)
    remedies = ", ".join(remedy for _, _, remedy in parts)
    last = "at one sample per microbatch" if can_cut else "and this batch cannot be cut into microbatches"
    return (
        f"Memory runs out {last}, after every exact measure. There are {sizes}; the rest is activations and "
        f'temporaries. What would save most: `activations="int4"`, {remedies}, shorter samples. Nothing of this batch '
        f"was applied, and checkpoints are as they were. The error was: {error}"
    )
