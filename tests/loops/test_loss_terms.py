"""The terms of a loss and the labels that it counts, against the numbers that made it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_memsave.loops.loss_terms import LossTerms
from tests.loops.loss_runs import CLASSES, Base, applied, batches, compare
from tests.loops.test_loss_reduction import Hugging


def number(value):
    return torch.tensor([value], requires_grad=True).sum()


def in_place(a, b):
    a = a.clone()
    a += 0.5 * b
    return a


FORMS = {
    "a sum": (lambda a, b: a.exp() + b.tanh(), {"exp": 1, "tanh": 1}),
    "a weight before and behind": (lambda a, b: 0.5 * a.exp() + b.tanh() * 4, {"exp": 0.5, "tanh": 4}),
    "in place": (lambda a, b: in_place(a.exp(), b.tanh()), {"exp": 1, "tanh": 0.5}),
    "a difference": (lambda a, b: 1 - a.exp() - b.tanh(), {"exp": 1, "tanh": 1}),
    "negative": (lambda a, b: -(a.exp() - b.tanh()), {"exp": 1, "tanh": 1}),
    "python's sum": (lambda a, b: sum([a.exp(), b.tanh(), a.exp()]), {"exp": 1, "tanh": 1}),
    "divided": (lambda a, b: (a.exp() + b.tanh()) / 2, {"exp": 0.5, "tanh": 0.5}),
    "divided by a number that is a tensor": (
        lambda a, b: (a.exp() + b.tanh()) / torch.tensor(4.0), {"exp": 0.25, "tanh": 0.25},
    ),
    "scaled by a learned number": (lambda a, b: (a.exp() + b.tanh()) * b.cos(), {"exp": 0.99, "tanh": 0.99}),
    "with alpha": (lambda a, b: torch.add(a.exp(), b.tanh(), alpha=3), {"exp": 1, "tanh": 3}),
    "the same number": (lambda a, b: (a.exp().float().clone() + b.tanh().mean()).squeeze(), {"exp": 1, "tanh": 1}),
    "one function twice": (lambda a, b: a.exp() + 2 * b.exp() + b.tanh(), {"exp": 2, "tanh": 1}),
    "a product of two": (lambda a, b: a.exp() * b.tanh() + b.tanh(), {"mul": 1, "tanh": 1}),
    "a quotient of two": (lambda a, b: a.exp() / b.tanh() + b.tanh(), {"div": 1, "tanh": 1}),
    "one term": (lambda a, b: (a * b).exp(), {"exp": 1}),
    "stacked": (lambda a, b: torch.stack([a.exp(), b.tanh()]).sum(), {"exp": 1, "tanh": 1}),
    "the mean of a stack": (lambda a, b: torch.stack((a.exp(), 2 * b.tanh())).mean(), {"exp": 0.5, "tanh": 1}),
    "stacked and weighted": (
        lambda a, b: (torch.stack([a.exp(), b.tanh()]) * torch.tensor([2.0, 3.0])).sum(), {"exp": 2, "tanh": 3},
    ),
    "weighted by what is learned": (
        lambda a, b: (torch.stack([a.exp(), b.tanh()]) / number(2.0)).sum(), {"exp": 0.5, "tanh": 0.5},
    ),
    "a product of rows": (
        lambda a, b: torch.dot(torch.tensor([2.0, 3.0]), torch.stack([a.exp(), b.tanh()])), {"exp": 2, "tanh": 3},
    ),
    "of one element each": (lambda a, b: a.view(1).exp() + 2 * b.view(1).tanh(), {"exp": 1, "tanh": 2}),
    "joined": (lambda a, b: torch.cat([a.view(1).exp(), b.view(1).tanh()]).sum(), {"exp": 1, "tanh": 1}),
    "an empty dimension less": (lambda a, b: (a.view(1, 1).exp() + b.tanh()).squeeze(), {"exp": 1, "tanh": 1}),
    "a row less a number": (lambda a, b: (1 - torch.stack([a.exp(), b.tanh()])).mean(), {"exp": 0.5, "tanh": 0.5}),
    "edited unseen": (lambda a, b: edited(a.exp() + b.tanh()), {"": 1}),
}  # fmt: skip


def edited(loss):
    loss.detach().zero_()
    return loss


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_has_the_terms_that_were_added(form):
    make, scales = FORMS[form]
    with LossTerms() as terms:
        loss = make(number(2.0), number(3.0))
    found = terms.of(loss)
    assert {term.function: term.scale for term in found} == pytest.approx(scales, rel=2e-2)
    constant = 1.0 if form in ("a difference", "a row less a number") else 0.0
    assert sum(term.value for term in found) + constant == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_numbers_that_can_be_read_are_left_alone():
    with LossTerms() as terms:
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        (ragged * 2).values().sum()
        torch.stack([torch.ones((), device="meta")] * 2).sum()
        torch.eye(1).to_sparse() * 2
        loss = number(2.0).exp() + number(3.0).tanh()
    assert {term.function for term in terms.of(loss)} == {"exp", "tanh"}


def test_numbers_that_are_added_to_each_other_again_and_again_take_no_time():
    with LossTerms() as terms:
        x, v = number(1.0).exp(), number(2.0).tanh()
        for _ in range(200):
            x = x + 0.01 * v
            v = v - 0.01 * x
        many = sum(number(float(i)).exp() for i in range(-200, 0))
    assert {term.function for term in terms.of(x)} == {"exp", "tanh"}
    assert sum(term.value for term in terms.of(many)) == pytest.approx(many.item(), rel=1e-4)


def test_labels_are_counted_where_a_plain_mean_is_taken_of_them():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, -100, 2, 3, 3])
    ways = {
        "plain": (lambda: F.cross_entropy(logits, labels), 5),
        "another index": (lambda: F.cross_entropy(logits, labels.clamp(min=0), ignore_index=3), 4),
        "logarithms": (lambda: F.nll_loss(logits.log_softmax(1), labels), 5),
        "a sum": (lambda: F.cross_entropy(logits, labels, reduction="sum"), None),
        "weights": (lambda: F.cross_entropy(logits, labels, torch.ones(4)), None),
        "probabilities": (lambda: F.cross_entropy(logits, logits.softmax(1)), None),
        "twice": (lambda: F.cross_entropy(logits, labels) + F.cross_entropy(logits, labels), None),
        "never": (lambda: logits.mean(), None),
    }
    terms = LossTerms()
    for name, (way, expected) in ways.items():
        terms.begin()
        with terms:
            loss = way()
        assert terms.num_labels(loss) == expected, name
    assert terms.ignored == {-100, 3}


def test_labels_that_are_ignored_are_noted_where_each_has_a_loss_of_its_own():
    with LossTerms() as terms:
        F.cross_entropy(torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 3, 3]), ignore_index=2, reduction="none")
    assert terms.ignored == {2}


def test_labels_of_what_is_only_logged_do_not_count():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, -100, 2, 3, 3])
    with LossTerms() as terms:
        perplexity = F.cross_entropy(logits, labels).exp()
        loss = logits.square().mean()
    assert terms.num_labels(loss) is None
    assert terms.num_labels(perplexity) is None


class SlightBalance(Base):
    """A balance of load so small that rounding of the whole loss hides it."""

    def loss(self, z, y):
        load = z.softmax(-1).mean(0)
        return F.cross_entropy(z, y) + 1e-5 * CLASSES * load.square().sum()


class StackedBalance(SlightBalance):
    """The same in a row of weighted terms."""

    def loss(self, z, y):
        load = z.softmax(-1).mean(0)
        terms = torch.stack([F.cross_entropy(z, y), CLASSES * load.square().sum()])
        return (terms * torch.tensor([1.0, 1e-5])).sum()


class SlightMean(Base):
    """As small a term that is a mean over samples, and one that is the same for all."""

    def loss(self, z, y):
        return F.cross_entropy(z, y) + 1e-5 * z.square().mean() + 1e-5 * self.head.weight.square().sum()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_small_term_is_held_against_its_own_size(precision):
    for balance in (SlightBalance(), StackedBalance()):
        report, apart, _ = compare(balance, batches(), precision=precision)
        assert applied(report) is None
        assert apart == 0
    report, apart, _ = compare(SlightMean(), batches(), precision=precision)
    assert applied(report).loss_class == "exact"
    assert apart < (1e-4 if precision == "32-true" else 0.1)


def test_a_small_term_is_seen_where_weights_have_16_bits():
    for balance in (SlightBalance(), StackedBalance()):
        report, apart, _ = compare(balance.to(torch.bfloat16), batches(dtype=torch.bfloat16), precision="bf16-true")
        assert applied(report) is None
        assert apart == 0


SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
TOKENS = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            **SIZES, **TOKENS, num_hidden_layers=2, num_local_experts=4, use_cache=False, output_router_logits=True
        )
    )


def jetmoe():
    sizes = {**SIZES, "kv_channels": 8, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return JetMoeForCausalLM(
        JetMoeConfig(**{**TOKENS, **sizes}, num_hidden_layers=2, output_router_logits=True, use_cache=False)
    )


@pytest.mark.parametrize("mixture", [mixtral, jetmoe])
def test_experts_whose_load_is_balanced_are_run_whole(mixture):
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 100, (3, 4, 24))]
    report, apart, _ = compare(Hugging(mixture), data, size=2)
    assert applied(report) is None
    assert apart == 0


@pytest.mark.parametrize("length", [24, 512])
def test_padded_batches_of_a_model_that_has_not_learned_are_cut_by_shifted_labels(length):
    """Its losses hardly differ between samples, nor do the two counts."""

    def llama():
        return LlamaForCausalLM(LlamaConfig(**SIZES, **TOKENS, num_hidden_layers=2, max_position_embeddings=512))

    ids, num_read = torch.randint(3, 100, (3, 8, length)), torch.randint(length // 2, length + 1, (3, 8, 1))
    is_padding = torch.arange(length) >= num_read
    data = [
        {"input_ids": x.masked_fill(pad, 0), "labels": x.masked_fill(pad, -100)}
        for x, pad in zip(ids, is_padding, strict=True)
    ]
    report, apart, _ = compare(Hugging(llama), data, size=2)
    assert "mean over `LabelCount(shifted=True)`" in applied(report).summary
    assert applied(report).loss_class == "exact"
    assert apart < 1e-3


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_one_sample_does_not_have_is_noticed_when_it_sets_in(size):
    class Spread(Base):
        def loss(self, z, y):
            mean = F.cross_entropy(z, y)
            return mean + z.mean(1).var() if self.batch_idx >= 3 else mean

    data = [(x[:4], y[:4]) for x, y in batches(8)]
    report, apart, messages = compare(Spread(), data, size=size)
    assert applied(report).loss_class == "changed"
    assert any("the loss of some of its samples is not finite" in message for message in messages)
    assert apart < 1e-4, "asked again in that batch, which is run whole, as are later ones"


def test_terms_of_other_numbers_in_transforms_are_left_alone():
    net = nn.Linear(3, 1)

    def loss(weight, x):
        return F.linear(x, weight).square().mean() + weight.sum() * 0.1

    with LossTerms() as terms:
        each = torch.func.vmap(loss, (None, 0))(net.weight, torch.randn(4, 2, 3))
        whole = each.mean() + 1.0
    assert [(term.function, term.scale) for term in terms.of(whole)] == [("mean", 1.0)]
