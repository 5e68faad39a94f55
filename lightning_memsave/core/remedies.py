"""What makes each category of bytes smaller, as a user would write it: the advice when memory runs out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_memsave.core.compatibility import is_refused

_RECOVERY = (
    ("microbatching", "out-of-memory recovery"),
    '`microbatch="auto"` (runs the batch in parts when memory is out)',
)
_MICROBATCHES = (("microbatching",), "`microbatch=8`, for example (always in parts)")
_SHORTER = ((), "shorter samples")
_SHARDS = (
    ("model parallel (FSDP2)",),
    '`strategy="memsave_fsdp"` (a shard on each device, for a module that calls `fully_shard`)',
)
_LINEAR = '`activations=["exact", "linear-cross-entropy"]` where logits over a large vocabulary are it'
REMEDIES: Mapping[str, Sequence[tuple[tuple[str, ...], str]]] = {
    "activations": (
        _RECOVERY,
        _MICROBATCHES,
        (("checkpointing",), '`checkpointing="sqrt"` (computes them again)'),
        (("activation_compression",), '`activations="exact"` or `"int4"` (keeps them in fewer bytes)'),
        (("tiling",), '`tiling="samples"` or `tiling="positions"` (modules in slices, where these are independent)'),
        _SHORTER,
    ),
    "temporary": (
        _RECOVERY,
        _MICROBATCHES,
        (("activation_compression",), _LINEAR),
        _SHORTER,
    ),
    "optimizer_state": (
        (("optimizer_state",), '`optimizer_state="8bit"` (a quarter of 32 bits) or `"4bit"` (an eighth)'),
        (("sparsity",), "`sparsity=0.9` (a tenth, and a bit per weight)"),
        (("low_rank",), "`low_rank=0.2` (a fifth: two factors instead of each weight)"),
        (("sparse_update",), "`sparse_update=0.2` (of a pretrained network, the part that gives most is trained)"),
    ),
    "weights": (
        (("low_precision",), '`precision="bf16-sr"` (half of 32 bits, and half of their gradients)'),
        (("sparsity",), "`sparsity=0.9` (a tenth of them and a bit per weight, of their gradients and of their state)"),
        (("low_rank",), "`low_rank=0.2` (a fifth of them, of their gradients and of their state: two factors each)"),
        _SHARDS,
    ),
    "gradients": (
        (("gradient release",), '`OptimizerState(first_moment="32bit", gradients="release")` (one at a time)'),
        (
            ("into-state gradients",),
            '`OptimizerState(first_moment="32bit", gradients="into-state")` (with microbatches)',
        ),
        (("low_precision",), '`precision="bf16-sr"` (half of 32 bits)'),
        (("sparsity",), "`sparsity=0.9` (a tenth)"),
        (("low_rank",), "`low_rank=0.2` (a fifth)"),
        (("sparse_update",), "`sparse_update=0.2` (of a pretrained network, the part that gives most is trained)"),
        _SHARDS,
    ),
    "data": (((), "a smaller `batch_size` in the DataLoader"),),
}
"""Remedies by category, what helps first: names in the compatibility table, and what a user writes."""


def remedies_for(category: str, applied: Collection[str], fixed: Collection[str] = ()) -> list[str]:
    """Return the remedies that are not on yet, and would not be refused.

    Args:
        category: one of `CATEGORIES`.
        applied: what is on, by the names of the compatibility table.
        fixed: what of it stays on in any case, and the way of training.

    >>> remedies_for("data", applied=())
    ['a smaller `batch_size` in the DataLoader']
    """
    on = {*applied, *fixed}
    return [
        remedy
        for names, remedy in REMEDIES.get(category, ())
        if on.isdisjoint(names) and not any(is_refused(name, other) for name in names for other in fixed)
    ]
