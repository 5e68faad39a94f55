"""What makes each category of bytes smaller, as a user would write it: the advice when memory runs out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

_MICROBATCHES = ("microbatching", '`microbatch="auto"` (runs the batch in parts when memory is out), or a size')
_SHORTER = ("", "shorter samples")
_SHARDS = ("", '`strategy="memsave_fsdp"` (a shard on each device, for a module that calls `fully_shard`)')
_LINEAR = '`activations=["exact", "linear-cross-entropy"]` where logits over a large vocabulary are it'
REMEDIES: Mapping[str, Sequence[tuple[str, str]]] = {
    "activations": (
        _MICROBATCHES,
        ("checkpointing", '`checkpointing="sqrt"` (computes them again)'),
        ("activation_compression", '`activations="exact"` or `"int4"` (keeps them in fewer bytes)'),
        _SHORTER,
    ),
    "temporary": (
        _MICROBATCHES,
        ("activation_compression", _LINEAR),
        _SHORTER,
    ),
    "optimizer_state": (
        ("optimizer_state", '`optimizer_state="8bit"` (a quarter of 32 bits) or `"4bit"` (an eighth)'),
        ("sparsity", "`sparsity=0.9` (a tenth, and a bit per weight)"),
    ),
    "weights": (
        ("low_precision", '`precision="bf16-sr"` (half of 32 bits, and half of their gradients)'),
        ("sparsity", "`sparsity=0.9` (a tenth of them and a bit per weight, of their gradients and of their state)"),
        _SHARDS,
    ),
    "gradients": (
        ("", '`OptimizerState(format="32bit", gradients="release")` (one at a time; `"into-state"` with microbatches)'),
        ("low_precision", '`precision="bf16-sr"` (half of 32 bits)'),
        ("sparsity", "`sparsity=0.9` (a tenth)"),
        _SHARDS,
    ),
    "data": (("", "a smaller `batch_size` in the DataLoader"),),
}
"""By category, what helps first: the technique's stem, empty for what is none, and what a user writes."""


def remedies_for(category: str, applied: Collection[str]) -> list[str]:
    """Those of techniques that are not on yet.

    Args:
        category: one of `CATEGORIES`.
        applied: stems of the techniques that are on.

    >>> remedies_for("data", applied=())
    ['a smaller `batch_size` in the DataLoader']
    """
    return [remedy for stem, remedy in REMEDIES.get(category, ()) if stem not in applied]
