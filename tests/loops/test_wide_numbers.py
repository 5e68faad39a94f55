"""16-bit steps that are evaluated in float32: what the loss is made of is told as in a float32 model."""

from __future__ import annotations

import copy
import functools
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import MemSave, MicrobatchWarning, Sparsity, apply_sparsity
from lightning_memsave.loops.wide_numbers import WideNumbers
from tests.loops.loss_runs import CLASSES, QUIET, Base, applied, batches, compare


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False, bos_token_id=1, eos_token_id=2)
    model, ids = LlamaForCausalLM(config), torch.arange(24).view(2, 12) % 40
    return model, lambda model: model(input_ids=ids, labels=ids).loss


def convolutional():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    images = torch.randn(4, 3, 8, 8)
    return model, lambda model: F.cross_entropy(model(images.to(model[0].weight.dtype)), torch.arange(4))


def recurrent():
    torch.manual_seed(0)
    model, ids = nn.ModuleList([nn.Embedding(10, 8), nn.GRU(8, 12, batch_first=True)]), torch.arange(20).view(4, 5) % 10
    return model, lambda model: model[1](model[0](ids))[0].square().mean()


def scattered():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 5)])
    apply_sparsity(model, Sparsity(sparsity=0.5, min_size=16, modules="0"))
    x = torch.randn(4, 8)

    def loss_of(model):
        hidden = model[0](x.to(model[1].weight.dtype))
        sums = hidden.new_zeros(2, 16).index_add_(0, torch.tensor([0, 1, 0, 1]), hidden)
        return model[1](sums).square().mean()

    return model, loss_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [llama, convolutional, recurrent, scattered])
def test_a_loss_is_that_of_the_same_weights_in_float32(make, dtype):
    model, loss_of = make()
    short = model.to(dtype)
    expected = loss_of(copy.deepcopy(short).float())
    with torch.no_grad(), WideNumbers():
        found = loss_of(short)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.detach(), rtol=2e-6, atol=1e-7)
    assert {p.dtype for p in short.parameters()} == {dtype}


def test_edits_and_shapes_are_left_alone():
    x = torch.ones(3, dtype=torch.bfloat16)
    with WideNumbers():
        x.add_(1)
        x[0] = 5
        torch.mul(x, 2, out=x)
        assert x.view(3, 1).dtype == x.detach().dtype == torch.bfloat16
        assert (x + 1).dtype == torch.float32
        assert (x + 1).to(torch.bfloat16).dtype == torch.float32, "so that nothing is rounded on the way"
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
        assert torch.stack([x, x]).dtype == torch.float32
        assert torch.ones(2, dtype=torch.int64).to(torch.bfloat16).tolist() == [1, 1]
    assert x.tolist() == [10, 4, 4]


class Squares(L.LightningModule):
    def __init__(self, depth):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(depth)]
        self.net = nn.Sequential(*layers, nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("settings", [{"recipe": "extreme"}, {"precision": "bf16-sr", "microbatch": 2}])
def test_means_of_small_losses_are_cut_where_weights_have_16_bits(seed, settings):
    torch.manual_seed(seed)
    memsave = MemSave(**settings, summary=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MicrobatchWarning)
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[memsave], **QUIET)
        trainer.fit(Squares(1 + seed % 2 * 2), DataLoader(torch.randn(24, 8), 6))
    assert applied(memsave.report) is not None


class OfShortNumbers(Base):
    """A step that takes 16 bits alone, as some kernels do."""

    def loss(self, z, y):
        if self.first(torch.zeros(1, 6, dtype=torch.bfloat16)).dtype != torch.bfloat16:
            raise TypeError("expected bfloat16")
        return F.cross_entropy(z.float(), y)


def test_a_step_that_takes_16_bits_alone_is_evaluated_as_it_is():
    report, apart, _ = compare(OfShortNumbers().bfloat16(), batches(dtype=torch.bfloat16), precision="bf16-true")
    assert applied(report).loss_class == "exact"
    assert apart < 0.1


class EditsWhatItConverts(Base):
    def __init__(self):
        super().__init__()
        self.plain = torch.ones(CLASSES)

    def loss(self, z, y):
        shifted = self.plain.to(torch.bfloat16)
        shifted.add_(1)
        return F.cross_entropy(z * shifted, y)


@functools.cache
def table(size):
    return torch.eye(size).to(torch.bfloat16)


class OfCachedNumbers(Base):
    def loss(self, z, y):
        return F.cross_entropy(z @ table(CLASSES), y)


@pytest.mark.parametrize("kind", [EditsWhatItConverts, OfCachedNumbers])
def test_nothing_of_it_stays(kind):
    table.cache_clear()
    report, apart, messages = compare(kind().bfloat16(), batches(dtype=torch.bfloat16), precision="bf16-true")
    assert applied(report).loss_class == "exact"
    assert (apart < 0.1, messages) == (True, [])
    assert table(CLASSES).dtype == torch.bfloat16


def test_edits_through_views_stay():
    x = torch.ones(4, dtype=torch.bfloat16)
    with WideNumbers():
        view = x.view(2, 2).diagonal()
        view += 1
        view *= 2
    assert x.tolist() == [4, 1, 1, 4]


class OfALargeWeight(Base):
    """There is no room for a weight of 32 bits."""

    def loss(self, z, y):
        if self.first(torch.zeros(1, 6, dtype=torch.bfloat16)).dtype != torch.bfloat16:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(z.float(), y)


def test_where_memory_runs_out_for_32_bits_a_step_is_evaluated_as_it_is():
    report, _, messages = compare(OfALargeWeight().bfloat16(), batches(dtype=torch.bfloat16), precision="bf16-true")
    assert applied(report).loss_class == "exact"
    assert messages == []
