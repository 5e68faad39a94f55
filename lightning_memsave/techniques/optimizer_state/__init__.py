"""Lean optimizer state: the user's optimizer keeps smaller moments, and no gradient longer than it must.

What shrinks: float32 moments, 4 bytes per parameter each, and gradients, 4 or 2. Bytes of moments per parameter:

| optimizer                       | before |  8bit |  4bit |   fp8 | factored | 4bit-, 5bit-factored | offload, paged |
|---------------------------------|-------:|------:|------:|------:|---------:|---------------------:|---------------:|
| AdamW, Adam, NAdam, RAdam       |    8.0 | 2.031 | 1.031 | 2.031 |    1.016 |         0.516, 0.641 |              0 |
| SGD, Lion, RMSprop, Adagrad     |    4.0 | 1.016 | 0.516 | 1.016 |          |                      |              0 |
| any other, by moment            |    4.0 | 1.016 | 0.516 | 1.016 |          |                      |              0 |
| LAMB                            |    8.0 | 2.031 |       |       |          |                      |                |

`"lowrank"`: 4 * R * (k * max(N, M) + min(N, M)) bytes for k moments of a parameter [N, M] (`galore.py`);
`"apollo"`: 4 * R * k * max(N, M) (`apollo.py`).

Codes of our own stand between the steps of the optimizer (`moment_codecs.py`, `quantized.py`); on CUDA, 8 bits are
bitsandbytes' fused kernels where it has the optimizer (`bitsandbytes_backend.py`), as are pages. `gradients="release"`
steps each parameter inside of backward and frees its gradient, `"into-state"` adds gradients to the moments
(`gradient_release.py`, `optimizer_accumulation.py`).

Parameters below 4096 elements, embeddings and normalisation layers keep float32 state: small, and the ones that suffer
most from coarse state. Weights are not touched.

Loss class: `changed` for every format but `"offload"`, `"paged"` and `"32bit"`, which are `exact`, as is releasing
gradients; adding them to the momentum of SGD is exact, to Adam's moments `changed` (`optimizer_accumulation.py`).
bitsandbytes' CPU code rounds differently from its CUDA kernels, takes up to 20 bytes per element of the largest
parameter and is slower than our own, which is why CPUs do not use it.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (https://arxiv.org/abs/2110.02861); those
of the other formats in their modules. Different: the optimizer object stays the same and changes its class, so that LR
schedulers and every other reference go on working; checkpoints are written in torch's layout (`state_dict_layout.py`);
LAMB keeps the trust ratio that bitsandbytes' 8-bit LAMB drops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied, worst_loss_class
from lightning_memsave.core.selection import select
from lightning_memsave.core.versions import require_package
from lightning_memsave.numerics.blockwise import num_blocks
from lightning_memsave.techniques.optimizer_state import projection
from lightning_memsave.techniques.optimizer_state.bitsandbytes_backend import become_8bit, become_plain
from lightning_memsave.techniques.optimizer_state.conversion import from_plain, to_plain
from lightning_memsave.techniques.optimizer_state.gradient_exchange import (
    GradientExchange,
    exchanged_bytes,
    send_from_first,
)
from lightning_memsave.techniques.optimizer_state.gradient_release import (
    GradientRelease,
    GradientsIntoState,
    InBackward,
)
from lightning_memsave.techniques.optimizer_state.moment_codecs import codec_of
from lightning_memsave.techniques.optimizer_state.moment_names import check_quantizable
from lightning_memsave.techniques.optimizer_state.optimizer_accumulation import check_into_state
from lightning_memsave.techniques.optimizer_state.optimizer_mapping import check_paged, find_mapping, is_8bit
from lightning_memsave.techniques.optimizer_state.paged import pages_kept
from lightning_memsave.techniques.optimizer_state.quantized import (
    dequantize_state,
    memory_of,
    moments_of,
    quantize_state,
)
from lightning_memsave.techniques.optimizer_state.reapply import (
    as_plain,
    check_replaceable,
    inherited,
    is_as_asked,
    is_low_bit,
    is_ours,
    leave,
    memory,
)
from lightning_memsave.techniques.optimizer_state.state_checks import check_whole
from lightning_memsave.techniques.optimizer_state.state_config import OptimizerState, parameters_kept_32bit
from lightning_memsave.techniques.optimizer_state.state_dict_layout import (
    decoded_state_dict,
    for_adafactor,
    in_order_of,
)
from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone
from lightning_memsave.torch_internals.optimizer_class import name_of
from lightning_memsave.torch_internals.private_names import require
from lightning_memsave.torch_internals.sharded_parameters import as_local, free_gathered, is_sharded

__all__ = [
    "GradientExchange",
    "GradientRelease",
    "GradientsIntoState",
    "InBackward",
    "OptimizerState",
    "apply_format",
    "apply_optimizer_state",
    "check_optimizers",
    "check_whole",
    "decoded_state_dict",
    "estimate_optimizer_state",
    "exchanged_bytes",
    "for_adafactor",
    "from_plain",
    "gradients_applied",
    "has_effect",
    "in_order_of",
    "inherited",
    "is_8bit",
    "is_low_bit",
    "is_ours",
    "needs_format",
    "pages_kept",
    "send_from_first",
    "to_plain",
]

_CODE_MAP_BYTES = 256 * 4
_NAMES = {
    "8bit": "8-bit state",
    "4bit": "4-bit state",
    "fp8": "fp8 state",
    "factored": "8-bit first and factored second moments",
    "4bit-factored": "4-bit first and factored second moments",
    "5bit-factored": "5-bit first and factored second moments",
    "lowrank": "state of low rank",
    "apollo": "state of random projections",
    "offload": "state in host memory",
    "32bit": "its state",
}
_REASONS = {
    "8bit": "moments are rounded to 8 bits",
    "4bit": "moments are rounded to 4 bits",
    "fp8": "moments are rounded to floats of 8 bits",
    "factored": "first moments are rounded to 8 bits, its second ones are means of rows and columns",
    "4bit-factored": "first moments are rounded to 4 bits, its second ones are means of rows and columns",
    "5bit-factored": "first moments are rounded to 5 bits, its second ones are means of rows and columns",
    "lowrank": "moments are those of the gradient in a subspace",
    "apollo": "moments only set how far each column moves along its gradient",
}
"""What is lost, for the formats that are not exact."""


def uses_bitsandbytes(optimizer: torch.optim.Optimizer, config: OptimizerState) -> bool:
    """Return whether the state of `optimizer` becomes bitsandbytes'."""
    if config.format == "paged" or config.backend == "bitsandbytes":
        return True
    if config.format != "8bit" or config.backend == "own" or config.gradients == "into-state":
        return False
    if _has_shards(optimizer):
        return False
    if name_of(type(optimizer)) in ("LAMB", "Lamb"):  # needs all of its step at once
        return True
    on_cuda = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    if not on_cuda or find_spec("bitsandbytes") is None:
        return False
    try:
        find_mapping(optimizer)
    except ValueError:
        return False
    return True


def apply_optimizer_state(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> Applied:
    """Change the state of `optimizer`, and end its gradients in backward, as `config` says; in place, at any time.

    State that exists is converted.

    Raises:
        ValueError: what the format does not know: an optimizer, or a setting of it.
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    parts = [part for part in [apply_format(optimizer, config, model)] if part is not None]
    if config.gradients == "release":
        parts.append(gradients_applied(config, [optimizer], GradientRelease([optimizer])))
    elif config.gradients == "into-state":
        parts.append(gradients_applied(config, [optimizer], GradientsIntoState([optimizer])))

    def restore() -> None:
        for part in reversed(parts):
            part.undo()

    return Applied(
        technique="optimizer_state",
        summary="; ".join(part.summary for part in parts),
        loss_class=worst_loss_class(part.loss_class for part in parts),
        reasons=tuple(reason for part in parts for reason in part.reasons),
        restore=restore,
    )


def needs_format(config: OptimizerState) -> bool:
    """Return whether optimizers change their class."""
    return config.format != "32bit" or config.gradients == "into-state"


def gradients_applied(
    config: OptimizerState, optimizers: Iterable[torch.optim.Optimizer], in_backward: InBackward
) -> Applied:
    """Return what becomes of gradients, and the way back."""
    if config.gradients == "release":
        is_late = config.norm_clipping == "previous-step"
        return Applied(
            technique="optimizer_state",
            summary="parameters step inside of backward, which frees each gradient at once",
            loss_class="changed" if is_late else "exact",
            reasons=("gradients are clipped by the norm of the step before",) if is_late else (),
            restore=in_backward.remove,
        )
    adams = {memory_of(o).plain_class.__name__ for o in optimizers} - {"SGD"}
    reason = (
        f"the second moments of {', '.join(sorted(adams))} have squares of each backward's gradients, and sums of rows "
        "and columns that are estimated"
    )
    return Applied(
        technique="optimizer_state",
        summary="each backward adds its gradients to the moments and frees them",
        loss_class="changed" if adams else "exact",
        reasons=(reason,) if adams else (),
        restore=in_backward.remove,
    )


def apply_format(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> Applied | None:
    """Change the state alone; see `apply_optimizer_state`. A format that was applied before is undone first.

    Returns:
        What was done; `None` for nothing.
    """
    free_gathered(model)  # by a forward pass without backward: parameters are shards again
    check_optimizers([optimizer], config, model)
    if is_ours(optimizer) and not _is_as_asked(optimizer, config, model):
        leave(optimizer)
    if is_ours(optimizer) or is_low_bit(optimizer):
        return inherited(optimizer, was_asked=needs_format(config))
    if not needs_format(config):
        return None
    name, device = type(optimizer).__name__, _device_of(optimizer)
    kept = parameters_kept_32bit(optimizer, config, model)
    is_compact = config.checkpoint == "compact"
    if uses_bitsandbytes(optimizer, config):
        backend, is_paged = "bitsandbytes", config.format == "paged"
        become_8bit(
            optimizer,
            find_mapping(optimizer),
            kept,
            min_size=config.min_size,
            is_paged=is_paged,
            is_compact=is_compact,
        )
        keeps, restore = "paged state" if is_paged else _NAMES[config.format], become_plain
    else:
        backend, keeps, restore = "own codes", _NAMES[config.format], dequantize_state
        quantize_state(
            optimizer, config.format, kept, min_size=config.min_size, rank=config.rank, is_compact=is_compact
        )
    made = memory(optimizer)

    def tell(applied: Applied) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        num_changed = sum(_is_changed(p, config, kept) for p in parameters)
        reason = _REASONS.get(config.format) if num_changed else None
        applied.summary = (
            f"{name} keeps {keeps} for {num_changed} of {len(parameters)} parameters ({backend}, {device})"
        )
        applied.loss_class, applied.reasons = ("changed", (f"{name}'s {reason}",)) if reason else ("exact", ())

    def undo() -> None:
        if memory(optimizer) is made:  # else another format has replaced it
            restore(optimizer)

    applied = Applied(technique="optimizer_state", summary="", restore=undo, renew=tell)
    tell(applied)
    return applied


def _is_changed(p: Tensor, config: OptimizerState, kept: Collection[Tensor]) -> bool:
    return p not in kept and (config.format not in projection.METHODS or projection.is_worth_it(p, config.rank))


def has_effect(optimizers: Iterable[torch.optim.Optimizer], config: OptimizerState, model: nn.Module) -> bool:
    """Return whether the settings change anything: gradients, or the state of some parameter."""
    return config.gradients != "keep" or any(
        _is_changed(p, config, parameters_kept_32bit(optimizer, config, model))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _has_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])


def _device_of(optimizer: torch.optim.Optimizer) -> str:
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    return ", ".join(sorted(devices)) or "cpu"


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], config: OptimizerState, model: nn.Module) -> None:
    """Refuse what cannot be done with these optimizers, before anything is changed.

    Raises:
        ValueError: an optimizer, or a setting of it, that the format or `gradients` does not know, a selector that
            matches no module, or sparse gradients.
    """
    require("optimizers", "optimizer_state")
    list(select("OptimizerState.keep_32bit", config.keep_32bit, model))
    own: set[Tensor] = set()
    for optimizer in optimizers:
        is_new = not is_ours(optimizer) and not is_low_bit(optimizer)
        if is_ours(optimizer) and not _is_as_asked(optimizer, config, model):
            check_replaceable(optimizer, config)
            is_new = True
        if is_new and needs_format(config):
            _check_format(as_plain(optimizer), config)
            own.update(p for group in optimizer.param_groups for p in group["params"])
        if config.gradients != "keep":
            check_steps_parameters_alone(optimizer, "OptimizerState.gradients")
        if config.gradients == "into-state":
            check_into_state(optimizer, type(as_plain(optimizer)).__name__)
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and own.intersection(module.parameters(recurse=False)):
            raise setting_error(
                "optimizer_state",
                "cannot take sparse gradients",
                f"{name}.sparse=True",
                "Use `sparse=False`, or `optimizer_state=False`.",
            )


def _is_as_asked(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> bool:
    kept = parameters_kept_32bit(optimizer, config, model)
    return needs_format(config) and is_as_asked(optimizer, config, kept, uses_bitsandbytes(as_plain(optimizer), config))


def _check_format(optimizer: torch.optim.Optimizer, config: OptimizerState) -> None:
    if _has_shards(optimizer):
        _check_sharded(optimizer, config)
    if uses_bitsandbytes(optimizer, config):
        require_package("bitsandbytes", "`optimizer_state`")
    if config.format == "paged":
        check_paged(optimizer)
    elif uses_bitsandbytes(optimizer, config):
        find_mapping(optimizer)
    else:
        check_quantizable(optimizer, config.format)


def _check_sharded(optimizer: torch.optim.Optimizer, config: OptimizerState) -> None:
    """Refuse what a process that has a shard of each parameter cannot do.

    Raises:
        ValueError: what needs the whole of a gradient, bitsandbytes' kernels, or codes that have to be sharded anew.
    """
    require("sharded parameters", "optimizer_state")
    remedy = 'Use `optimizer_state="8bit"`, or DDP.'
    if config.format in projection.METHODS:
        rule = "in a subspace needs the whole gradient of a parameter, and FSDP2 gives each process a part of it"
        raise setting_error("OptimizerState.projection", rule, config.format, remedy)
    if uses_bitsandbytes(optimizer, config):
        name, value = ("placement", "paged") if config.format == "paged" else ("backend", config.backend)
        rule = "of bitsandbytes does not know sharded parameters (DTensor)"
        raise setting_error(f"OptimizerState.{name}", rule, value, remedy)
    if config.checkpoint == "compact":
        rule = 'must be "plain" under FSDP2: a block of codes may lie in two shards when their number is another'
        raise setting_error("OptimizerState.checkpoint", rule, config.checkpoint, 'Use `checkpoint="plain"`.')


def estimate_optimizer_state(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> int:
    """Return the bytes of the moments, on the device of the parameters, once each has been stepped; exact.

    Of sharded parameters, those of this process.
    """
    free_gathered(model)
    _check_format(optimizer, config)
    kept = parameters_kept_32bit(optimizer, config, model)
    of_bitsandbytes = uses_bitsandbytes(optimizer, config)
    kinds = moments_of(optimizer)
    total, any_code = 0, False
    for number, group in enumerate(optimizer.param_groups):
        moments = find_mapping(optimizer).moments if of_bitsandbytes else kinds.in_group(number, group)
        for p in group["params"]:
            if (not p.requires_grad and not optimizer.state.get(p)) or not as_local(p).numel():
                continue
            if p in kept or config.format in ("32bit", "paged"):
                total += len(moments) * 4 * as_local(p).numel()
            elif of_bitsandbytes:
                any_code = True
                total += len(moments) * (p.numel() + 4 * num_blocks(p.numel()))
            else:
                total += _coded_bytes(as_local(p), [kinds.is_positive[name] for name in moments], config)
    return total + (len(moments) * _CODE_MAP_BYTES if any_code else 0)


def _coded_bytes(p: Tensor, are_positive: Sequence[bool], config: OptimizerState) -> int:
    if config.format in projection.METHODS:
        if projection.is_worth_it(p, config.rank):
            return projection.num_bytes(config.format, p.shape, config.rank, len(are_positive))
        return len(are_positive) * 4 * p.numel()
    codecs = [codec_of(config.format, each) for each in are_positive]
    return sum(codec.num_bytes(p.shape) for codec in codecs if codec is not None)
