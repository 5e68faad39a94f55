"""Microbatches are `exact` where they are said to be, on losses of every kind; others are run whole, or `changed`."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

from lightning_memsave import LabelCount, MemSave, Microbatching, MicrobatchWarning
from lightning_memsave.techniques.microbatching.reduction import LabelCount as Count
from lightning_memsave.techniques.microbatching.reduction import Losses, rules_for
from tests.harness import assert_same_run, fit
from tests.loops import whole_batches
from tests.loops.loss_runs import BATCH, CLASSES, DIM, Base, applied, batches, compare
from tests.loops.whole_batches import CALLS, EXACT, Module, both, unpack


class Weighted(Base):
    """Class weights: divided by their sum over the batch."""

    def loss(self, z, y):
        return F.cross_entropy(z, y, weight=torch.arange(1.0, CLASSES + 1, dtype=z.dtype))


class WeightedFromZero(Weighted):
    """All samples have the same loss at the start, which any weights average to itself."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class Balance(Base):
    """As a mixture of experts balances its load, in training alone."""

    def loss(self, z, y):
        load = z.softmax(-1).mean(0)
        return F.cross_entropy(z, y) + (load.square().sum() if self.training else 0)


class Variance(Base):
    """VICReg's: the standard deviation over the batch."""

    def loss(self, z, y):
        return F.cross_entropy(z, y) + ((1 - z.std(0)).relu().mean() if self.training else 0)


class FlipMixup(Base):
    def loss(self, z, y):
        if self.training:
            z = 0.7 * z + 0.3 * z.flip(0)
        return F.cross_entropy(z, y)


class FunctionalBatchNorm(Base):
    def loss(self, z, y):
        mean, variance = z.new_zeros(CLASSES), z.new_ones(CLASSES)
        return F.cross_entropy(F.batch_norm(z, mean, variance, training=self.training), y)


class Contrastive(Base):
    def loss(self, z, y):
        z = F.normalize(z, dim=-1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class Dice(Base):
    """Of the whole batch, on one half of each kind: the first batch is balanced."""

    def loss(self, z, y):
        p, t = z[:, 0].sigmoid(), (y % 2).to(z.dtype)
        return 1 - 2 * (p * t).sum() / (p.sum() + t.sum()) + F.binary_cross_entropy_with_logits(z[:, 0], t)


WHOLE = [Weighted, WeightedFromZero, Balance, Variance, FlipMixup, FunctionalBatchNorm, Contrastive, Dice]


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", WHOLE)
def test_a_loss_that_is_no_mean_is_run_whole(kind, precision):
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    report, apart, messages = compare(kind(), batches(dtype=dtype), precision=precision)
    assert applied(report) is None
    assert apart == 0
    assert any("LabelCount(shifted=True)" in message for message in messages)  # the way out is named


@pytest.mark.parametrize("kind", [Weighted, Dice])
def test_rows_of_one_class_do_not_hide_the_others(kind):
    """Sorted by class: the first rows of each batch are of one."""
    data = batches(1, is_sorted=True)
    report, apart, _ = compare(kind(), data)
    assert applied(report) is None
    assert apart == 0


class Sum(Base):
    def loss(self, z, y):
        return F.cross_entropy(z, y, reduction="sum") / 10


class FromZero(Base):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class Denoising(Base):
    """Draws noise for each sample: other microbatches, other noise."""

    def loss(self, z, y):
        return (z + torch.randn_like(z)).square().mean()


class BackwardByItself(Base):
    """The step makes gradients that Lightning drops."""

    def loss(self, z, y):
        z.square().sum().backward(retain_graph=True)
        return F.cross_entropy(z, y)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
@pytest.mark.parametrize("kind", [Base, Sum, FromZero, BackwardByItself])
def test_means_and_sums_are_cut_and_exact(kind, precision):
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    report, apart, _ = compare(kind(), batches(dtype=dtype), precision=precision)
    assert applied(report) is not None
    assert applied(report).loss_class == "exact"
    assert apart < {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]


def test_noise_of_each_sample_is_no_obstacle_and_changes_the_result():
    report, apart, _ = compare(Denoising(), batches())
    assert applied(report).loss_class == "changed"
    assert apart > 0


TINY = {"vocab_size": 30, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}


DROPLESS = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def causal():
    return GPT2LMHeadModel(GPT2Config(**TINY, **DROPLESS))


def tagger():
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropless = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return BertForTokenClassification(BertConfig(**sizes, **dropless, intermediate_size=32, num_labels=30))


class Hugging(L.LightningModule):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(2)
        self.model = make()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def ragged(num=3, lengths=(16, 3, 9, 5, 16, 2, 7, 11), is_full_at_first=False):
    """Batches as a data collator makes them: padded, with labels of -100 where there is padding."""
    generator, found = torch.Generator().manual_seed(0), []
    for i in range(num):
        ids = torch.randint(1, 30, (len(lengths), 16), generator=generator)
        longest = 16 if is_full_at_first and i == 0 else 0
        mask = torch.stack([torch.arange(16) < max(length, longest) for length in lengths]).long()
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(("make", "rule"), [(causal, "LabelCount(shifted=True)"), (tagger, "LabelCount()")])
def test_fine_tuning_on_ragged_batches_is_cut_by_the_labels_that_count(make, rule, precision):
    report, apart, _ = compare(Hugging(make), ragged(), size=3, precision=precision)
    assert applied(report).loss_class == "exact"
    assert f"mean over `{rule}`" in applied(report).summary
    assert apart < {"32-true": 1e-4, "64-true": 1e-6}.get(precision, 0.1)  # transformers' losses are float32


@pytest.mark.parametrize("make", [causal, tagger])
def test_a_first_batch_without_padding_does_not_decide(make):
    report, apart, _ = compare(Hugging(make), ragged(is_full_at_first=True), size=3, precision="64-true")
    assert applied(report).loss_class == "exact"
    assert apart < 1e-6


def test_counting_labels_that_the_model_shifts_is_noticed():
    config = Microbatching(size=3, weight_fn=LabelCount())
    report, apart, messages = compare(Hugging(causal), ragged(), size=config)
    assert apart > 1e-3
    assert applied(report).loss_class == "changed"
    assert any("weight_fn" in message for message in messages)


@pytest.mark.parametrize("key", ["mask", 1])
def test_a_mean_over_unmasked_positions_is_cut_by_the_mask(key):
    class Masked(Base):
        def training_step(self, batch, batch_idx):
            x, mask = (batch["x"], batch["mask"]) if isinstance(batch, dict) else batch
            squared = self.head(self.first(x).tanh()).square().mean(-1)  # [B, T]
            return (squared * mask).sum() / mask.sum()

    generator = torch.Generator().manual_seed(1)
    data = []
    for _ in range(3):
        x, mask = torch.randn(BATCH, 5, DIM, generator=generator), torch.rand(BATCH, 5, generator=generator) > 0.4
        data.append({"x": x, "mask": mask} if key == "mask" else (x, mask))
    report, apart, _ = compare(Masked(), data)
    assert "ignore_index=0" in applied(report).summary
    assert applied(report).loss_class == "exact"
    assert apart < 1e-4


def test_an_index_that_the_loss_ignores_is_found():
    class Ignores(Base):
        def loss(self, z, y):
            return F.cross_entropy(z, y, ignore_index=2)

    report, apart, _ = compare(Ignores(), batches())
    assert "LabelCount(key=1, ignore_index=2)" in applied(report).summary
    assert apart < 1e-4


def test_losses_that_hardly_differ_tell_nothing():
    assert Losses(1.0, (1.0, 1.0), 1e-5).fit_mean([1, 2])
    assert not Losses(1.0, (1.0, 1.00002), 1e-5).lie_apart
    assert Losses(1.0, (0.5, 2.0), 1e-5).lie_apart
    assert not Losses(1.0, (0.5, 2.0), None).fit_mean([1, 1])
    assert Losses(1.252, (0.5, 2.0), None).fit_mean([1, 1])  # 16 bits may be off by 0.2 %


def test_rules_come_from_integers_and_masks_of_the_batch():
    batch = {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "labels": torch.ones(2, 3, dtype=torch.long),
        "y": torch.ones(2, dtype=torch.long),
        "x": torch.ones(2, 3),
        "attention_mask": torch.ones(2, 3, dtype=torch.long),
    }
    counts = [rule.weight_fn for rule in rules_for(batch)][2:]
    expected = [Count(), Count(shifted=True)]
    expected += [Count(key="attention_mask", ignore_index=0, shifted=shifted) for shifted in (False, True)]
    assert counts == expected


def test_an_lstm_that_has_learned_nothing_is_cut():
    """Its losses differ in the fifth digit, also with other weights of that size."""

    class Bytes(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
            self.rnn = nn.LSTM(64, 64, num_layers=2, batch_first=True)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.head(self.rnn(self.embed(batch))[0]).flatten(0, 1), batch.flatten())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    memsave = MemSave(microbatch=2)
    fit(Bytes(), [torch.randint(0, 256, (8, 32))], memsave)
    (summary,) = (each.summary for each in memsave.report.applied if each.technique == "microbatching")
    assert summary == "batches run in parts of at most 2 samples (loss: mean over samples)"


def test_a_token_weighted_mean_is_found_and_honours_weight_fn():
    class Tokens(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 6)

        def training_step(self, batch, batch_idx):
            logits = self.net(batch["x"])  # [B, T, V]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (8, 7), generator=generator)
    for row in range(8):
        labels[row, row % 6 :] = -100 if row % 6 else labels[row, 0]
    data = [{"x": torch.randn(8, 7, 4, generator=generator, dtype=torch.float64), "labels": labels}]
    module = Tokens().double()
    plain = fit(module, data, precision="64-true")
    weighted = Microbatching(size=3, weight_fn=lambda part: (part["labels"] != -100).sum())
    assert_same_run(plain, fit(module, data, MemSave(microbatch=weighted), precision="64-true"), EXACT)
    by_itself = MemSave(microbatch=3)
    assert_same_run(plain, fit(module, data, by_itself, precision="64-true"), EXACT)
    assert "LabelCount()" in by_itself.report.applied[1].summary


def test_a_loss_that_takes_gradients_is_known_for_a_mean():
    """As in networks of energies and forces, and in gradient penalties."""

    class Forces(Module):
        def training_step(self, batch, batch_idx):
            x = unpack(batch)[0].clone().requires_grad_()
            energy = self.net(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().mean()

    memsave = MemSave(microbatch=3)
    plain, ours = both(Forces(), whole_batches.batches(), memsave)
    assert_same_run(plain, ours, EXACT)
    assert "(loss: mean over samples)" in memsave.report.applied[1].summary


def test_layers_that_pack_their_weights_in_eval_mode_are_not_asked_to():
    class Packs(nn.Linear):
        support_avx512bf16_for_cpu = True  # as bitsandbytes' layers of 4 bits

        def forward(self, x):
            assert self.training
            return super().forward(x)

    module = Module()
    module.net = nn.Sequential(nn.Flatten(), Packs(5, 3))
    fit(module, [(torch.randn(8, 5), torch.arange(8) % 3)], MemSave(microbatch=4))


@pytest.mark.filterwarnings("ignore::lightning_memsave.NotLosslessWarning")
def test_the_probe_leaves_no_trace():
    class Noisy(Module):
        def __init__(self):
            super().__init__()
            self.seen: list[float] = []
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if not self.training:
                self.count += 1
            self.seen.append(float(torch.rand(())))
            return loss

    module = Noisy().double()
    calls = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            calls.append((CALLS[pl_module], len(pl_module.seen), float(pl_module.count), pl_module.seen[0]))

    for memsave in (None, MemSave(microbatch=3)):
        fit(module, whole_batches.batches(sizes=(6,)), memsave, precision="64-true", max_epochs=1, callbacks=[Count()])
    (_, _, _, first_random_number), ours = calls
    assert ours == (2 + 9, 2, 0.0, first_random_number)  # nine evaluations


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
def test_a_part_whose_loss_is_not_finite_is_no_part_of_a_mean():
    class Spread(Module):
        def training_step(self, batch, batch_idx):
            return self.net(unpack(batch)[0]).std(0).sum()

    memsave = MemSave(microbatch=2)
    with pytest.warns(MicrobatchWarning, match="neither the mean nor the sum"):
        plain, ours = both(Spread(), whole_batches.batches(), memsave)
    assert_same_run(plain, ours, EXACT)
