"""Apply the techniques of a session's recipe to a trainer that is being set up."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_memsave.core.errors import NoEffectWarning, setting_error
from lightning_memsave.lightning_compat import is_tuned
from lightning_memsave.loops.deferred_logs import refusing_logs
from lightning_memsave.loops.forward_scope import ForwardScope, may_drop_logits
from lightning_memsave.loops.kept_weights import KeptWeights
from lightning_memsave.loops.low_rank_training import LowRankTraining
from lightning_memsave.loops.partial_training import PartialTraining
from lightning_memsave.loops.planned_checkpointing import PlannedCheckpointing
from lightning_memsave.loops.session import Session
from lightning_memsave.loops.sparse_training import SparseTraining
from lightning_memsave.saved_tensors.codec_names import HEAD
from lightning_memsave.strategies.precision_plugin import lower_precision
from lightning_memsave.techniques.activation_compression import ActivationCompression, has_wide_head
from lightning_memsave.techniques.checkpointing import Checkpointing, apply_checkpointing, input_store
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.low_rank import LowRank
from lightning_memsave.techniques.optimizer_state import OptimizerState, check_optimizers
from lightning_memsave.techniques.registry import Config, technique_of
from lightning_memsave.techniques.sparse_update import SparseUpdate
from lightning_memsave.techniques.sparsity import Sparsity
from lightning_memsave.techniques.tiling import Tiles, Tiling
from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone
from lightning_memsave.torch_internals.held_optimizers import stepping
from lightning_memsave.torch_internals.module_tree import check_shapes
from lightning_memsave.torch_internals.sharded_parameters import check_no_offload, frees_weights, is_sharded

C = TypeVar("C", bound=Config)


def apply_to_model(session: Session, trainer: L.Trainer) -> None:
    """Change layers and lower weights, before the strategy moves the model and makes optimizers."""
    _keep_weights(session, trainer)
    session.compact_training = None
    for kind, training in _TRAININGS.items():
        _apply(session, trainer, kind, functools.partial(_change_layers, training))
    _apply(session, trainer, LowPrecision, _lower_weights)


def apply_to_steps(session: Session, trainer: L.Trainer) -> None:
    """Open what steps run in, once the model is where it is trained."""
    _apply(session, trainer, Tiling, _make_tiles)  # first, so that regions go around tiles
    _apply(session, trainer, Checkpointing, _make_regions)
    _apply(session, trainer, ActivationCompression, _open_store)


def apply_to_evaluation(session: Session, trainer: L.Trainer) -> None:
    """Open what validation, test and prediction run in, where there is no fit."""
    config, module = session.recipe.get(ActivationCompression), trainer.lightning_module
    is_default = ActivationCompression in session.recipe.by_default
    if config is None or HEAD not in config.written_out or (is_default and not has_wide_head(module)):
        return
    with suppress(ValueError):  # most of the model is compiled
        session.scopes.evaluated = ForwardScope(trainer, ActivationCompression(codecs=(HEAD,)))


def check_made_optimizers(session: Session, trainer: L.Trainer, *, is_wrapped: bool) -> None:
    """Refuse optimizers that the recipe cannot change; weights of a default that steps aside have 32 bits again.

    Args:
        session: of the run.
        trainer: its optimizers are made.
        is_wrapped: whether DDP has wrapped the model, whose buckets have the dtype that weights had.

    Raises:
        ValueError: for an optimizer, and a technique that was asked for by name; or FSDP2 shards nothing,
            or keeps in host memory what Lightning moves to the device.
    """
    if session.recipe.techniques:
        check_no_offload(trainer.lightning_module, trainer.strategy.root_device.type)
        if trainer.world_size > 1:
            _check_shards(trainer.lightning_module, trainer.world_size)
    _apply(session, trainer, OptimizerState, _check_state)
    if not is_wrapped:
        _apply(session, trainer, LowPrecision, _check_steps)
    if session.weights is not None and session.recipe.get(LowPrecision) is None:
        for applied in session.changes:
            if applied.technique == "low_precision":
                applied.undo()
                if session.kept_weights is not None:
                    session.kept_weights.put_back()  # they were rounded
        session.changes = [applied for applied in session.changes if applied.technique != "low_precision"]
        session.weights = None


def _apply(
    session: Session, trainer: L.Trainer, kind: type[C], technique: Callable[[Session, L.Trainer, C], None]
) -> None:
    """Call a technique, if it is on; a default that this model or optimizer cannot carry steps aside."""
    config = session.recipe.get(kind)
    if config is None:
        return
    try:
        technique(session, trainer, config)
    except ValueError as error:
        if kind not in session.recipe.by_default:
            raise
        rank_zero_info(f"memsave: {technique_of(config).stem} is left out: {error}")
        session.recipe = session.recipe.without(kind)


def leave_layers_dense(session: Session, trainer: L.Trainer, error: Exception) -> bool:
    """Give layers back that a recipe has changed by default, as optimizers cannot be made for them.

    Args:
        session: of the run.
        trainer: whose optimizers are to be made, once more.
        error: that came of it.

    Returns:
        Whether there are such layers.
    """
    recipe = session.recipe
    changing = [t for t in recipe.techniques if type(t) in _TRAININGS and type(t) in recipe.by_default]
    if session.compact_training is None or not changing:
        return False
    for applied in reversed(session.changes):
        applied.undo()
    session.changes, session.compact_training, session.weights = [], None, None
    if session.kept_weights is not None:
        session.kept_weights.put_back()
    for config in changing:
        rank_zero_info(f"memsave: {technique_of(config).stem} is left out: {error}")
        session.recipe = session.recipe.without(type(config))
    _apply(session, trainer, LowPrecision, _lower_weights)
    return True


def _check_shards(module: nn.Module, num_processes: int) -> None:
    """Refuse FSDP2 on a mesh of one process, beside others: each "shard" is the whole, and nothing is saved."""
    if not frees_weights(module):
        return
    sharded: list[Any] = [p for p in module.parameters() if is_sharded(p)]
    if sharded and all(p.device_mesh.size() == 1 for p in sharded):
        raise setting_error(
            "strategy",
            'must have a mesh whose dimension "data_parallel" has more than one process, for `fully_shard` to shard',
            str(sharded[0].device_mesh),
            f'Use `strategy="memsave_fsdp"`, or '
            f"`ModelParallelStrategy(data_parallel_size={num_processes}, tensor_parallel_size=1)`.",
        )


def _keep_weights(session: Session, trainer: L.Trainer) -> None:
    """Keep weights before they change."""
    if any(session.recipe.get(kind) is not None for kind in (LowPrecision, Sparsity, LowRank)):
        session.kept_weights = KeptWeights(trainer.lightning_module, copies=is_tuned(trainer))


_TRAININGS: dict[type[Config], Any] = {
    Sparsity: SparseTraining,
    LowRank: LowRankTraining,
    SparseUpdate: PartialTraining,
}
"""What trains layers that change, by its settings."""


def _change_layers(training: Any, session: Session, trainer: L.Trainer, config: Config) -> None:
    """Change layers: make them sparse, give them factors, or freeze a part; as in the run that is resumed."""
    session.compact_training = training(trainer, config, session.saved_training.get(training.technique))
    session.changes.append(session.compact_training.applied)


def _lower_weights(session: Session, trainer: L.Trainer, config: LowPrecision) -> None:
    check_shapes("precision", trainer.lightning_module)
    session.weights, applied = lower_precision(trainer, config)
    session.changes.append(applied)


def _make_tiles(session: Session, trainer: L.Trainer, config: Tiling) -> None:
    session.scopes.tiles = Tiles(trainer.lightning_module, config, apart=functools.partial(refusing_logs, trainer))


def _make_regions(session: Session, trainer: L.Trainer, config: Checkpointing) -> None:
    """Make the regions that are known, or see to it that the first batch is rehearsed."""
    scopes = session.scopes
    if config.needs_a_plan:
        check_shapes("checkpointing", trainer.lightning_module)
        scopes.planned = PlannedCheckpointing(trainer, config)
    else:
        scopes.regions = apply_checkpointing(trainer.lightning_module, config)
    scopes.region_inputs = input_store() if config.offload else None


def _open_store(session: Session, trainer: L.Trainer, config: ActivationCompression) -> None:
    """Open the store; that a loss keeps no logits is in recipes for models which end in many classes."""
    recipe = session.recipe
    is_named = HEAD in config.written_out and ActivationCompression not in recipe.by_default
    if is_named and frees_weights(trainer.lightning_module):
        warnings.warn(
            f'`activations="{HEAD}"` has no effect under FSDP2: the weight of a head is freed before backward, so '
            "logits are kept.",
            NoEffectWarning,
            stacklevel=2,
        )
    if ActivationCompression in recipe.by_default and not may_drop_logits(trainer.lightning_module):
        codecs = tuple(codec for codec in config.codecs if codec != HEAD)
        if not codecs:
            session.recipe = recipe.without(ActivationCompression)
            return
        config = replace(config, codecs=codecs)
        session.recipe = recipe.with_settings(config)
    session.scopes.activations = ForwardScope(trainer, config)


def _check_state(session: Session, trainer: L.Trainer, config: OptimizerState) -> None:
    check_shapes("optimizer_state", trainer.lightning_module)
    optimizers = stepping(trainer.strategy.optimizers)
    if config.gradients != "keep" and len(optimizers) > len(trainer.strategy.optimizers):
        if OptimizerState not in session.recipe.by_default or config.format == "32bit":
            raise setting_error(
                "OptimizerState.gradients",
                f'="{config.gradients}" needs optimizers that hold no others: what the outer `step` decides (a '
                "learning rate, or to leave a step out) would come after the steps of those inside",
                ", ".join(type(each).__name__ for each in trainer.strategy.optimizers),
                'Use `OptimizerState(gradients="keep")`.',
            )
        config = replace(config, gradients="keep")
        session.recipe = session.recipe.with_settings(config)
    check_optimizers(optimizers, config, trainer.lightning_module)


def _check_steps(session: Session, trainer: L.Trainer, config: LowPrecision) -> None:
    optimizers = stepping(trainer.strategy.optimizers)
    if config.format == "fp16-scaled" and len(optimizers) > len(trainer.strategy.optimizers):
        raise setting_error(
            "precision",
            '="fp16-scaled" needs optimizers that hold no others: an overflow skips the step of all parameters',
            ", ".join(type(each).__name__ for each in trainer.strategy.optimizers),
            'Use `precision="bf16-sr"`, which needs no scaling.',
        )
    for optimizer in optimizers:
        check_steps_parameters_alone(optimizer, "precision")
