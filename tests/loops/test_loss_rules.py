"""Microbatches are `exact` where they are said to be, on losses of every kind; others are run whole, or `changed`."""

from __future__ import annotations

import copy
import random
import warnings

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

from lightning_memsave import LabelCount, MemSave, Microbatching, MicrobatchWarning
from lightning_memsave.core.errors import NotLosslessWarning
from lightning_memsave.loops import loss_reduction
from lightning_memsave.loops.loss_rules import LossRules
from lightning_memsave.loops.sample_noise import SampleNoise
from lightning_memsave.techniques.microbatching.reduction import LabelCount as Count
from lightning_memsave.techniques.microbatching.reduction import Losses, ReductionRule, rules_for

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
DIM, CLASSES, BATCH = 6, 4, 12


class Base(L.LightningModule):
    """A small classifier; `loss(z, y)` is what each case says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(DIM, 16), nn.Linear(16, CLASSES)

    def training_step(self, batch, batch_idx):
        self.batch_idx = batch_idx
        return self.loss(self.head(self.first(batch[0]).tanh()), batch[1])

    def loss(self, z, y):
        return F.cross_entropy(z, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def batches(num=4, *, is_sorted=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num * BATCH, DIM, generator=generator, dtype=dtype)
    y = torch.randint(CLASSES, (num * BATCH,), generator=generator)
    return list(zip(x.split(BATCH), (y.sort()[0] if is_sorted else y).split(BATCH), strict=True))


def fit(module, data, memsave=None, **options):
    callbacks = [] if memsave is None else [memsave]
    loader = DataLoader(data, batch_size=None)
    trainer = L.Trainer(**{"max_epochs": 1, "accelerator": "cpu"} | options, **QUIET, callbacks=callbacks)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # what modules draw from
    torch.manual_seed(0)
    trainer.fit(module, loader)
    return module


def compare(module, data, size=4, **options):
    """Train with and without microbatches: the report, how far parameters lie apart, and what was warned of."""
    plain, ours = copy.deepcopy(module), copy.deepcopy(module)
    memsave = MemSave(microbatch=size if isinstance(size, Microbatching) else Microbatching(size=size))
    fit(plain, data, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(ours, data, memsave, **options)
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max() / a.detach().abs().max().clamp(min=1e-6)) for a, b in pairs)
    messages = [str(each.message) for each in caught if each.category in (MicrobatchWarning, NotLosslessWarning)]
    return memsave.report, apart, messages


def applied(report):
    return next((a for a in report.applied if a.technique == "microbatching"), None)


# ---------------------------------------------------------------------- what the user says of a loss
class Reduced(Base):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def loss(self, z, y):
        return F.cross_entropy(z, y, reduction=self.reduction, ignore_index=0)


@pytest.mark.parametrize(
    ("given", "true", "reason"),
    [
        ("mean", "mean", "average"),  # over labels
        ("mean", "sum", "average"),
        ("sum", "mean", "add up"),
        ("sum", "sum", None),
    ],
)
def test_a_rule_that_the_user_gave_is_used_and_looked_at(given, true, reason):
    report, apart, messages = compare(Reduced(true), batches(), Microbatching(size=5, reduction=given))
    assert f"(loss: {given}" in applied(report).summary
    if reason is None:
        assert (applied(report).loss_class, messages) == ("exact", [])
        assert apart < 1e-5
        return
    assert applied(report).reasons == (f"the losses of microbatches do not {reason} to that of the batch",)
    assert apart > 1e-4
    warned = [message for message in messages if "must say how the losses of microbatches" in message]
    assert len(warned) == 1
    assert "`Microbatching.reduction`" in warned[0]


def test_a_rule_that_the_user_gave_is_used_where_the_loss_tells_nothing():
    class Scaled(Base):
        def loss(self, z, y):
            return F.cross_entropy(z, y) * (self.batch_idx > 0)

    report, apart, messages = compare(Scaled(), batches(), Microbatching(size=5, reduction="mean"))
    assert (applied(report).loss_class, applied(report).reasons, messages) == ("exact", (), [])
    assert "ran whole" not in applied(report).summary
    assert apart < 1e-5


# ---------------------------------------------------------------------- losses that are run whole
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


# ---------------------------------------------------------------------- losses that are cut
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


# ---------------------------------------------------------------------- losses that change in the middle
class FromAStep(Base):
    def loss(self, z, y):
        return F.cross_entropy(z, y) + (z.std(0).mean() if self.global_step >= 3 else 0)


class FromABatch(Base):
    def loss(self, z, y):
        return F.cross_entropy(z, y) + (z.std(0).mean() if self.batch_idx >= 3 else 0)


class FromAnEpoch(Base):
    def loss(self, z, y):
        return F.cross_entropy(z, y) + (z.std(0).mean() if self.current_epoch >= 1 else 0)


@pytest.mark.parametrize("kind", [FromAStep, FromABatch, FromAnEpoch])
def test_a_loss_that_stops_to_be_a_mean_is_noticed(kind):
    report, _, messages = compare(kind(), batches(8), max_epochs=2)
    assert applied(report).loss_class == "changed"
    assert "neither the mean nor the sum" in applied(report).reasons[0]
    assert "batches ran whole" in applied(report).summary
    assert messages


# ---------------------------------------------------------------------- what a step does besides
class Averages(Base):
    """A teacher that follows in `training_step`."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def loss(self, z, y):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
        return F.cross_entropy(z, y) + self.teacher.weight.square().sum() * z.mean()


class Remembers(Base):
    """Hidden state from batch to batch."""

    hidden = None

    def loss(self, z, y):
        loss = F.cross_entropy(z if self.hidden is None else z + self.hidden, y)
        self.hidden = z.detach().mean(0)
        return loss


class CountsBatches(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, z, y):
        self.seen += 1
        return F.cross_entropy(z, y)


class SkipsSome(Base):
    def loss(self, z, y):
        return None if not z.requires_grad or (y == 0).sum() > 1 else F.cross_entropy(z, y)


class DrawsFromPython(Base):
    def loss(self, z, y):
        return F.cross_entropy(z * random.choice([0.5, 1.5]), y)


class DrawsFromNumpy(Base):
    def loss(self, z, y):
        return F.cross_entropy(z * float(np.random.rand()), y)  # noqa: NPY002


class HasHooks(Base):
    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


CHANGED = {
    Averages: "changes `teacher.weight`",
    Remembers: "changes `hidden`",
    CountsBatches: "changes `seen`",
    SkipsSome: "returned None for some",
    DrawsFromPython: "draws random numbers",
    DrawsFromNumpy: "draws random numbers",
    HasHooks: "hooks get the gradients.*`head.weight`",
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_a_step_does_besides_its_loss_makes_the_class_changed(kind):
    microbatch = Microbatching(size=4, reduction="mean") if kind is SkipsSome else 4
    module = kind() if kind is not HasHooks else Base()
    plain, ours = module, copy.deepcopy(module)
    if kind is HasHooks:  # deepcopy drops hooks
        ours = HasHooks()
        ours.load_state_dict(plain.state_dict())
    memsave = MemSave(microbatch=microbatch)
    with pytest.warns(NotLosslessWarning, match=CHANGED[kind]):
        fit(ours, batches(), memsave)
    assert applied(memsave.report).loss_class == "changed"


def test_strict_refuses_it():
    memsave = MemSave(microbatch=Microbatching(size=4, strict=True))
    with pytest.raises(ValueError, match=r"strict.*changes `seen`"):
        fit(CountsBatches(), batches(), memsave)


def test_a_cache_that_a_step_fills_once_is_no_change():
    class Caches(Base):
        mask = None

        def loss(self, z, y):
            if self.mask is None:
                self.mask = torch.ones(CLASSES)
            return F.cross_entropy(z * self.mask, y)

    report, apart, _ = compare(Caches(), batches())
    assert applied(report).loss_class == "exact"
    assert apart < 1e-4


# ---------------------------------------------------------------------- language models, cut by themselves
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


# ---------------------------------------------------------------------- the parts
def test_losses_that_hardly_differ_tell_nothing():
    assert Losses(1.0, (1.0, 1.0), 1e-5).fit_mean([1, 2])
    assert not Losses(1.0, (1.0, 1.00002), 1e-5).lie_apart
    assert Losses(1.0, (0.5, 2.0), 1e-5).lie_apart
    assert not Losses(1.0, (0.5, 2.0), None).fit_mean([1, 1])
    assert Losses(1.252, (0.5, 2.0), None).fit_mean([1, 1])  # 16 bits may be off by 0.2 %


def test_rules_that_disagree_on_a_batch_are_asked_about():
    rules, parts = LossRules(), [({"labels": torch.tensor([[1, 2]])}, 1), ({"labels": torch.tensor([[1, -100]])}, 1)]
    rules.known = (ReductionRule("mean"), ReductionRule("mean", Count()))
    assert rules.weights(parts) is None
    full = [({"labels": torch.ones(n, 2, dtype=torch.long)}, n) for n in (2, 1)]
    assert rules.weights(full) == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(("seconds", "says"), [(1.0, True), (0.0, False)])
def test_what_asking_costs_is_told_once(monkeypatch, seconds, says):
    clock = iter(range(100))
    monkeypatch.setattr("lightning_memsave.loops.loss_rules.time.perf_counter", lambda: float(next(clock)))
    rules = LossRules()
    rules.is_due((torch.zeros(2),), 0)
    rules.seconds = seconds
    text = rules.cost_of_first_epoch()
    assert (text is not None) == says
    assert text is None or "took 1.0 s, 100% of the first epoch" in text
    assert rules.cost_of_first_epoch() is None


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


@pytest.mark.parametrize(
    ("draw", "is_sure"),
    [
        (lambda n: torch.randn(n, 3), True),
        (lambda n: F.dropout(torch.ones(n, 3)), True),
        (lambda n: torch.rand(()), True),
        (lambda n: F.dropout(torch.ones(2 * n, 3)), False),
        (lambda n: torch.randperm(n), False),
        (lambda n: torch.randn(7, 3), False),
    ],
)
def test_noise_says_whether_it_is_a_samples_own(draw, is_sure):
    with SampleNoise(0, 5, 5) as whole:
        draw(5)
    with SampleNoise(2, 3, 5) as part:
        draw(3)
    assert (whole.is_sure and part.is_sure) == is_sure


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_others_for_a_while_and_then_the_same_bits(dtype):
    module = nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Linear(300, 2)).to(dtype)
    nn.init.zeros_(module[2].weight)
    with torch.no_grad():
        module[2].bias.copy_(torch.tensor([-0.0, 0.0]))
    before = [p.detach().clone() for p in module.parameters()]
    with loss_reduction._moved(module):
        moved = [p.detach().clone() for p in module.parameters()]
    for p, mine, its in zip(module.parameters(), before, moved, strict=True):
        assert torch.equal(p.view(torch.uint8), mine.view(torch.uint8))
        assert (its != mine).any()
        assert its.isfinite().all()
