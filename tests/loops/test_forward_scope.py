"""Compressed activations through real trainers."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import ActivationCompression, MemSave, NoEffectWarning

INT4 = ActivationCompression(codecs=("int4",), min_numel=64)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def data():
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        TensorDataset(torch.randn(96, 8, generator=generator), torch.randn(96, 1, generator=generator)), 16
    )


def train(memsave=None, module=Module, *, epochs=2, ckpt=None, strategy="auto", **options):
    torch.manual_seed(0)
    module = module() if isinstance(module, type) else module  # after the seed
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        strategy=strategy,
        callbacks=[memsave] if memsave else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data(), ckpt_path=ckpt)
    return trainer, torch.cat([p.detach().flatten() for p in module.parameters()])


def test_exact_equals_plain_to_the_bit_and_says_what_it_did():
    memsave = MemSave(activations=ActivationCompression(min_numel=64))
    assert torch.equal(train()[1], train(memsave)[1])
    (applied,) = [a for a in memsave.report.applied if a.technique == "activation_compression"]
    assert applied.summary.startswith("exact: ")
    assert "recomputed" in applied.summary
    assert memsave.report.loss_class == "exact"


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("codecs", [("exact",), ("int8",)])
def test_fp16_with_a_grad_scaler(codecs, overflow):
    class Scaled(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (float("inf") if overflow and batch_idx == 1 else 1.0)

    def run(memsave):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        return train(memsave, Scaled, plugins=[plugin], gradient_clip_val=1.0)[1], scaler.get_scale()

    (plain, plain_scale), memsave = run(None), MemSave(activations=ActivationCompression(codecs=codecs, min_numel=64))
    ours, scale = run(memsave)
    assert scale == plain_scale
    if codecs == ("exact",):
        assert torch.equal(ours, plain)
    else:
        assert 0 < float((ours - plain).norm() / plain.norm()) < 0.05


def test_each_microbatch_has_noise_of_its_own():
    """Four microbatches of the same samples err half as much as one: their noise is independent."""

    class Copies(Module):
        def __init__(self, num_copies):
            super().__init__()
            self.num_copies = num_copies

        def train_dataloader(self):
            x, y = (part[:8].repeat(self.num_copies, 1) for part in data().dataset.tensors)
            return DataLoader(TensorDataset(x, y), len(x))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1.0)

    def stepped(memsave, num_copies):
        torch.manual_seed(0)
        module = Copies(num_copies)
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=1,
            callbacks=[memsave],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module)
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    def noise(num_copies):
        codecs = [ActivationCompression(codecs=("int2",), min_numel=64, seed=seed) for seed in range(12)]
        noisy = torch.stack([stepped(MemSave(microbatch=8, activations=codec), num_copies) for codec in codecs])
        return float((noisy - exact).square().sum(1).mean().sqrt()), float((noisy.mean(0) - exact).norm())

    exact = stepped(MemSave(microbatch=8), 1)
    (one, _), (four, bias) = noise(1), noise(4)
    assert 0.35 * one < four < 0.7 * one
    assert bias < 2 * four / 12**0.5


@pytest.mark.parametrize("checkpointing", [False, "blocks", "recursive"])
def test_noise_repeats_and_goes_on_after_a_resume(checkpointing, tmp_path):
    def memsave(seed=0):
        codec = ActivationCompression(codecs=("int4",), min_numel=64, seed=seed)
        return MemSave(activations=codec, checkpointing=checkpointing)

    _, straight = train(memsave(), epochs=3)
    _, again = train(memsave(), epochs=3)
    _, other = train(memsave(seed=1), epochs=3)
    assert torch.equal(straight, again)
    assert not torch.equal(straight, other)
    trainer, _ = train(memsave(), epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _, resumed = train(memsave(), epochs=3, ckpt=tmp_path / "one.ckpt")
    assert torch.equal(straight, resumed)
    train(epochs=3, ckpt=tmp_path / "one.ckpt")  # nothing in it is ours


def test_the_loss_class_is_that_of_what_was_kept_and_lossless_stays_off_by_default():
    def classes(**settings):
        memsave = MemSave(activations=ActivationCompression(codecs=("int8",), **settings))
        train(memsave)
        return memsave.report.loss_class, memsave.report.loss_class_reasons

    noise = "activations are kept with the noise of int8"
    assert classes(min_numel=10_000) == ("exact", ())
    nonlinear = "gelu, layer_norm: their gradients are not linear in what codes keep"
    assert classes(min_numel=64) == ("approximate", (noise, nonlinear))
    exact = {"modules": {"LayerNorm": "exact"}, "operations": {"gelu": "exact"}}
    assert classes(min_numel=64, **exact) == ("unbiased", (noise,))
    assert ActivationCompression not in {type(c) for c in MemSave().recipe.techniques}


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"strategy": "memsave"},
    ],
    ids=str,
)
def test_exact_under_other_ways_of_training(options):
    memsave = MemSave(activations=ActivationCompression(codecs=("exact", "offload"), min_numel=16))
    plain = train(**{k: v for k, v in options.items() if k != "strategy"})[1]
    assert torch.equal(plain, train(memsave, **options)[1])


def test_every_closure_of_lbfgs_is_compressed():
    class Second(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)

    memsave = MemSave(activations=ActivationCompression(min_numel=64))
    assert torch.equal(train(module=Second)[1], train(memsave, Second)[1])


def test_manual_optimization_with_backward_inside_the_step():
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for x, y in zip(batch[0].split(8), batch[1].split(8), strict=True):
                self.manual_backward(F.mse_loss(self.net(x), y) / 2)
            optimizer.step()
            optimizer.zero_grad()

    memsave = MemSave(activations=ActivationCompression(min_numel=64))
    assert torch.equal(train(module=Manual)[1], train(memsave, Manual)[1])
    assert memsave.report.applied[-1].technique == "activation_compression"


def test_two_networks_with_a_gradient_penalty():
    class Penalty(Module):
        def training_step(self, batch, batch_idx):
            x = batch[0].clone().requires_grad_()
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return F.mse_loss(out, batch[1]) + slope.square().mean()

    memsave = MemSave(activations=ActivationCompression(min_numel=64))
    assert torch.equal(train(module=Penalty)[1], train(memsave, Penalty)[1])
    with pytest.warns(NoEffectWarning, match="codes of their inputs"):
        found = train(MemSave(activations=INT4), Penalty)[1]
    values = ActivationCompression(codecs=("int4",), min_numel=64, operations={"gelu": "int4"})
    assert torch.equal(found, train(MemSave(activations=values), Penalty)[1])


def test_torch_func_switches_it_off_with_a_warning():
    class Functional(Module):
        def training_step(self, batch, batch_idx):
            batch = [batch[0] + torch.rand_like(batch[0]), batch[1]]  # the second try draws what the first one did
            slope = torch.func.grad(lambda x: self.net(x).sum())(batch[0])
            return F.mse_loss(self.net(batch[0]), batch[1]) + slope.square().mean().detach()

    memsave = MemSave(activations=ActivationCompression(min_numel=64))
    plain = train(module=Functional)[1]
    with pytest.warns(NoEffectWarning, match=r"torch\.func"):
        ours = train(memsave, Functional)[1]
    assert torch.equal(plain, ours)
    assert memsave.report.applied[-1].summary.startswith("off")


def test_other_errors_pass():
    class Broken(Module):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train(MemSave(activations="exact"), Broken)


def test_a_pattern_that_matches_nothing_is_refused_before_training():
    steps = []

    class Watch(Module):
        def training_step(self, batch, batch_idx):
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="must match modules"):
        train(MemSave(activations=ActivationCompression(modules={"nothing": "exact"})), Watch)
    assert not steps


def test_a_later_fit_without_it_is_plain():
    module = Module()
    memsave = MemSave(activations=ActivationCompression(codecs=("int4",), min_numel=64, modules={"net.1": "exact"}))
    train(memsave, module)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    train(module=(plain := Module()))
    assert vars(module).keys() == vars(plain).keys()
