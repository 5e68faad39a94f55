"""What works together: techniques with each other, and techniques with ways of training. Checked before training.

A row with a `remedy` is refused with that text; a row without one works and is tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True)
class CompatibilityRule:
    """Two things that meet in one run, each a technique's stem or a way of training."""

    first: str
    second: str
    refused_because: str | None = None
    remedy: str | None = None
    cost: str | None = None
    """What the combination costs; a default that was not asked for by name is left out instead."""


WAYS_OF_TRAINING = (
    "manual optimization",
    "DDP",
    "DDP with static_graph",
    "FSDP",
    "model parallel (FSDP2)",
    "tensor parallelism",
    "DeepSpeed",
    "dataloader_iter",
    "torch.compile of the whole module",
    "fp16 with a GradScaler",
    "a DDP communication hook",
    "SyncBatchNorm",
    "batch size finder",
    "learning rate finder",
    "stochastic weight averaging of BatchNorm",
    "accumulate_grad_batches",
    "gradient clipping by norm",
    "gradient clipping by value",
    "configure_gradient_clipping",
    "optimizer_step of the module",
    "optimizer_zero_grad of the module",
    "processes without DDP",
    "an unknown training loop",
    "an unknown DDP",
    "an unknown FSDP2",
    "FSDP2 before torch 2.13",
)

SETTINGS = (
    "bf16 gradients",
    "changing patterns",
    "compact checkpoints",
    "gradient release",
    "int8 weights",
    "into-state gradients",
    "loss scaling",
    "microbatches by measured peaks",
    "norm_clipping",
    "out-of-memory recovery",
    "release without norm_clipping",
    "running statistics",
)
"""Settings of techniques that have rows of their own."""

_KEEP = '`OptimizerState(gradients="keep")`'

_GONE = "private names that it needs are gone (`torch_internals.private_names`), or are somebody's own"
_INSTALL = "Install a version of torch and Lightning that is tested"
_NOT_PUT_BACK = "its trial's steps move weights, and a pattern that has changed is not put back"
_FIND_BEFORE = 'Find it with `Sparsity(method="static")` of another `initial` than "snip", or with `sparsity=False`.'


def _works(first: str, others: str) -> tuple[CompatibilityRule, ...]:
    """Return a row for each of `others`, which commas separate, that works with `first`."""
    return tuple(CompatibilityRule(first, other) for other in others.split(", "))


COMPATIBILITY = (
    *_works("early_zero_grad", "microbatching, checkpointing, activation_compression, optimizer_state"),
    *_works("microbatching", "activation_compression, checkpointing, optimizer_state"),
    *_works("activation_compression", "checkpointing, optimizer_state, torch.compile of the whole module"),
    CompatibilityRule("checkpointing", "optimizer_state"),
    *_works(
        "low_precision",
        "early_zero_grad, microbatching, activation_compression, checkpointing, optimizer_state, manual "
        "optimization, DDP",
    ),
    CompatibilityRule(
        "low_precision",
        "FSDP",
        "its flattened parameters cannot be stepped one at a time",
        "Use DDP, or `precision=False`.",
    ),
    CompatibilityRule("low_precision", "model parallel (FSDP2)"),
    CompatibilityRule(
        "loss scaling",
        "model parallel (FSDP2)",
        "its search for an overflow is of whole gradients, and all processes have to skip the same steps",
        'Use `precision="bf16-sr"`, which needs no scaling.',
    ),
    *(
        CompatibilityRule(setting, way, because, 'Use `precision="bf16-sr"` or "bf16+8", or `precision=False`.')
        for setting in ("bf16 gradients", "int8 weights")
        for way, because in (
            ("model parallel (FSDP2)", "it reduces gradients in the dtype of their parameters"),
            ("DDP", "its buckets hold gradients in the dtype of their parameters"),
        )
    ),
    CompatibilityRule(
        "low_precision",
        "DeepSpeed",
        "its engine owns weights and optimizer",
        "Choose bf16 in DeepSpeed's configuration, and `precision=False`.",
    ),
    CompatibilityRule(
        "low_precision",
        "fp16 with a GradScaler",
        "bfloat16 gradients need no scaling, and float16 ones have their own",
        'Use `Trainer(precision="32-true")`, or `precision=False`.',
    ),
    *_works(
        "tiling",
        "early_zero_grad, sparsity, low_rank, sparse_update, low_precision, microbatching, activation_compression, "
        "checkpointing, optimizer_state, manual optimization, DDP, model parallel (FSDP2)",
    ),
    *_works(
        "sparsity",
        "early_zero_grad, microbatching, activation_compression, checkpointing, optimizer_state, low_precision, "
        "manual optimization",
    ),
    CompatibilityRule("changing patterns", "batch size finder", _NOT_PUT_BACK, _FIND_BEFORE),
    CompatibilityRule("changing patterns", "learning rate finder", _NOT_PUT_BACK, _FIND_BEFORE),
    CompatibilityRule("sparsity", "DDP"),
    CompatibilityRule("sparsity", "torch.compile of the whole module"),
    *(
        CompatibilityRule(
            "sparsity",
            way,
            "it shards dense parameters, and positions of live weights do not shard with them",
            "Use DDP, or `sparsity=False`.",
        )
        for way in ("FSDP", "model parallel (FSDP2)")
    ),
    *_works(
        "low_rank",
        "early_zero_grad, low_precision, microbatching, activation_compression, checkpointing, optimizer_state, "
        "manual optimization, DDP, torch.compile of the whole module",
    ),
    *_works(
        "sparse_update",
        "early_zero_grad, low_precision, microbatching, activation_compression, checkpointing, optimizer_state, "
        "manual optimization, DDP, torch.compile of the whole module",
    ),
    *(
        CompatibilityRule(
            second,
            first,
            "both put other parameters in the place of the same weights",
            f"Use one of them, and `{second}=False` or `{first}=False`.",
        )
        for first, second in combinations(("sparsity", "low_rank", "sparse_update"), 2)
    ),
    *(
        CompatibilityRule(
            stem,
            way,
            "it shards the parameters that the module has before layers change",
            f"Use DDP, or `{stem}=False`.",
        )
        for stem in ("low_rank", "sparse_update")
        for way in ("FSDP", "model parallel (FSDP2)")
    ),
    *(
        CompatibilityRule(stem, "DeepSpeed", "its engine owns the parameters", f"Use DDP, or `{stem}=False`.")
        for stem in ("sparsity", "low_rank", "sparse_update")
    ),
    # `training_step` cuts its batch itself there, with `microbatches(batch)`.
    *_works("manual optimization", "microbatching, activation_compression, checkpointing, optimizer_state"),
    *_works("DDP", "early_zero_grad, microbatching, activation_compression, checkpointing, optimizer_state"),
    *_works(
        "model parallel (FSDP2)",
        "early_zero_grad, microbatching, activation_compression, checkpointing, optimizer_state",
    ),
    CompatibilityRule("model parallel (FSDP2)", "out-of-memory recovery"),
    CompatibilityRule(
        "microbatching",
        "DDP with static_graph",
        "DDP's static graph allows one backward per step (torch fails an internal assertion)",
        "Use DDP without `static_graph=True`, or `microbatch=False`.",
    ),
    CompatibilityRule(
        "microbatching",
        "DeepSpeed",
        "its engine counts backward passes itself",
        "Set `train_micro_batch_size_per_gpu` in DeepSpeed's configuration, and `microbatch=False`.",
    ),
    CompatibilityRule(
        "optimizer_state",
        "DeepSpeed",
        "its engine owns the optimizer",
        "Choose the optimizer in DeepSpeed's configuration, and `optimizer_state=False`.",
    ),
    CompatibilityRule(
        "optimizer_state",
        "FSDP",
        "flattened parameters do not tell which of them are embeddings or norms",
        "Use DDP, or `optimizer_state=False`.",
    ),
    CompatibilityRule(
        "microbatching",
        "dataloader_iter",
        "`training_step(dataloader_iter)` draws its batches itself, so there is none to cut",
        "Take `batch` as the argument, or use `microbatches(batch)` inside and `microbatch=False`.",
    ),
    CompatibilityRule(
        "running statistics",
        "manual optimization",
        "`microbatches(batch)` cuts inside of `training_step`, where nobody pools what BatchNorms see",
        'Use `Microbatching(batchnorm="ghost")`.',
    ),
    CompatibilityRule(
        "out-of-memory recovery",
        "manual optimization",
        "`training_step` updates parameters itself, so a batch cannot be run again",
        "Use a number, for example `microbatch=8`, with `microbatches(batch)` inside of `training_step`.",
    ),
    *(
        CompatibilityRule(
            "out-of-memory recovery",
            way,
            "processes wait for each other in every forward",
            "Use a number, for example `microbatch=8`.",
        )
        for way in ("FSDP", "SyncBatchNorm")
    ),
    CompatibilityRule(
        "out-of-memory recovery",
        "tensor parallelism",
        "its own exchanges inside of layers cannot be caught up with",
        "Use a number, for example `microbatch=8`, or all processes for FSDP2.",
    ),
    CompatibilityRule(
        "microbatches by measured peaks",
        "model parallel (FSDP2)",
        "each process measures a peak of its own, and all have to cut alike",
        'Use `microbatch="auto"`, or a number, for example `microbatch=8`.',
    ),
    CompatibilityRule(
        "out-of-memory recovery", "an unknown FSDP2", _GONE, f"{_INSTALL}, or use a number, for example `microbatch=8`."
    ),
    CompatibilityRule(
        "out-of-memory recovery",
        "FSDP2 before torch 2.13",
        "it cannot begin anew after an error in the middle of a step",
        "Use a number, for example `microbatch=8`, or torch 2.13.",
    ),
    CompatibilityRule(
        "out-of-memory recovery",
        "processes without DDP",
        "it is not known when they wait for each other",
        "Use a number, for example `microbatch=8`.",
    ),
    CompatibilityRule(
        "out-of-memory recovery",
        "a DDP communication hook",
        "gradients are averaged after backward, where DDP does not call it",
        "Use a number, for example `microbatch=8`, or no hook.",
    ),
    CompatibilityRule(
        "out-of-memory recovery",
        "batch size finder",
        "it waits for memory to run out, which recovery prevents",
        "Find the batch size without `MemSave(microbatch=...)`, or leave it to recovery.",
    ),
    CompatibilityRule(
        "out-of-memory recovery",
        "DDP",
        cost="gradients are averaged after backward instead of during it, so communication takes time of its own",
    ),
    *_works(
        "fp16 with a GradScaler",
        "out-of-memory recovery, microbatching, activation_compression, optimizer_state, checkpointing",
    ),
    CompatibilityRule(
        "gradient release",
        "microbatching",
        "the backward of each microbatch would be a step of its own",
        f"Use {_KEEP}, or `microbatch=False`.",
    ),
    CompatibilityRule(
        "gradient release",
        "accumulate_grad_batches",
        "the backward of each batch would be a step of its own",
        f"Use {_KEEP}, or `Trainer(accumulate_grad_batches=1)`.",
    ),
    CompatibilityRule(
        "norm_clipping",
        "dataloader_iter",
        "`training_step` runs twice, and would take another batch each time",
        f"Take the batch as an argument, or use {_KEEP}.",
    ),
    CompatibilityRule(
        "release without norm_clipping",
        "gradient clipping by norm",
        "the norm is known only after the last gradient, when the others are gone",
        'Use `OptimizerState(gradients="release", norm_clipping="two-pass")`, which finds it first, or '
        f'`Trainer(gradient_clip_algorithm="value")`, or {_KEEP}.',
    ),
    CompatibilityRule(
        "gradient release",
        "configure_gradient_clipping",
        "it runs after backward, when the gradients are gone",
        f'Use `Trainer(gradient_clip_val=..., gradient_clip_algorithm="value")`, or {_KEEP}.',
    ),
    CompatibilityRule(
        "gradient release",
        "optimizer_step of the module",
        "parameters step inside of backward, whatever it does or leaves out",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "gradient release",
        "optimizer_zero_grad of the module",
        "gradients are gone after each batch, also where it would let them add up",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "gradient release",
        "fp16 with a GradScaler",
        "an overflow would be found after parameters have stepped",
        f'Use `precision="bf16-sr"` or bf16-mixed, which need no scaler, or {_KEEP}.',
    ),
    CompatibilityRule(
        "gradient release",
        "loss scaling",
        "an overflow would be found after parameters have stepped",
        f'Use `precision="bf16-sr"`, which needs no scaling, or {_KEEP}.',
    ),
    CompatibilityRule(
        "gradient release",
        "stochastic weight averaging of BatchNorm",
        "its last epoch, for the statistics, steps once more with the gradients of the batch before",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule("gradient release", "DDP"),
    CompatibilityRule(
        "gradient release",
        "a DDP communication hook",
        "gradients are averaged in backward without DDP, which would call it",
        f"Use {_KEEP}, or no hook.",
    ),
    CompatibilityRule(
        "gradient release",
        "SyncBatchNorm",
        "its own exchange would have to take turns with that of gradients",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "gradient release",
        "manual optimization",
        "a backward by hand need not be followed by a step of all that it reaches",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "out-of-memory recovery",
        "the gradients of a batch that is run again would be in the moments twice",
        f"Use a number, for example `microbatch=8`, or {_KEEP}.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "gradient clipping by norm",
        "the norm is known only after the last gradient, when the others are in the moments",
        f"Train without `gradient_clip_val`, or use {_KEEP}.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "gradient clipping by value",
        "what is to be clipped is the sum over the microbatches, which never exists",
        f'Train without `gradient_clip_val`, or use `gradients="release"`, or {_KEEP}.',
    ),
    CompatibilityRule(
        "into-state gradients",
        "configure_gradient_clipping",
        "it runs after backward, when the gradients are gone",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "optimizer_step of the module",
        "gradients are in the moments before it runs, whatever it does or leaves out",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "optimizer_zero_grad of the module",
        "gradients are in the moments after each batch, also where it would let them add up",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "fp16 with a GradScaler",
        "an overflow would be found when it is in the moments",
        f'Use `precision="bf16-sr"` or bf16-mixed, which need no scaler, or {_KEEP}.',
    ),
    CompatibilityRule("into-state gradients", "DDP"),
    CompatibilityRule(
        "into-state gradients",
        "a DDP communication hook",
        "gradients are averaged in backward without DDP, which would call it",
        f"Use {_KEEP}, or no hook.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "SyncBatchNorm",
        "its own exchange would have to take turns with that of gradients",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "into-state gradients",
        "manual optimization",
        "gradients that `training_step` throws away cannot be taken out of the moments",
        f"Use {_KEEP}.",
    ),
    CompatibilityRule(
        "compact checkpoints",
        "sparsity",
        "checkpoints of sparse layers are dense, and codes of live weights are not",
        'Use `OptimizerState(checkpoint="plain")`, or `sparsity=False`.',
    ),
    CompatibilityRule(
        "into-state gradients",
        "loss scaling",
        "an overflow would be found when it is in the moments",
        f'Use `precision="bf16-sr"`, which needs no scaling, or {_KEEP}.',
    ),
    CompatibilityRule(
        "into-state gradients",
        "bf16 gradients",
        "no gradient is kept that could take fewer bytes",
        f'Use `precision="bf16-sr"`, `precision=False`, or {_KEEP}.',
    ),
    CompatibilityRule("into-state gradients", "int8 weights", "weight decay needs weights, not codes", f"Use {_KEEP}."),
    CompatibilityRule(
        "int8 weights", "torch.compile of the whole module", "compiled code sees codes", 'Use `precision="bf16-sr"`.'
    ),
    CompatibilityRule("into-state gradients", "microbatching"),
    CompatibilityRule("into-state gradients", "accumulate_grad_batches"),
    CompatibilityRule("microbatching", "an unknown training loop", _GONE, f"{_INSTALL}, or set `microbatch=False`."),
    CompatibilityRule("microbatching", "an unknown DDP", _GONE, f"{_INSTALL}, or set `microbatch=False`."),
    CompatibilityRule(
        "early_zero_grad", "an unknown training loop", _GONE, f'{_INSTALL}, or use `MemSave("measure")`.'
    ),
)


def check_compatibility(present: Iterable[str]) -> None:
    """Refuse the first pair of `present` that does not work together.

    Args:
        present: stems of techniques and names from `WAYS_OF_TRAINING`.

    Raises:
        ValueError: names both settings, the reason and the way out.

    >>> check_compatibility(["microbatching", "DeepSpeed"])
    Traceback (most recent call last):
        ...
    ValueError: microbatching cannot be combined with DeepSpeed: its engine counts backward passes itself. Set ...
    """
    refused = {frozenset((row.first, row.second)): row for row in COMPATIBILITY if row.refused_because}
    for pair in combinations(present, 2):
        if row := refused.get(frozenset(pair)):
            raise ValueError(f"{row.first} cannot be combined with {row.second}: {row.refused_because}. {row.remedy}")


def is_refused(first: str, second: str) -> bool:
    """Return whether these two do not work together."""
    pair = {first, second}
    return any(row.refused_because is not None and {row.first, row.second} == pair for row in COMPATIBILITY)


def costs_of(present: Iterable[str]) -> list[str]:
    """Return what the pairs of `present` cost besides; a default is not worth that."""
    names = set(present)
    return [
        f"{row.first} stays off with {row.second} unless it is asked for: {row.cost}"
        for row in COMPATIBILITY
        if row.cost and {row.first, row.second} <= names
    ]
