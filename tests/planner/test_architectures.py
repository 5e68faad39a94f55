"""Architectures of `transformers`, small, made from their configs: plans lower the peak and leave each bit alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as t

from lightning_memsave import Checkpointing, Ledger, apply_checkpointing
from lightning_memsave.planner.checkpointing import plan_checkpointing

LAYERS = 4
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TEXT = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, **NO_TOKENS}
WIDE = {**TEXT, "intermediate_size": 64}
GROUPED = {**WIDE, "num_key_value_heads": 1, "head_dim": 16}
MASKED = {**WIDE, "pad_token_id": 0}


def ids(rows=4, length=24):
    return torch.randint(1, 40, (rows, length))


def decoder(kind, config):
    return lambda: (getattr(t, kind)(config()), {"input_ids": (x := ids()), "labels": x})


def seq2seq(kind, config):
    return lambda: (getattr(t, kind)(config()), {"input_ids": ids(), "labels": ids(length=12)})


def pixels(kind, config):
    return lambda: (
        getattr(t, kind)(config()),
        {"pixel_values": torch.randn(16, 3, 32, 32), "labels": torch.tensor([0, 1] * 8)},
    )


def audio(kind, config):
    return lambda: (getattr(t, kind)(config()), {"input_values": torch.randn(2, 2000), "labels": torch.tensor([0, 1])})


AUDIO = {**WIDE, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (10, 4), "num_feat_extract_layers": 2}
AUDIO |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}
BART = {
    "encoder_layers": 4,
    "decoder_layers": 4,
    "max_position_embeddings": 64,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
BART |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": 40}
BART |= {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {"vocab_size": 40, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 3}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": LAYERS, "n_head": 2, "n_positions": 32, **NO_TOKENS}
MAMBA = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 4, **NO_TOKENS}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES = {
    "gpt2": decoder("GPT2LMHeadModel", lambda: t.GPT2Config(**GPT2)),
    "gpt_neox": decoder("GPTNeoXForCausalLM", lambda: t.GPTNeoXConfig(**WIDE)),
    "opt": decoder(
        "OPTForCausalLM",
        lambda: t.OPTConfig(
            **{**TEXT, "pad_token_id": 1}, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64
        ),
    ),
    "llama": decoder("LlamaForCausalLM", lambda: t.LlamaConfig(**GROUPED)),
    "mistral": decoder("MistralForCausalLM", lambda: t.MistralConfig(**GROUPED)),
    "qwen2": decoder("Qwen2ForCausalLM", lambda: t.Qwen2Config(**{**WIDE, "num_key_value_heads": 1})),
    "gemma": decoder("GemmaForCausalLM", lambda: t.GemmaConfig(**GROUPED)),
    "phi": decoder("PhiForCausalLM", lambda: t.PhiConfig(**WIDE)),
    "bloom": decoder(
        "BloomForCausalLM", lambda: t.BloomConfig(vocab_size=40, hidden_size=32, n_layer=LAYERS, n_head=2, **NO_TOKENS)
    ),
    "falcon": decoder("FalconForCausalLM", lambda: t.FalconConfig(**TEXT)),
    "mixtral": decoder("MixtralForCausalLM", lambda: t.MixtralConfig(**EXPERTS)),
    "mamba": decoder("MambaForCausalLM", lambda: t.MambaConfig(**MAMBA)),
    "bert": decoder("BertForMaskedLM", lambda: t.BertConfig(**MASKED)),
    "roberta": decoder("RobertaForMaskedLM", lambda: t.RobertaConfig(**MASKED)),
    "distilbert": decoder(
        "DistilBertForMaskedLM",
        lambda: t.DistilBertConfig(vocab_size=40, dim=32, hidden_dim=64, n_layers=LAYERS, n_heads=2),
    ),
    "electra": decoder("ElectraForMaskedLM", lambda: t.ElectraConfig(**MASKED, embedding_size=32)),
    "deberta-v2": decoder(
        "DebertaV2ForMaskedLM", lambda: t.DebertaV2Config(**MASKED, relative_attention=True, pos_att_type="c2p|p2c")
    ),
    "albert": decoder("AlbertForMaskedLM", lambda: t.AlbertConfig(**MASKED, embedding_size=32)),
    "t5": seq2seq("T5ForConditionalGeneration", lambda: t.T5Config(**T5)),
    "bart": seq2seq("BartForConditionalGeneration", lambda: t.BartConfig(**BART)),
    "vit": pixels("ViTForImageClassification", lambda: t.ViTConfig(**{**WIDE, "image_size": 32, "patch_size": 8})),
    "swin": pixels("SwinForImageClassification", lambda: t.SwinConfig(**SWIN)),
    "convnext": pixels(
        "ConvNextForImageClassification",
        lambda: t.ConvNextConfig(
            hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2, image_size=32, drop_path_rate=0.1
        ),
    ),
    "wav2vec2": audio("Wav2Vec2ForSequenceClassification", lambda: t.Wav2Vec2Config(**AUDIO)),
    "hubert": audio("HubertForSequenceClassification", lambda: t.HubertConfig(**AUDIO)),
}


def one_step(model, batch):
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def peak(model, batch):
    model.zero_grad()
    with Ledger().watching(model, batch=batch) as ledger:
        one_step(model, batch)
    return ledger.measurement.peak_bytes


BUDGET = pytest.param(Checkpointing(budget=0.5), id="budget", marks=pytest.mark.slow)


@pytest.mark.parametrize("config", [pytest.param(Checkpointing(method="sqrt"), id="sqrt"), BUDGET])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_bits_for_less(name, config):
    """`use_cache` is on by default and fills an object that is passed along, so that blocks cannot be regions; half
    of the activations is asked for without it."""
    model, batch = ARCHITECTURES[name]()
    model.train()
    if config.budget is not None:
        model.config.use_cache = False
    one_step(model, batch)  # fills caches
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    model.zero_grad()
    plan = plan_checkpointing(model, lambda: one_step(model, batch), config, held=[*batch.values()])
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    assert plan.regions
    plain_peak = peak(plain, batch)
    applied = apply_checkpointing(model, plan)
    peak(model, batch)  # learns which buffers change
    model.load_state_dict(plain_before := copy.deepcopy(model.state_dict()))
    plain.load_state_dict(plain_before)
    losses = one_step(plain, batch), one_step(model, batch)
    assert torch.equal(*losses)
    for (key, a), (other, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert key == other
        assert (a.grad is None) == (b.grad is None), key
        assert a.grad is None or torch.equal(a.grad, b.grad), key
    assert all(map(torch.equal, plain.buffers(), model.buffers()))
    assert list(model.state_dict()) == keys
    assert peak(model, batch) < plain_peak
    applied.undo()
    assert peak(model, batch) == plain_peak
