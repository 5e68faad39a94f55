"""Two microbatches in place of all: what they show, and what the others add."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave import Checkpointing, MemSave, Microbatching, Recipe
from lightning_memsave.core.errors import BudgetTooSmallError
from lightning_memsave.prediction.microbatch_extrapolation import Shown, as_if_whole, first_microbatches, rest_bytes
from lightning_memsave.prediction.real_run import Trial
from tests.prediction.budget_runs import Net, data, train


@pytest.mark.parametrize("size", [48, 32, 30, 20, 14, 5])
def test_a_trial_of_microbatches_has_the_peak_of_the_run_also_where_they_are_uneven(size):
    recipe = Recipe("cut", (Microbatching(size=size),))
    memsave = MemSave(recipe)
    train(memsave, loader=data(shuffle=False), max_epochs=1)
    found = Trial(Net(), next(iter(data(shuffle=False))))(recipe.techniques)
    num_left_out = -(-96 // size) - 2
    assert 0 <= found.peak_bytes - memsave.report.peak_bytes <= 64 * num_left_out  # what is noted of each


def test_more_than_two_are_taken_where_so_many_samples_are_needed():
    single = [Microbatching(size=1)]
    assert first_microbatches(single, samples(16), 5) == (5, 11)
    assert first_microbatches([Microbatching(size=3)], samples(16), 5) == (6, 4)
    assert first_microbatches(single, samples(5), 5) is None


def test_a_trial_counts_asking_how_the_loss_depends_on_the_batch(monkeypatch):
    """The run asks in some of its steps, with more samples than a microbatch has."""
    asked = []
    monkeypatch.setattr(
        "lightning_memsave.loops.loss_rules.LossRules.ask_next", lambda rules: asked.append(rules._num_cut)
    )
    Trial(Net(), next(iter(data(shuffle=False))))([Microbatching(size=1)])
    assert asked == [4], "in the step that is profiled"


def test_regions_of_a_part_get_the_budget_of_the_run_less_what_is_missing():
    asked = []

    def predict(techniques):
        asked.extend(techniques)
        error = BudgetTooSmallError("too small")
        error.lowest_bytes = 700
        raise error

    regions = Checkpointing(budget=1000), Checkpointing(budget=0.5), Checkpointing(method="blocks")
    techniques = [Microbatching(size=4), *regions]
    with pytest.raises(BudgetTooSmallError) as raised:
        as_if_whole(predict, techniques, 300)
    assert raised.value.lowest_bytes == 1000
    assert asked == [techniques[0], Checkpointing(budget=700), *techniques[2:]]


def samples(num):
    return {"x": torch.zeros(num, 5), "y": torch.zeros(num, dtype=torch.long)}


@pytest.mark.parametrize(
    ("num_samples", "size", "expected"),
    [
        (10, 3, (6, 2)),  # 3, 3, 2, 2
        (9, 4, (6, 1)),  # 3, 3, 3
        (7, 3, (5, 1)),  # 3, 2, 2
        (5, 1, (2, 3)),
        (8, 4, None),  # both are all
        (8, 8, None),
        (8, 100, None),
        (0, 4, None),
    ],
)
def test_the_first_two_microbatches_stand_for_all(num_samples, size, expected):
    techniques = [Checkpointing(method="blocks"), Microbatching(size=size)]
    assert first_microbatches(techniques, samples(num_samples)) == expected


@pytest.mark.parametrize(
    ("techniques", "batch"),
    [
        ([], samples(10)),
        ([Checkpointing(method="blocks")], samples(10)),
        ([Microbatching()], samples(10)),
        ([Microbatching(size=3, split_fn=lambda batch, size: [batch])], samples(10)),
        ([Microbatching(size=3)], {"x": torch.zeros(10, 5), "weights": torch.zeros(3)}),
        ([Microbatching(size=3)], torch.zeros(())),
    ],
)
def test_what_is_not_cut_by_a_size_needs_all_its_samples(techniques, batch):
    assert first_microbatches(techniques, batch) is None


def test_the_rest_is_bytes_of_the_samples_and_a_note_of_each_microbatch():
    bytes_per_sample = 5 * 4 + 8
    assert rest_bytes(samples(10), Shown(6, 2)) == 4 * bytes_per_sample + 2 * 64  # 3, 3, and two of 2
    assert rest_bytes(samples(7), Shown(5, 1)) == 2 * bytes_per_sample + 64  # 3, 2, and one of 2
    assert rest_bytes(samples(5), Shown(2, 3)) == 3 * bytes_per_sample + 3 * 64


def test_settings_of_a_part_are_those_of_the_whole_but_for_bytes():
    techniques = [
        Microbatching(size=4),
        Checkpointing(budget="1KiB"),
        Checkpointing(budget=100),
        Checkpointing(budget=0.5),
    ]
    found = as_if_whole(list, techniques, 200)
    assert [each.budget for each in found[1:]] == [824, 1, 0.5]
    assert found[0] is techniques[0]
    assert as_if_whole(list, techniques[2:], 0) == techniques[2:]
