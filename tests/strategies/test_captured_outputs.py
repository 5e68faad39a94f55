"""Hooks that keep what modules inside a model return (`output_hidden_states` of transformers) see whole calls."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_memsave import MemSave
from tests.strategies.quiet_runs import QUIET

TILES = [{"tiling": "samples"}, {"tiling": "positions"}]
SHAPE = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager", use_cache=False)),
    "BERT": lambda: BertForMaskedLM(BertConfig(**SHAPE, **NO_DROPOUT, attn_implementation="eager")),
}


class Language(L.LightningModule):
    """Has a hidden state and an attention in its loss, and notes how many there are."""

    def __init__(self, model):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.counts = model().double(), []

    def training_step(self, batch, batch_idx):
        out = self.model(input_ids=batch, labels=batch, output_hidden_states=True, output_attentions=True)
        self.counts.append((len(out.hidden_states), len(out.attentions)))
        return out.loss + out.hidden_states[1].pow(2).mean() + out.attentions[1].pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def tokens():
    return torch.randint(0, 50, (24, 12), generator=torch.Generator().manual_seed(1))


def trained(module, data, memsave=None):
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1}, callbacks=[memsave] if memsave else [])
    trainer.fit(module, DataLoader(data, 8))
    return module


def assert_alike(found, plain, memsave):
    assert memsave.report.loss_class == "exact"
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, msg=name)


@pytest.mark.filterwarnings("ignore:tiling had no effect", "ignore:.*nothing was cut")
@pytest.mark.parametrize("settings", [*TILES, {"recipe": "exact"}], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_models_return_as_many_hidden_states_as_in_plain_lightning(model, settings):
    memsave = MemSave(**settings, summary=False)
    found, plain = trained(Language(MODELS[model]), tokens(), memsave), trained(Language(MODELS[model]), tokens())
    assert set(found.counts) == set(plain.counts) == {(4, 3)}
    assert_alike(found, plain, memsave)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Registers(Block):
    """Registers a hook in its first call, and marks that it has, as transformers does."""

    def forward(self, x):
        if not getattr(self, "is_hooked", False):
            self.up.register_forward_hook(lambda module, args, output: None)
            self.is_hooked = True
        return super().forward(x)


class Features(L.LightningModule):
    """Adds what a hook inside of a block has kept to its loss, from batch number `start` on."""

    def __init__(self, start=0, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.start, self.kept = nn.Sequential(block(), block()).double(), start, []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.start:
            self.blocks[0].up.register_forward_hook(lambda module, args, output: self.kept.append(output))
        self.kept = []
        loss = self.blocks(batch).square().mean()
        return loss + sum(each.pow(2).mean() for each in self.kept)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def numbers():
    return torch.randn(32, 6, 8, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("settings", TILES, ids=str)
def test_a_block_is_cut_until_somebody_hooks_what_is_inside(settings, start):
    memsave = MemSave(**settings, summary=False)
    found, plain = trained(Features(start), numbers(), memsave), trained(Features(start), numbers())
    assert_alike(found, plain, memsave)
    (tiles,) = [each.summary for each in memsave.report.applied if each.technique == "tiling"]
    assert "module" in tiles


@pytest.mark.filterwarnings("ignore:tiling had no effect")
@pytest.mark.parametrize("settings", [*TILES, {"checkpointing": "blocks"}, {"recipe": "exact"}], ids=str)
def test_a_hook_that_a_first_call_registers_is_there_once(settings):
    memsave = MemSave(**settings, summary=False)
    found = trained(Features(9, Registers), numbers(), memsave)
    assert [len(block.up._forward_hooks) for block in found.blocks] == [1, 1]
    assert_alike(found, trained(Features(9, Registers), numbers()), memsave)


class RunsOut(Features):
    """Calls its blocks from the third batch on alone, where memory runs out once."""

    def training_step(self, batch, batch_idx):
        if batch_idx < 2:
            return self.blocks[0].up(batch).square().mean()
        loss = super().training_step(batch, batch_idx)
        if FAILURES.pop("left", False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss


FAILURES: dict[str, bool] = {}


def test_a_hook_that_a_failed_try_registers_is_there_once():
    FAILURES["left"] = True
    memsave = MemSave(summary=False)
    found = trained(RunsOut(9, Registers), numbers(), memsave)
    assert not FAILURES
    assert [len(block.up._forward_hooks) for block in found.blocks] == [1, 1]
    assert_alike(found, trained(RunsOut(9, Registers), numbers()), memsave)


def test_a_module_that_is_named_for_tiles_must_not_be_hooked_inside():
    module = Features()
    with pytest.raises(ValueError, match="a hook of `up` in it would see slices"):
        trained(module, numbers(), MemSave(tiling="blocks.0", summary=False))
