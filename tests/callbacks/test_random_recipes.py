"""Random settings of everything at once: they are refused before training, or train, and go on after a resume."""

from __future__ import annotations

import random

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, NoEffectWarning, NotLosslessWarning, OptimizerState, Sparsity
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.techniques.optimizer_state.state_config import Gradients

NUM_FAST, NUM_ALL = 10, 120


class Block(nn.Module):
    """Attention and a feed-forward part, with what has made trouble: positions that are added last, dropout of 0."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.0)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)  # [B, T, width] each
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v)))
        return x + self.down(F.gelu(self.up(x))) + self.bias


class Net(L.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(50, 32), nn.Parameter(torch.randn(1, 6, 32))
        self.drop, self.blocks = nn.Dropout(0.0), nn.Sequential(*(Block() for _ in range(3)))
        self.head, self.optimizer = nn.Linear(32, 5), optimizer
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        ids, labels = batch
        x = self.drop(self.table(ids) + self.positions)
        return F.cross_entropy(self.head(self.blocks(x).mean(1)), labels)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        made = {
            "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
            "Adam": lambda p: torch.optim.Adam(p, 1e-3),
            "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-4),
            "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=1e-4),
        }[self.optimizer](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def drawn(seed):
    """Arguments of `MemSave`, of a trainer, and an optimizer; or `None` for settings that exclude each other."""
    draw = random.Random(seed)
    settings = {"recipe": draw.choice(["measure", "lossless"])}
    choices = {
        "precision": ["bf16-sr", "bf16+8", "bf16-kahan", "bf16-gradients"],  # float16 is slow on CPU
        "activations": ["exact", "int8", "int4-chain", ["exact", "int4"], ["exact", "bf16"]],
        "checkpointing": ["blocks", "sqrt", "recursive"],
        "sparsity": [0.5, "2:4", *(Sparsity(sparsity=0.5, method=method) for method in ("set", "rigl", "dsr"))],
        "microbatch": [1, 3, 4, "auto"],
    }
    for name, options in choices.items():
        if draw.random() < 0.5:
            settings[name] = draw.choice(options)
    if "sparsity" not in settings and seed % 3 == 0:
        settings["low_rank"] = [2, 8, 0.5][seed % 9 // 3]
    if draw.random() < 0.7:
        state = {**BY_NAME[draw.choice([f for f in BY_NAME if f != "paged"])], "min_size": draw.choice([0, 512])}
        state |= {"gradients": draw.choice(Gradients.__args__), "checkpoint": draw.choice(["plain", "compact"])}
        try:
            settings["optimizer_state"] = OptimizerState(**state, rank=8)
        except ValueError:
            return None
    options = {}
    if draw.random() < 0.25:
        options["accumulate_grad_batches"] = 2
    if draw.random() < 0.25:
        options |= {"gradient_clip_val": 0.5, "gradient_clip_algorithm": draw.choice(["norm", "value"])}
    return settings, options, draw.choice(["AdamW", "AdamW", "Adam", "RMSprop", "SGD"])


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(50, (8, 6), generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(2)
    ]


def fit(settings, options, optimizer, epochs, ckpt_path=None):
    torch.manual_seed(0)
    module = Net(optimizer)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[MemSave(**settings)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None), ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


@pytest.mark.filterwarnings("ignore::UserWarning", f"ignore::{NoEffectWarning.__module__}.{NoEffectWarning.__name__}")
@pytest.mark.filterwarnings(f"ignore::{NotLosslessWarning.__module__}.{NotLosslessWarning.__name__}")
@pytest.mark.parametrize(
    "seed", [*range(NUM_FAST), *(pytest.param(n, marks=pytest.mark.slow) for n in range(NUM_FAST, NUM_ALL))]
)
def test_random_settings_are_refused_or_train_and_resume(seed, tmp_path):
    if (case := drawn(seed)) is None:
        return
    try:
        straight, _ = fit(*case, epochs=2)
    except ValueError:
        return
    assert all(abs(loss) < 10 for loss in straight.losses)
    _, trainer = fit(*case, epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, _ = fit(*case, epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert resumed.losses == straight.losses[2:]
    for (name, one), other in zip(straight.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
