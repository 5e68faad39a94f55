"""The promises of every registered technique and of every pair of them, on one toy module, through real trainers."""

from __future__ import annotations

import copy
from importlib import import_module
from itertools import combinations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, Recipe
from lightning_memsave.core.compatibility import COMPATIBILITY
from lightning_memsave.core.report import CATEGORIES, worst_loss_class
from lightning_memsave.techniques.registry import TECHNIQUES

STEMS = [technique.stem for technique in TECHNIQUES]
PAIRS = list(combinations(STEMS, 2))
SPECS = {stem: import_module(f"tests.techniques.test_{stem}").SPEC for stem in STEMS}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Toy(L.LightningModule):
    """Wide weights in front, wide activations behind: each technique finds something to shrink."""

    def __init__(self, batchnorm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 96)
        self.blocks = nn.Sequential(*(Block(96) for _ in range(4)))
        self.norm = nn.BatchNorm1d(96) if batchnorm else nn.Identity()
        self.head = nn.Linear(96, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        h = self.blocks(self.stem(x))
        for _ in range(12):
            h = torch.sin(h)
        loss = (self.head(self.norm(h)) - y).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=True)
        return {"loss": loss, "prediction": h[:, 0].detach()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def data(batch_size: int = 64) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(192, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size)


def train(memsave, *, epochs=2, ckpt=None, double=True, batchnorm=False, callbacks=()):
    torch.manual_seed(0)
    module = Toy(batchnorm)
    stems = memsave.recipe.stems() if memsave else ()
    precisions = {SPECS[stem].trainer_precision for stem in stems} if double else {"32-true"}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        precision=min(precisions, default="64-true"),
        callbacks=[*([memsave] if memsave else []), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data(), ckpt_path=ckpt)
    return trainer, module


def with_only(*stems: str) -> MemSave:
    return MemSave(Recipe("contract", tuple(SPECS[stem].config for stem in STEMS if stem in stems)))


def assert_parameters(first, second, bit_equal):
    a, b = first.state_dict(), second.state_dict()
    assert list(a) == list(b)
    for name in a:
        if bit_equal:
            assert torch.equal(a[name], b[name]), name
        else:
            torch.testing.assert_close(
                a[name], b[name], rtol=1e-12, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.fixture(scope="module")
def plain():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train(None)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def baseline():
    memsave = MemSave("measure")
    train(memsave, double=False)
    return memsave.report


def test_off_is_plain_lightning_to_the_bit(plain):
    slots = {technique.slot: False for technique in TECHNIQUES if technique.slot}
    trainer, module = train(MemSave("measure", **slots))
    assert_parameters(plain[1], module, bit_equal=True)
    assert torch.equal(plain[0].callback_metrics["loss_epoch"], trainer.callback_metrics["loss_epoch"])


@pytest.mark.parametrize("stem", STEMS)
def test_results_are_of_the_stated_loss_class(stem, plain):
    spec, memsave = SPECS[stem], with_only(stem)
    trainer, module = train(memsave)
    assert [a.technique for a in memsave.report.applied] == [stem]
    assert memsave.report.loss_class == spec.loss_class
    assert bool(memsave.report.loss_class_reasons) == (spec.loss_class != "exact")
    if spec.loss_class == "exact":
        assert_parameters(plain[1], module, spec.bit_equal)
        difference = plain[0].callback_metrics["loss_epoch"] - trainer.callback_metrics["loss_epoch"]
        assert abs(float(difference)) <= (0 if spec.bit_equal else 1e-12)
    else:
        assert all(torch.isfinite(p).all() for p in module.parameters())
        assert any(not torch.equal(a, b) for a, b in zip(module.parameters(), plain[1].parameters(), strict=True))


@pytest.mark.parametrize("stem", STEMS)
def test_the_ledger_shows_the_saving_at_the_peak(stem, baseline):
    memsave = with_only(stem).compare_to(baseline)
    train(memsave, double=False)
    report = memsave.report
    assert tuple(report.by_category) == CATEGORIES
    assert sum(report.by_category.values()) == report.peak_bytes
    assert report.peak_bytes < baseline.peak_bytes
    assert report.by_category[SPECS[stem].shrinks] < baseline.by_category[SPECS[stem].shrinks]
    assert report.factor == baseline.peak_bytes / report.peak_bytes


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_works_or_is_refused_at_construction(pair, plain):
    rows = [row for row in COMPATIBILITY if {row.first, row.second} == set(pair)]
    assert len(rows) == 1, f"core/compatibility.py needs one row for {pair}"
    if rows[0].refused_because:
        with pytest.raises(ValueError, match=rows[0].refused_because):
            with_only(*pair)
        return
    memsave = with_only(*pair)
    _, module = train(memsave)
    assert {a.technique for a in memsave.report.applied} == set(pair)
    assert memsave.report.loss_class == worst_loss_class(SPECS[stem].loss_class for stem in pair)
    if memsave.report.loss_class == "exact":
        assert_parameters(plain[1], module, all(SPECS[stem].bit_equal for stem in pair))
    else:
        # Whatever is exact must not change what the other one computes; a rounding may tip another way now and then.
        alone = [stem for stem in pair if SPECS[stem].loss_class != "exact"]
        _, expected = train(with_only(*alone))
        assert list(module.state_dict()) == list(expected.state_dict())
        for a, b in zip(module.parameters(), expected.parameters(), strict=True):
            assert (a - b).norm() <= max(SPECS[stem].tips_by for stem in pair) * b.norm()


@pytest.mark.parametrize("stem", STEMS)
def test_the_module_stays_plain_during_and_after_training(stem, plain):
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, *args):
            twin = copy.deepcopy(pl_module.blocks)
            x = torch.randn(3, 96, dtype=pl_module.blocks[0].norm.weight.dtype)
            with trainer.precision_plugin.train_step_context():
                assert torch.equal(twin(x), pl_module.blocks(x))
                with torch.no_grad():
                    for p in twin.parameters():
                        p.zero_()
                assert torch.equal(twin(x), x)  # residual blocks of zeros: the copy computes with its own weights
            assert len(outputs["prediction"]) == 64
            seen.append(list(pl_module.state_dict()))

    _, module = train(with_only(stem), callbacks=[Look()])
    assert seen == [list(plain[1].state_dict())] * 6
    assert [type(m) for m in module.modules()] == [type(m) for m in plain[1].modules()]
    assert all("forward" not in vars(m) for m in module.modules())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # a callback's state that nobody asks for
@pytest.mark.parametrize("stem", STEMS)
def test_checkpoints_are_plain_and_resume_is_bit_equal(stem, tmp_path):
    path = tmp_path / "half.ckpt"
    trainer, _ = train(with_only(stem), double=False)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    # In float32: plain Lightning restores float64 weights through float32.
    train(None, double=False)[0].save_checkpoint(tmp_path / "plain.ckpt")
    expected = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    ours, theirs = (c["optimizer_states"][0] for c in (saved, expected))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in ours["state"][number].items()}
    _, straight = train(with_only(stem), double=False, epochs=4)
    _, resumed = train(with_only(stem), double=False, epochs=4, ckpt=path)
    assert_parameters(straight, resumed, bit_equal=True)
    _, without = train(None, double=False, epochs=4, ckpt=path)
    assert all(torch.isfinite(p).all() for p in without.parameters())
    if SPECS[stem].loss_class == "exact":
        _, plain_straight = train(None, double=False, epochs=4)
        for a, b in zip(plain_straight.parameters(), without.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=0 if SPECS[stem].bit_equal else 1e-5)
    train(with_only(stem), double=False, epochs=4, ckpt=tmp_path / "plain.ckpt")


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.filterwarnings("ignore:Microbatches change the result")
def test_batchnorm_statistics_are_updated_once_per_batch(stem):
    _, module = train(with_only(stem), batchnorm=True)
    assert int(module.norm.num_batches_tracked) == 2 * 3
