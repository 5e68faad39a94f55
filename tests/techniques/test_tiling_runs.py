"""Tiles in runs of Lightning, and their predictions."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from lightning_memsave import (
    MemSave,
    NoEffectWarning,
    OptimizerState,
    Tiling,
    predict,
)

from .tiling_subjects import D, Net, assert_alike, batch


class Lit(L.LightningModule):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.net = Net(dropout)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def fit(*callbacks, dropout=0.1, dtype="64-true", strategy="auto"):
    torch.manual_seed(0)
    module = Lit(dropout)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision=dtype,
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(batch(torch.float32, 24)), 8))
    return module


@pytest.mark.parametrize("tiling", ["samples", "positions", "MLP", True, Tiling(modules="MLP", dim=1, size=3)])
def test_a_run_in_tiles_is_the_plain_run(tiling):
    memsave = MemSave(tiling=tiling)
    found, expected = fit(memsave), fit()
    assert_alike(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-11, atol=1e-14)
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert "in tiles" in applied.summary
    assert memsave.report.loss_class == "exact"
    assert all("forward" not in vars(module) for module in found.modules())


def test_a_strategy_by_name_and_settings_in_logs():
    memsave = MemSave(tiling=Tiling(modules="MLP", dim=1, size=3))
    found, expected = fit(memsave, strategy="memsave"), fit()
    assert_alike(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-11, atol=1e-14)
    assert memsave.recipe.as_dict()["tiling"] == {"modules": "MLP", "dim": 1, "size": 3, "batchnorm": None}
    assert memsave.recipe.as_dict()["recipe"] == "lossless, tiling=Tiling(modules=MLP, dim=1, size=3)"


@pytest.mark.parametrize("gradients", ["release", "into-state"])
def test_gradients_that_end_in_backward_go_with_tiles(gradients):
    state = OptimizerState(first_moment="32bit", gradients=gradients)
    slots = {"optimizer_state": state, "microbatch": False, "summary": False}
    found, expected = fit(MemSave(tiling="samples", **slots)), fit(MemSave(**slots))
    assert_alike(dict(found.state_dict()), dict(expected.state_dict()), rtol=1e-10, atol=1e-13)


class Clip(L.LightningModule):
    def __init__(self):
        super().__init__()
        size = {"hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = CLIPTextConfig(vocab_size=60, max_position_embeddings=8, eos_token_id=59, attention_dropout=0.1, **size)
        vision = CLIPVisionConfig(image_size=16, patch_size=8, attention_dropout=0.1, **size)
        config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
        self.clip = CLIPModel(config)

    def training_step(self, batch, batch_idx):
        self.clip.train()
        return self.clip(input_ids=batch[1], pixel_values=batch[0], return_loss=True).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def test_clip_of_transformers_is_tiled_without_a_mark():
    generator = torch.Generator().manual_seed(3)
    images, ids = torch.randn(16, 3, 16, 16, generator=generator), torch.randint(0, 59, (16, 8), generator=generator)
    ids[:, -1] = 59
    results = []
    for memsave in (None, MemSave(tiling=Tiling(dim=0, size=2), summary=False)):
        torch.manual_seed(0)
        module = Clip().double()
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            precision="64-true",
            callbacks=[memsave] if memsave else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(images, ids), 8))
        results.append(dict(module.state_dict()))
    assert_alike(results[1], results[0], rtol=1e-6, atol=1e-7)  # transformers computes some of it in float32
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert applied.summary.startswith("2 modules in tiles")
    assert memsave.report.loss_class == "exact"


def test_a_default_that_finds_nothing_says_why():
    class Mixing(Lit):
        def training_step(self, batch, batch_idx):
            return self.net.blocks[0].mlp(batch[0] - batch[0].mean(0)).square().mean()

        def __init__(self):
            super().__init__()
            self.net.blocks[0].mlp = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(20))

    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        callbacks=[MemSave(tiling="samples")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.warns(NoEffectWarning, match="no module treats samples independently, `net.blocks.0.mlp`: it changes"):
        trainer.fit(Mixing(), DataLoader(TensorDataset(batch(torch.float32, 8)), 8))


@pytest.mark.parametrize("size", ["auto", pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_prediction_for_shapes_alone_is_what_is_measured(size, dropout):
    config = Tiling(modules="MLP", dim=1, size=size)
    memsave = MemSave(tiling=config, microbatch=False)
    fit(memsave, dropout=dropout, dtype="32-true")
    torch.manual_seed(0)
    predicted = predict(Lit(dropout), (batch(torch.float32, 8),), memsave)
    assert predicted.source == "fake"
    assert predicted.peak_bytes == memsave.report.peak_bytes


def test_a_prediction_of_what_a_test_must_find_runs_real_steps():
    memsave = MemSave(tiling="samples", microbatch=False)
    fit(memsave, dtype="32-true")
    torch.manual_seed(0)
    predicted = predict(Lit(), (batch(torch.float32, 8),), memsave)
    assert predicted.source == "measured"
    assert predicted.peak_bytes == memsave.report.peak_bytes
