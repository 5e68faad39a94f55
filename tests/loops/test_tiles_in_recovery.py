"""Batches that cannot be cut and run out of memory: encoders run in tiles, and the loss sees all samples."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import SiglipConfig, SiglipModel, SiglipTextConfig, SiglipVisionConfig

from lightning_memsave import MemSave, Microbatching, MicrobatchWarning, Tiling
from lightning_memsave.core.errors import NotLosslessWarning
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
from tests.loops.test_recovery import QUIET, Hungry

pytestmark = [
    pytest.mark.filterwarnings("ignore:Batches are not cut into microbatches"),
    pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.NotLosslessWarning"),
]
NUM_SAMPLES, LIMIT = 16, 5


class Base(L.LightningModule):
    hungry: Hungry

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def images(num_out: int, hungry: nn.Module, dropout: float = 0.0) -> nn.Sequential:
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(dropout))
    return nn.Sequential(convolution, nn.AdaptiveAvgPool2d(2), nn.Flatten(), hungry, nn.Linear(32, num_out))


class Contrastive(Base):
    """As CLIP: images and texts, with the other samples as negatives."""

    def __init__(self):
        super().__init__()
        self.hungry = Hungry()
        self.images = images(8, self.hungry, dropout=0.2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
        self.texts = nn.Sequential(nn.Embedding(50, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))

    def training_step(self, batch, batch_idx):
        x, ids = batch
        similar = F.normalize(self.images(x), dim=-1) @ F.normalize(self.texts(ids).mean(1), dim=-1).T / 0.1
        target = torch.arange(len(x))
        loss = (F.cross_entropy(similar, target) + F.cross_entropy(similar.T, target)) / 2
        self.log("loss", loss)
        return loss


class UNet(nn.Module):
    def __init__(self, hungry):
        super().__init__()
        self.high, self.low = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.joined, self.hungry = nn.Sequential(nn.GroupNorm(2, 16), nn.ReLU(), nn.Conv2d(16, 1, 1)), hungry

    def forward(self, x):
        high = self.hungry(self.high(x).relu())
        low = F.interpolate(self.low(F.max_pool2d(high, 2)), scale_factor=2)
        return self.joined(torch.cat([low, high], 1))


class Dice(Base):
    def __init__(self):
        super().__init__()
        self.hungry = Hungry()
        self.net = UNet(self.hungry)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        y = (x.mean(1, keepdim=True) > 0.2).to(x.dtype)
        p = self.net(x).sigmoid()
        loss = 1 - 2 * (p * y).sum() / (p.sum() + y.sum())
        self.log("loss", loss)
        return loss


class Mixup(Base):
    def __init__(self):
        super().__init__()
        self.hungry = Hungry()
        self.net = images(10, self.hungry)

    def training_step(self, batch, batch_idx):
        x, ids = batch
        y, other, share = ids[:, 0] % 10, torch.randperm(len(x)), 0.3
        logits = self.net((1 - share) * x + share * x[other])
        loss = (1 - share) * F.cross_entropy(logits, y) + share * F.cross_entropy(logits, y[other])
        self.log("loss", loss)
        return loss


class SimClr(Base):
    """Two views of each image; the encoder has BatchNorm, which relates samples as the loss does."""

    def __init__(self):
        super().__init__()
        self.hungry = Hungry()
        first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.encoder = nn.Sequential(first, nn.AdaptiveAvgPool2d(2), nn.Flatten(), self.hungry, nn.Linear(32, 8))

    def training_step(self, batch, batch_idx):
        views = [F.normalize(self.encoder(view), dim=-1) for view in (batch[0], batch[0].flip(-1))]
        z = torch.cat(views)
        similar = (z @ z.T / 0.1).fill_diagonal_(-1e9)
        loss = F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))
        self.log("loss", loss)
        return loss


class Siglip(Base):
    """SigLIP of transformers."""

    def __init__(self):
        super().__init__()
        size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        text = SiglipTextConfig(vocab_size=50, max_position_embeddings=6, **size)
        vision = SiglipVisionConfig(image_size=8, patch_size=4, **size)
        self.model = SiglipModel(SiglipConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))
        self.hungry = Hungry()
        for layer in (*self.model.text_model.encoder.layers, *self.model.vision_model.encoder.layers):
            layer.mlp.activation_fn = nn.Sequential(layer.mlp.activation_fn, self.hungry)

    def training_step(self, batch, batch_idx):
        self.model.train()
        loss = self.model(input_ids=batch[1], pixel_values=batch[0], return_loss=True).loss
        self.log("loss", loss)
        return loss


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3 * NUM_SAMPLES, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 50, (len(x), 6), generator=generator)), NUM_SAMPLES)


def fit(make, limit, *callbacks, **options):
    torch.manual_seed(0)
    module = make()
    module.hungry.limit = limit
    trainer = L.Trainer(**{**QUIET, "max_epochs": 2, "precision": "64-true", **options}, callbacks=list(callbacks))
    torch.manual_seed(1)
    trainer.fit(module, data())
    return module, trainer


def assert_same_weights(first, second):
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("make", [Contrastive, Dice, Mixup, Siglip])
def test_a_batch_whose_loss_relates_samples_goes_on_in_tiles(make, lines):
    plain, plain_trainer = fit(make, 10**9)
    memsave = MemSave()
    module, trainer = fit(make, LIMIT, memsave)
    assert_same_weights(module, plain)
    loss = plain_trainer.callback_metrics["loss"]
    torch.testing.assert_close(trainer.callback_metrics["loss"], loss, rtol=1e-10, atol=0)
    assert "modules in tiles of 4 samples, where these are independent" in str(lines)
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert applied.summary.endswith("at most 4 samples")
    assert memsave.report.loss_class == "exact"
    assert memsave.report.microbatch_size is None
    assert max(module.hungry.tried) == NUM_SAMPLES
    assert all("forward" not in vars(each) for each in module.modules())


def test_tiles_shrink_until_they_fit():
    plain, _ = fit(Dice, 10**9)
    memsave = MemSave()
    module, _ = fit(Dice, 3, memsave)
    assert_same_weights(module, plain)
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert applied.summary == "1 module in tiles: 1 x UNet, at most 1 sample"


@pytest.mark.filterwarnings("default::lightning_memsave.core.errors.NotLosslessWarning")
def test_batchnorm_is_the_last_that_is_cut_and_named(lines, tmp_path):
    memsave = MemSave()
    with pytest.warns(
        NotLosslessWarning, match=r"Tiles change .*: encoder \(Sequential: BatchNorm's statistics of each"
    ):
        module, trainer = fit(SimClr, LIMIT, memsave)
    assert "modules in tiles of 4 samples, where these are independent, each with BatchNorm statistics" in str(lines)
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 4 samples"
    assert memsave.report.loss_class == "changed"
    assert memsave.report.microbatch_size is None

    tiling = Tiling(modules="encoder", dim=0, size=4, batchnorm="ghost")
    from_the_start, _ = fit(SimClr, LIMIT, MemSave(tiling=tiling))
    assert_same_weights(module, from_the_start)
    norm = module.encoder[0][1]
    assert norm.num_batches_tracked == 2 * trainer.global_step, "one for each view, as in plain Lightning"

    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.manual_seed(0)
    resumed, again = SimClr(), MemSave()
    resumed.hungry.limit = LIMIT
    L.Trainer(**QUIET, max_epochs=3, precision="64-true", callbacks=[again]).fit(
        resumed, data(), ckpt_path=tmp_path / "a.ckpt", weights_only=False
    )
    assert list(resumed.hungry.tried) == []
    assert again.report.loss_class == "changed"

    for memsave in (MemSave(microbatch=Microbatching(strict=True)), MemSave(tiling=False)):
        torch.manual_seed(0)
        trainer = L.Trainer(**QUIET, max_epochs=3, precision="64-true", callbacks=[memsave])
        trainer.fit(resumed := SimClr(), data(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
        assert not any(a.technique == "tiling" for a in memsave.report.applied), "forbidden by now"


@pytest.mark.parametrize(
    ("limit", "memsave"), [(1, MemSave()), (LIMIT, MemSave(microbatch=Microbatching(strict=True)))]
)
def test_batchnorm_has_two_samples_and_is_left_alone_where_nothing_may_change(limit, memsave):
    with pytest.raises(OutOfMemoryUnrecoverableError, match="cannot be cut"):
        fit(SimClr, limit, memsave)


def test_what_was_switched_off_is_not_taken_up():
    with pytest.raises(OutOfMemoryUnrecoverableError, match="cannot be cut"):
        fit(Dice, LIMIT, MemSave(tiling=False))


def test_a_resumed_run_starts_with_the_tiles_that_were_needed(tmp_path):
    first = MemSave()
    _, trainer = fit(Dice, LIMIT, first)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    plain, _ = fit(Dice, 10**9, max_epochs=4)
    torch.manual_seed(0)
    module, memsave = Dice(), MemSave()
    module.hungry.limit = LIMIT
    L.Trainer(**QUIET, max_epochs=4, precision="64-true", callbacks=[memsave]).fit(
        module, data(), ckpt_path=tmp_path / "a.ckpt", weights_only=False
    )
    assert list(module.hungry.tried) == []
    assert memsave.report.num_oom_recovered == 0
    for (name, a), b in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


class HungryForPositions(Hungry):
    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Long(Base):
    """A language model whose MLPs are what does not fit."""

    def __init__(self):
        super().__init__()
        self.hungry = HungryForPositions()
        self.table, self.attention = nn.Embedding(50, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 128), self.hungry, nn.GELU(), nn.Linear(128, 8))
        self.head = nn.Linear(8, 50)

    def training_step(self, batch, batch_idx):
        ids = batch[1].repeat(1, 4)
        h = self.table(ids)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        loss = F.cross_entropy(self.head(h + self.mlp(h)).flatten(0, 1), ids.flatten())
        self.log("loss", loss)
        return loss


def test_one_sample_that_is_too_long_goes_on_in_tiles_of_positions(lines, tmp_path):
    plain, plain_trainer = fit(Long, 10**9)
    memsave = MemSave()
    module, trainer = fit(Long, 8, memsave)
    torch.testing.assert_close(
        trainer.callback_metrics["loss"], plain_trainer.callback_metrics["loss"], rtol=1e-10, atol=0
    )
    assert_same_weights(module, plain)
    assert "microbatches of at most 1 sample" in str(lines)
    assert "modules in tiles of positions, where these are independent" in str(lines)
    assert "modules in tiles of 3 positions, where these are independent" in str(lines)
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert applied.summary == "1 module in tiles: 1 x Sequential, at most 3 positions", "of 24, then 12"
    assert memsave.report.loss_class == "exact"
    with pytest.raises(OutOfMemoryUnrecoverableError, match="one sample"):
        fit(Long, 0, MemSave())

    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.manual_seed(0)
    resumed, again = Long(), MemSave()
    resumed.hungry.limit = 8
    L.Trainer(**QUIET, max_epochs=3, precision="64-true", callbacks=[again]).fit(
        resumed, data(), ckpt_path=tmp_path / "a.ckpt", weights_only=False
    )
    assert list(resumed.hungry.tried) == []
    assert any(a.technique == "tiling" for a in again.report.applied)


def test_a_model_in_which_no_positions_are_alone_fails_as_before():
    with pytest.raises(OutOfMemoryUnrecoverableError):
        fit(Dice, 0, MemSave())


@pytest.mark.filterwarnings("default:Batches are not cut into microbatches")
def test_the_warning_names_tiling():
    with pytest.warns(MicrobatchWarning, match=r'relates samples, `tiling="samples"`'):
        fit(Dice, 10**9, MemSave(microbatch=4))


class Thirsty(Hungry):
    """Memory for few samples at a time, in evaluation as well."""

    def forward(self, x):
        if len(x) > self.limit:
            self.fail(len(x))
        return x


class DiceOfThirsty(Dice):
    def __init__(self):
        super().__init__()
        self.hungry = self.net.hungry = Thirsty()


@pytest.mark.parametrize("limit", [8, 4, 3])
def test_the_test_of_a_module_takes_no_more_memory_than_two_tiles(limit, lines):
    plain, _ = fit(DiceOfThirsty, 10**9)
    memsave = MemSave()
    module, _ = fit(DiceOfThirsty, limit, memsave)
    assert_same_weights(module, plain)
    (applied,) = (a for a in memsave.report.applied if a.technique == "tiling")
    assert applied.summary == f"1 module in tiles: 1 x UNet, at most {'4 samples' if limit == 8 else '1 sample'}"
    assert memsave.report.loss_class == "exact"
