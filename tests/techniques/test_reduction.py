"""How a loss depends on its batch: told from losses, and the weights that follow."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.techniques.microbatching.reduction import (
    LabelCount,
    Losses,
    ReductionRule,
    rules_for,
)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x: x.square().mean(), (True, False)),
        (lambda x: x.square().sum(), (False, True)),
        (lambda x: torch.cdist(x, x).mean(), (False, False)),
        (lambda x: x.square().mean().sqrt(), (False, False)),
        (lambda x: x.new_zeros(()), (True, True)),
    ],
)
def test_reduction_is_told_from_losses(loss, expected):
    x = torch.randn(7, 2, dtype=torch.float64)
    losses = Losses(float(loss(x)), (float(loss(x[:2])), float(loss(x[2:]))), 1e-9)
    assert (losses.fit_mean([2, 5]), losses.fit_sum()) == expected


def test_a_batch_without_labels_weighs_its_parts_alike():
    parts = [({"labels": torch.full((2, 3), -100)}, 2.0)] * 2
    assert ReductionRule("mean", LabelCount()).weights(parts) == [0.5, 0.5]


# ------------------------------------------------------------------------------- labels
LABELS = torch.tensor([[5, 2, -100, -100], [5, 7, 7, -100]])


def test_labels_are_counted_wherever_they_are():
    class Output:
        labels = LABELS

    for count, batch in (
        (LabelCount(), {"labels": LABELS}),
        (LabelCount(), Output()),
        (LabelCount(key=1), (torch.zeros(2), LABELS)),
        (LabelCount(key="y"), {"labels": None, "y": LABELS}),
    ):
        assert count(batch) == 5.0
    assert LabelCount(ignore_index=7)({"labels": LABELS}) == 6.0
    assert LabelCount(shifted=True)({"labels": LABELS}) == 3.0


def test_weights_by_labels_give_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    logits = torch.randn(6, 4, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (6, 4))
    labels[0] = labels[1, 1:] = labels[4, :2] = -100
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    parts = [({"labels": labels[i : i + 2], "logits": logits[i : i + 2]}, 2.0) for i in (0, 2, 4)]
    weights = ReductionRule("mean", LabelCount()).weights(parts)
    total = sum(
        weight * torch.nn.functional.cross_entropy(part["logits"].flatten(0, 1), part["labels"].flatten())
        for (part, _), weight in zip(parts, weights, strict=True)
    )
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    (found,), (expected,) = (torch.autograd.grad(loss, logits, retain_graph=True) for loss in (total, whole))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_weights_of_parts():
    parts = [("a", 3.0), ("bcd", 1.0)]
    assert ReductionRule("mean").weights(parts) == [0.75, 0.25]
    assert ReductionRule("mean", len).weights(parts) == [0.25, 0.75]
    assert ReductionRule("sum").weights(parts) == [1.0, 1.0]
    assert ReductionRule("mean", lambda part: 0).weights([("all of it", 4.0)]) == [1.0]


def test_rules_are_named_as_one_writes_them():
    assert str(ReductionRule("sum")) == "sum"
    assert str(ReductionRule("mean", len)) == "mean with `weight_fn`"
    assert str(ReductionRule("mean", LabelCount(key="y", shifted=True))) == (
        "mean over `LabelCount(key='y', shifted=True)`"
    )


# ------------------------------------------------------------------------------- the rules of a batch
def counts_for(batch, ignored=()):
    return [rule.weight_fn for rule in rules_for(batch, ignored) if rule.weight_fn is not None]


def test_a_batch_without_labels_has_means_and_sums_of_samples():
    for batch in (torch.zeros(3), {"x": torch.zeros(3, 2)}, [torch.zeros(2), "names"], None, {"n": torch.tensor(3)}):
        assert rules_for(batch) == [ReductionRule("mean"), ReductionRule("sum")]


def test_labels_come_before_masks():
    batch = {"attention_mask": torch.ones(2, 4, dtype=torch.int64), "labels": LABELS}
    assert counts_for(batch) == [
        *(LabelCount(shifted=shifted) for shifted in (False, True)),
        *(LabelCount(key="attention_mask", ignore_index=0, shifted=shifted) for shifted in (False, True)),
    ]


def test_what_a_model_reads_is_no_label_unless_it_marks_what_to_ignore():
    assert counts_for({"input_ids": torch.ones(2, 4, dtype=torch.int64)}) == []
    assert {count.key for count in counts_for({"label_ids": LABELS})} == {"label_ids"}


def test_classes_of_samples_count_where_some_are_ignored():
    classes = torch.tensor([1, 2, -100, 0])
    assert counts_for((torch.zeros(4, 2), classes)) == [LabelCount(key=1)]
    assert counts_for((torch.zeros(4, 2), classes.clamp(min=0))) == []
    found = counts_for((torch.zeros(4, 2), classes), ignored=[2])
    assert {(count.key, count.ignore_index) for count in found} == {(1, -100), (1, 2)}


# ------------------------------------------------------------------------------- losses
def test_losses_fit_the_rule_that_they_came_from():
    mean, total = Losses(3.0, (1.0, 4.0), 1e-9), Losses(5.0, (1.0, 4.0), 1e-9)
    assert mean.fit_mean([1, 2])
    assert not mean.fit_mean([1, 1])
    assert (mean.fit_sum(), total.fit_sum()) == (False, True)
    assert mean.off_mean([1, 1]) == 0.5
    rules = [ReductionRule("mean"), ReductionRule("sum"), ReductionRule("mean", len)]
    assert mean.best(rules, lambda rule: [1, 2] if rule.weight_fn is None else [1, 1]) == [ReductionRule("mean")]


def test_losses_that_are_nearly_equal_tell_nothing():
    for tolerance in (1e-6, None):
        assert not Losses(1.0, (1.0, 1.0 + 1e-6), tolerance).lie_apart
        assert Losses(1.0, (0.5, 1.5), tolerance).lie_apart


def test_losses_that_are_no_numbers_mean_nothing():
    for whole, parts in ((float("nan"), (1.0,)), (1.0, (float("inf"), 1.0)), (1.0, ())):
        assert not Losses(whole, parts, 1e-9).are_finite
    assert Losses(1.0, (1.0,), 1e-9).are_finite


def test_of_losses_in_16_bits_the_weights_that_fit_best_are_chosen():
    """Two rules are nearer to the loss than bfloat16 tells apart, and only one is what it was made with."""
    by_samples, by_labels = ReductionRule("mean"), ReductionRule("mean", len)
    shares = {by_samples: [3.02, 6.98], by_labels: [3.0, 7.0]}
    parts = (0.9, 2.9)
    whole = 0.3 * 0.9 + 0.7 * 2.9
    losses = Losses(whole, parts, None)
    assert losses.fit_mean(shares[by_samples])
    assert losses.fit_mean(shares[by_labels])
    assert losses.best([by_samples, by_labels], shares.get) == [by_labels]
    assert Losses(whole, parts, 0.01).best([by_samples, by_labels], shares.get) == [by_samples, by_labels]
    assert not losses.fit_mean([3.2, 6.8])
