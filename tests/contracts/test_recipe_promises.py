"""What recipes save on the models that README names, as predicted; measured peaks equal predictions byte for byte."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_memsave import MemSave, predict
from lightning_memsave.demo.model import ImageClassifier, WideResNet

LEAST = {"wide resnet": {"exact": 2.5, "balanced": 5.0}, "gpt": {"exact": 2.0, "balanced": 3.0, "extreme": 15.0}}


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            n_layer=4, n_embd=256, n_head=4, n_positions=128, vocab_size=1000,
            use_cache=False, loss_type="ForCausalLMLoss",
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config).train()

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def images(num_samples):
    return torch.randn(num_samples, 3, 32, 32), torch.randint(0, 10, (num_samples,))


def factor(make, batch, recipe):
    plain = predict(make(), batch, MemSave("measure")).peak_bytes
    return plain / predict(make(), batch, MemSave(recipe)).peak_bytes


@pytest.mark.parametrize("recipe", LEAST["gpt"])
def test_a_recipe_saves_what_it_promises_on_a_gpt(recipe):
    assert factor(LanguageModel, torch.randint(0, 1000, (8, 128)), recipe) >= LEAST["gpt"][recipe]


@pytest.mark.parametrize("recipe", LEAST["wide resnet"])
def test_a_recipe_saves_what_it_promises_on_a_wide_resnet(recipe):
    assert factor(lambda: ImageClassifier(WideResNet()), images(100), recipe) >= LEAST["wide resnet"][recipe]


@pytest.mark.slow
def test_extreme_saves_a_hundred_times_on_a_wide_resnet():
    assert factor(lambda: ImageClassifier(WideResNet()), images(100), "extreme") >= 100
