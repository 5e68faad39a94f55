"""LoRA through `peft`: every technique beside it, through real trainers."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import (
    Checkpointing,
    Ledger,
    LowPrecision,
    MemSave,
    OptimizerState,
    Sparsity,
    apply_checkpointing,
    apply_low_precision,
)

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def base_model(kind="llama"):
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**SHAPE, **HEADS, use_cache=False, attn_implementation="eager")
        return transformers.LlamaForCausalLM(config)
    shape = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 61, "use_cache": False}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # it would draw for each microbatch
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **no_dropout))


def adapted(kind="llama", base=None, **settings):
    targets = TARGETS if kind == "llama" else ["c_attn", "c_fc"]
    options = {"r": 4, "lora_alpha": 8, "target_modules": targets, "fan_in_fan_out": kind != "llama"} | settings
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base or base_model(kind), config)
    torch.manual_seed(1)
    with torch.no_grad():  # B starts at zero, where A has no gradient
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.02)
    return model


class Finetune(L.LightningModule):
    def __init__(self, model=None, lr=1e-3):
        super().__init__()
        self.model, self.lr = model if model is not None else adapted(), lr

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)  # all of them: the frozen ones get no state


class AdaptersOnly(Finetune):
    """Checkpoints without the base model, which is on disk already."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}


class Look(L.Callback):
    """What holds after each batch, and what is there between steps."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        frozen = [p for p in pl_module.parameters() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)
        (optimizer,) = trainer.optimizers
        assert not any(p in optimizer.state for p in frozen)
        assert len(optimizer.state) > 0
        self.keys = list(pl_module.state_dict())
        self.dtypes = {name: p.dtype for name, p in pl_module.named_parameters()}


def data(vocabulary=61):
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.randint(0, vocabulary, (24, 12), generator=generator), batch_size=8)


def fit(memsave, module, *, epochs=2, ckpt=None, callbacks=(), **options):
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    torch.manual_seed(5)
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[*([memsave] if memsave else []), *callbacks],
        enable_checkpointing=False,
        **settings,
        **options,
    )
    trainer.fit(module, data(), ckpt_path=ckpt)
    return trainer


def trained_part(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def plain():
    torch.set_num_threads(1)
    runs = {}
    for kind in ("llama", "gpt2"):
        module = Finetune(adapted(kind))
        fit(None, module)
        runs[kind] = module
    return runs


EVERYTHING = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
EXACT = {
    "lossless": {},
    "microbatch": {"microbatch": 3},
    "recovery": {"microbatch": "auto"},
    "activations": {"activations": "exact"},
    "blocks": {"checkpointing": "blocks"},
    "sqrt": {"checkpointing": "sqrt"},
    "release": {"recipe": "measure", "optimizer_state": OptimizerState(first_moment="32bit", gradients="release")},
}
CHANGED = {
    "int8": {"activations": "int8"},
    "8bit": {"optimizer_state": OptimizerState(**EVERYTHING)},
    "4bit": {"optimizer_state": OptimizerState(first_moment="4bit", **EVERYTHING)},
    "bf16-sr": {"precision": "bf16-sr"},
    "bf16+8": {"precision": "bf16+8"},
    "bf16-kahan": {"precision": "bf16-kahan"},
    "fp16-scaled": {"precision": "fp16-scaled"},
    "frozen too": {"precision": LowPrecision(lower_frozen=True)},
    "frozen in 8 bits": {"precision": LowPrecision(format="int8-sr", lower_frozen=True)},
    "all": {
        "recipe": "measure",
        "precision": LowPrecision(lower_frozen=True),
        "activations": "int8",
        "checkpointing": "blocks",
        "optimizer_state": OptimizerState(gradients="release", **EVERYTHING),
    },
}


def check_frozen_is_left_alone(module, expected, tolerance=0.0):
    pairs = zip(module.named_parameters(), expected.parameters(), strict=True)
    for (name, p), q in pairs:
        if not p.requires_grad:
            assert (p - q).abs().max() <= tolerance * q.abs().max(), name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("setting", EXACT)
def test_exact_techniques_learn_what_plain_peft_learns(setting, kind, plain):
    module, look = Finetune(adapted(kind)), Look()
    expected_keys = list(module.state_dict())
    memsave = MemSave(**EXACT[setting])
    fit(memsave, module, callbacks=[look])
    assert look.keys == list(module.state_dict()) == expected_keys
    for (name, a), b in zip(trained_part(module).items(), trained_part(plain[kind]).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
    check_frozen_is_left_alone(module, plain[kind])
    assert memsave.report.loss_class == "exact"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("setting", CHANGED)
def test_the_others_leave_the_base_alone_and_learn_nearly_the_same(setting, kind, plain):
    module, look = Finetune(adapted(kind)), Look()
    start = trained_part(module)
    fit(MemSave(**CHANGED[setting]), module, callbacks=[look])
    assert look.keys == list(Finetune(adapted(kind)).state_dict())
    is_lowered = setting in ("frozen too", "frozen in 8 bits", "all")
    tolerance = 2.0**-7 if setting == "frozen in 8 bits" else 2.0**-8 if is_lowered else 0.0
    check_frozen_is_left_alone(module, Finetune(adapted(kind)), tolerance)
    base = {
        dtype for name, dtype in look.dtypes.items() if "lora" not in name and "norm" not in name and "ln_" not in name
    }
    assert base == {torch.bfloat16 if is_lowered else torch.float32}
    if kind == "llama":
        ours, theirs, before = (
            torch.cat([p.flatten() for p in t.values()])
            for t in (trained_part(module), trained_part(plain[kind]), start)
        )
        assert torch.cosine_similarity(ours - before, theirs - before, dim=0) > 0.5
    assert all(p.isfinite().all() for p in module.parameters())


def gradients(model, batch):
    model.zero_grad()
    logits = model(input_ids=batch).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"lora_dropout": 0.0, "bias": "lora_only"}])
def test_gradients_through_regions_equal_those_of_plain_peft(settings):
    batch = next(iter(data()))
    model = adapted(**settings).double()
    expected = gradients(copy.deepcopy(model), batch)
    assert expected
    assert all("lora" in name or "bias" in name for name in expected)
    applied = apply_checkpointing(model, Checkpointing())
    found = gradients(model, batch)
    applied.undo()
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


def test_modules_that_are_trained_whole_are_trained_here_too():
    model = adapted(modules_to_save=["lm_head"])
    module = Finetune(model)
    before = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    assert any("lm_head" in name for name in before)
    fit(MemSave(precision="bf16+8", optimizer_state=OptimizerState(**EVERYTHING)), module)
    moved = {n for n, p in module.named_parameters() if p.requires_grad and not torch.equal(p, before[n])}
    assert any("lm_head" in name for name in moved)


def test_embeddings_have_adapters_of_another_kind():
    model = adapted(target_modules=["embed_tokens", "q_proj"])
    module = Finetune(model)
    before = trained_part(module)
    assert any("lora_embedding" in name for name in before)
    look = Look()
    fit(MemSave(precision="bf16+8", checkpointing="blocks"), module, callbacks=[look])
    assert torch.bfloat16 in {d for n, d in look.dtypes.items() if "lora_embedding" in n}
    assert all(not torch.equal(p, before[n]) for n, p in trained_part(module).items() if "lora_embedding_B" in n)
    assert list(module.state_dict()) == list(Finetune(adapted(target_modules=["embed_tokens", "q_proj"])).state_dict())


def test_sparse_adapters_and_a_dense_base():
    module = Finetune(adapted(r=16))
    memsave = MemSave(sparsity=Sparsity(sparsity=0.5, min_size=256))
    fit(memsave, module)
    adapters = {name: p for name, p in module.named_parameters() if "lora_A" in name}
    assert all((p == 0).float().mean() >= 0.49 for p in adapters.values())
    assert all((p == 0).float().mean() < 0.1 for n, p in module.named_parameters() if "base_layer.weight" in n)
    (summary,) = (a.summary for a in memsave.report.applied if a.technique == "sparsity")
    assert "frozen" in summary


# ------------------------------------------------------------------------------- adapters alone on disk
class SaveAt(L.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


STORED = {
    "plain": {},
    "bf16-sr": {"precision": "bf16-sr"},
    "bf16+8": {"precision": "bf16+8", "optimizer_state": OptimizerState(**EVERYTHING)},
    "frozen too": {"precision": LowPrecision(format="bf16+8", lower_frozen=True)},
}


@pytest.mark.parametrize("setting", STORED)
def test_checkpoints_of_adapters_alone_resume_bit_for_bit(setting, tmp_path):
    path = tmp_path / "adapters.ckpt"
    straight, resumed = AdaptersOnly(), AdaptersOnly()
    fit(MemSave(**STORED[setting]), straight, epochs=4, callbacks=[SaveAt(path, 6)])
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"].keys() == trained_part(straight).keys()
    assert len(saved["optimizer_states"][0]["state"]) == len(trained_part(straight))
    fit(MemSave(**STORED[setting]), resumed, epochs=4, ckpt=path)
    for (name, a), b in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    fit(None, AdaptersOnly(), epochs=4, ckpt=path)  # without memory saving


def test_what_peft_saves_in_the_middle_is_the_whole_weight(tmp_path):
    class SavePretrained(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 4:
                pl_module.model.save_pretrained(tmp_path)
                self.whole = {k: v for k, v in pl_module.state_dict().items() if "lora" in k}

    save = SavePretrained()
    fit(MemSave(precision="bf16+8"), Finetune(), callbacks=[save])
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path)
    found = {name: value for name, value in loaded.state_dict().items() if "lora" in name}
    assert len(found) == len(save.whole) > 0
    for name, value in found.items():
        assert torch.equal(value, save.whole[f"model.{name}"]), name
        assert value.dtype == torch.float32


# ------------------------------------------------------------------------------- bytes
def test_bytes_of_weights_gradients_and_state_are_those_of_the_adapters():
    model = adapted()
    num_base, num_adapters = (
        sum(p.numel() for p in model.parameters() if p.requires_grad == trained) for trained in (False, True)
    )
    num_norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_low_precision(model, optimizer, LowPrecision(lower_frozen=True))
    batch = next(iter(data()))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            gradients(model, batch)
        optimizer.step()
    assert sum(p.nbytes for p in model.parameters()) == 2 * (num_base - num_norms + num_adapters) + 4 * num_norms
    assert sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == 2 * num_adapters
    state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    assert sum(t.nbytes for t in state) == 8 * num_adapters
    with Ledger().watching(model, [optimizer], batch) as ledger:
        pass
    assert ledger.measurement.by_category["optimizer_state"] == 8 * num_adapters + 4 * len(optimizer.state)


# ------------------------------------------------------------------------------- a quantised base
def quantised():
    """LoRA on a base in 4 bits, as transformers makes it of `BitsAndBytesConfig(load_in_4bit=True)`."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = base_model()
    for layer in base.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, nn.Linear):
                    short = bitsandbytes.nn.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        compute_dtype=torch.float32,
                        quant_type="nf4",
                    )
                    short.weight = bitsandbytes.nn.Params4bit(
                        linear.weight.detach().clone(), requires_grad=False, quant_type="nf4"
                    )
                    setattr(parent, name, short.to("cpu"))
    for p in base.parameters():
        p.requires_grad_(False)
    return adapted(base=base)


QUANTISED = {
    "lossless": {},
    "activations": {"activations": "exact"},
    "blocks": {"checkpointing": "blocks"},
    "microbatch": {"microbatch": 4},
    "8bit": {"optimizer_state": OptimizerState(**EVERYTHING)},
    "bf16-sr": {"precision": LowPrecision(lower_frozen=True)},
    "release": {"recipe": "measure", "optimizer_state": OptimizerState(first_moment="32bit", gradients="release")},
}


@pytest.mark.parametrize("setting", QUANTISED)
def test_a_base_in_4_bits(setting):
    module, reference = AdaptersOnly(quantised()), AdaptersOnly(quantised())
    short = {name: p for name, p in module.named_parameters() if p.dtype == torch.uint8}
    assert len(short) == 3 * 7
    before = {name: p.detach().clone() for name, p in short.items()}
    fit(None, reference)
    memsave = MemSave(**QUANTISED[setting])
    fit(memsave, module, callbacks=[Look()])
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters() if name in before)
    if memsave.report.loss_class == "exact":
        for (name, a), b in zip(trained_part(module).items(), trained_part(reference).values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
    else:
        assert all(p.isfinite().all() for p in trained_part(module).values())


def test_scales_of_a_base_in_4_bits_are_weights():
    model = quantised()
    with Ledger().watching(model) as ledger:
        pass
    scales = 0
    for p in model.parameters():
        if p.dtype == torch.uint8:
            state = p.quant_state  # its scales are quantised in turn
            tensors = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
            scales += sum(t.nbytes for t in tensors)
    assert scales > 0
    expected = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + scales
    assert ledger.measurement.by_category["weights"] == ledger.measurement.peak_bytes == expected
