"""Filter of parameters whose state stays as it is, whatever the format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_memsave.core.selection import is_norm, select
from lightning_memsave.techniques.optimizer_state.state_config import OptimizerState

_MUST_MOVE = ("offload",)  # whatever it belongs to, as nothing is rounded


def parameters_kept_32bit(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> set[Tensor]:
    """Return the parameters that are small, complex, or of a module that `config` names.

    Of the whole model: what is unfrozen later comes into the optimizer then (`add_param_group`).

    Raises:
        ValueError: a selector that matches no module.
    """
    parameters = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    kept: set[Tensor] = {p for p in parameters if p.numel() < config.min_size or p.is_complex()}
    for module in select("OptimizerState.keep_32bit", config.keep_32bit, model):
        kept.update(module.parameters())
    if config.format in _MUST_MOVE:
        return kept
    heads = _output_embeddings(model)
    for module in model.modules():
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module in heads
        if (is_norm(module) and config.keep_norms_32bit) or (is_embedding and config.keep_embeddings_32bit):
            kept.update(module.parameters(recurse=False))
    return kept


def _output_embeddings(model: nn.Module) -> set[nn.Module]:
    """Return the heads that the models of `transformers` inside of `model` name: one score for each row of a table."""
    named = (getattr(module, "get_output_embeddings", None) for module in model.modules())
    return {head for find in named if callable(find) and isinstance(head := find(), nn.Module)}
