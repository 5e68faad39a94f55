"""The architectures of `transformers` at toy size, with random weights: models that nobody here wrote.

Every model type that has a head for causal, masked or sequence-to-sequence language modelling, or for classifying
images, is built from its default configuration, shrunk by the names of its settings. What cannot be built that way (a
package that is missing, inputs of its own) is left out: see `NUM_BUILT`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto as auto

HEADS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "vision": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
}
NUM_BUILT = {"causal": 144, "masked": 46, "seq2seq": 29, "vision": 32}
"""How many of each kind are built, with transformers 5.23."""
WIDTH, WORDS, LENGTH, PIXELS = 32, 120, 24, 32
MOST_WEIGHTS = 30_000_000

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), WIDTH),
    **dict.fromkeys(("decoder_hidden_size", "encoder_hidden_size", "word_embed_proj_dim", "hidden_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "feed_forward_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 2),
    **dict.fromkeys(("vocab_size",), WORDS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
    "image_size": PIXELS,
    "patch_size": 8,
    "use_cache": False,
}
FEWER: dict[str, Any] = {
    name: value for name, value in SIZES.items() if value != WIDTH and name not in ("head_dim", "patch_size")
} | {"image_size": 64}
"""Less depth and fewer words at the default width: for what is not built at toy width."""


def shrink(config: PretrainedConfig, sizes: dict[str, Any]) -> PretrainedConfig:
    """Toy sizes in place of the default ones, in nested configurations as well."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrink(value, sizes)
        elif name in sizes and isinstance(value, int):
            with contextlib.suppress(Exception):
                setattr(config, name, sizes[name])
    return config


def names(kind: str) -> list[str]:
    """Model types with a head of this kind."""
    return sorted(auto_type for auto_type in HEADS[kind]._model_mapping if auto_type in CONFIG_MAPPING)


def build(kind: str, name: str) -> tuple[nn.Module, Callable[[], Tensor]] | None:
    """A model and its loss on a batch of random inputs; `None` where it needs more than this."""
    for sizes in (SIZES, FEWER, {"image_size": 64}):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            config = shrink(CONFIG_MAPPING[name](), sizes)
            head = HEADS[kind][type(config)]
            head = head[0] if isinstance(head, tuple) else head
            with torch.device("meta"):
                if sum(p.numel() for p in head(copy.deepcopy(config)).parameters()) > MOST_WEIGHTS:
                    continue
            model = head(copy.deepcopy(config)).train()
            loss_of = functools.partial(_loss, model, inputs_for(kind, model))
            loss_of().backward()
            return model, loss_of
    return None


def _loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def inputs_for(kind: str, model: nn.Module) -> dict[str, Tensor]:
    """A batch of random words or images, and labels."""
    if kind != "vision":
        ids = torch.randint(5, WORDS, (4, LENGTH))
        return {"input_ids": ids, "labels": ids.clone()}
    size = getattr(model.config, "image_size", 64)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(model.config, "num_channels", 3)
    return {"pixel_values": torch.randn(2, channels, height, width), "labels": torch.tensor([0, 1])}


def gradients(model: nn.Module, loss_of: Callable[[], Tensor], scope: Any = None) -> Tensor:
    """Of one step, with the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(1)
    with contextlib.nullcontext() if scope is None else scope():
        loss = loss_of()
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
