"""Every technique there is, in the order in which a recipe applies them. Adding one is one line here.

Tests walk this table and name what a technique still lacks (code, test, benchmark, page, compatibility rows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.low_rank import LowRank
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.sparse_update import SparseUpdate
from lightning_memsave.techniques.sparsity import Sparsity
from lightning_memsave.techniques.tiling import Tiling

Config = (
    EarlyZeroGrad
    | Sparsity
    | LowRank
    | SparseUpdate
    | LowPrecision
    | Microbatching
    | ActivationCompression
    | Tiling
    | Checkpointing
    | OptimizerState
)


@dataclass(frozen=True)
class Technique:
    """A technique's name and settings."""

    stem: str
    """Its name in code, tests, benchmarks and docs."""
    config: type[Config]
    slot: str | None = None
    """Its argument of `MemSave`; `None` when only recipes name it."""
    shorthand: Callable[[object], Config] | None = None
    """Settings from the short form that the slot takes."""


TECHNIQUES = (
    Technique("early_zero_grad", EarlyZeroGrad),
    Technique("sparsity", Sparsity, "sparsity", Sparsity.from_shorthand),
    Technique("low_rank", LowRank, "low_rank", LowRank.from_shorthand),
    Technique("sparse_update", SparseUpdate, "sparse_update", SparseUpdate.from_shorthand),
    Technique("low_precision", LowPrecision, "precision", LowPrecision.from_shorthand),
    Technique("microbatching", Microbatching, "microbatch", Microbatching.from_shorthand),
    Technique("activation_compression", ActivationCompression, "activations", ActivationCompression.from_shorthand),
    Technique("tiling", Tiling, "tiling", Tiling.from_shorthand),
    Technique("checkpointing", Checkpointing, "checkpointing", Checkpointing.from_shorthand),
    Technique("optimizer_state", OptimizerState, "optimizer_state", OptimizerState.from_shorthand),
)


def technique_of(config: Config) -> Technique:
    """Return the row of the table that `config` belongs to."""
    return next(t for t in TECHNIQUES if isinstance(config, t.config))
