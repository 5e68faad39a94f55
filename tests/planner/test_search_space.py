"""Settings that a planner may choose from: what each recipe may use, and what each costs."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from lightning_memsave import Checkpointing, MemSave, Microbatching, OptimizerState
from lightning_memsave.planner.search_space import (
    MANY_BLOCKS,
    OVERHEAD,
    TIERS,
    Option,
    Tiled,
    describe,
    dimensions,
    levels,
    overhead_of,
    time_factor,
    with_regions_for,
)
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.tiling import Tiling


def rows(name):
    text = (Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


NESTED = [row for row in rows("checkpointing_depth") if row["setting"] == "recursive"]


def table(tier, is_cut_exact=True, **about):
    return dimensions(1000, 2000, tier=tier, num_samples=64, is_cut_exact=is_cut_exact, **about)


def test_a_recipe_never_uses_what_a_later_one_may():
    assert levels(table("lossless", is_cut_exact=False)) == [(0, 0)]
    assert levels(table("balanced", is_cut_exact=False)) == [(0, 0), (2, 1), (3, 1)]
    assert levels(table("extreme")) == [(0, 0), (2, 1), (3, 1), (3, 2)]
    for options in table("lossless").values():
        assert {option.loss_class for option in options} == {"exact"}


def test_microbatches_that_change_a_result_are_not_lossless():
    assert len(table("lossless", is_cut_exact=False)[Microbatching]) == 1
    sizes = [o.config.size for o in table("lossless")[Microbatching] if o.config is not None]
    assert sizes == [32, 22, 16, 11, 8, 6, 4, 3, 2, 1]


def times(table, kind):
    return {option.text: option.time_factor for option in table[kind]}


def test_settings_cost_what_the_model_makes_them_cost():
    small, large = (
        dimensions(1000, 2000, tier="balanced", num_samples=64, is_cut_exact=True, overhead=each)
        for each in (0.25, 0.006)
    )
    for kind, text in (
        (Microbatching, "microbatch=32"),
        (ActivationCompression, 'activations="exact"'),
        (OptimizerState, 'optimizer_state=OptimizerState(first_moment="32bit", gradients="release")'),
    ):
        assert times(small, kind)[text] > times(large, kind)[text] > 1
    assert times(small, Microbatching)["microbatch=16"] == 1.75  # four parts
    tight, wide = (
        dimensions(size, 2000, tier="lossless", num_samples=64, is_cut_exact=True)[Checkpointing][1]
        for size in (500, 1900)
    )
    assert tight.time_factor > wide.time_factor > 1
    beyond = dimensions(3000, 2000, tier="lossless", num_samples=64, is_cut_exact=True)[Checkpointing][1]
    assert beyond.time_factor == 1.05


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("8bit", 'optimizer_state="8bit"'),
        ("4bit", 'optimizer_state="4bit"'),
        ("32bit, released", 'optimizer_state=OptimizerState(first_moment="32bit", gradients="release")'),
        ("8bit, released", 'optimizer_state=OptimizerState(gradients="release")'),
    ],
)
def test_optimizer_state_costs_what_was_measured(setting, text):
    (row,) = (row for row in rows("optimizer_state") if row["setting"] == setting)
    factor = times(table("extreme"), OptimizerState)[text]
    assert float(row["cpu_time_ratio_p20"]) * 0.98 < factor < float(row["cpu_time_ratio_p80"]) * 1.02


def nested_regions(**known):
    table = dimensions(1000, 2000, tier="lossless", num_samples=64, is_cut_exact=True, **known)
    return times(table, Checkpointing)['checkpointing="recursive"']


@pytest.mark.parametrize("row", NESTED, ids=lambda row: row["n"])
def test_nested_regions_cost_what_was_measured_at_every_depth(row):
    low, high = float(row["cpu_time_ratio_p20"]), float(row["cpu_time_ratio_p80"])
    assert low * 0.95 < nested_regions(num_blocks=int(row["n"])) < high * 1.05


def test_nested_regions_of_a_few_blocks_are_hardly_slower_than_the_best_groups():
    table = dimensions(1000, 2000, tier="lossless", num_samples=64, is_cut_exact=True)
    groups = times(table, Checkpointing)['checkpointing="sqrt"']
    assert nested_regions(num_blocks=1) == nested_regions(num_blocks=4) == groups < nested_regions(num_blocks=12)
    assert nested_regions() == nested_regions(num_blocks=MANY_BLOCKS)


@pytest.mark.parametrize(
    ("num_operations", "seconds", "expected"),
    [
        (1000, 0.06, 0.25),
        (1000, 0.064, 0.25),  # the nearest power of two
        (1000, 35.0, OVERHEAD),
        (1000, 1e-6, 1.0),
        (None, 1.0, OVERHEAD),
        (10, None, OVERHEAD),
    ],
)
def test_how_much_of_a_step_starts_operations(num_operations, seconds, expected):
    assert overhead_of(num_operations, seconds) == expected


def test_off_comes_first_and_costs_nothing():
    for tier in TIERS:
        for options in table(tier).values():
            assert options[0].config is None
            assert options[0].time_factor == 1.0
            assert all(option.config is not None and option.time_factor >= 1.0 for option in options[1:])
    assert describe([options[0] for options in table("extreme").values()]) == "nothing"


def test_a_text_is_what_a_user_writes_for_the_config():
    names = {"MemSave": MemSave, "OptimizerState": OptimizerState, "Checkpointing": Checkpointing, "Tiling": Tiling}
    about = {"has_wide_head": True, "tiled": Tiled(("net",), 64)}
    tables = [*table("extreme").values(), *table("extreme", **about).values()]
    options = [option for options in tables for option in options if option.config is not None]
    assert len(options) > 40
    for option in options:
        made = eval(f"MemSave('measure', {option.text})", names)
        assert made.recipe.get(type(option.config)) == option.config


@pytest.mark.parametrize(("first", "second", "expected"), [(0, 3, True), (2, 3, True), (3, 3, True), (3, 2, False)])
def test_the_weaker_of_two_settings_saves_no_more(first, second, expected):
    options = [Option(text="", strength=strength) for strength in (first, second)]
    assert options[0].is_no_stronger_than(options[1]) is expected


def test_of_settings_without_a_known_strength_nothing_is_said_but_that_off_is_the_weakest():
    unknown, off = Option(text=""), Option(text="", strength=0)
    assert not unknown.is_no_stronger_than(off)
    assert not Option(text="", strength=1).is_no_stronger_than(unknown)
    assert off.is_no_stronger_than(unknown)


@pytest.mark.parametrize(
    ("num_samples", "sizes"), [(64, [32, 16, 8, 4]), (5, [3, 2, 1]), (2, [1]), (100, [50, 25, 13, 7])]
)
def test_tiles_are_of_a_half_to_a_sixteenth_of_the_samples(num_samples, sizes):
    options = table("lossless", tiled=Tiled(("a", "b"), num_samples))[Tiling]
    assert [option.config for option in options[1:]] == [Tiling(modules=("a", "b"), dim=0, size=size) for size in sizes]
    assert {option.loss_class for option in options} == {"exact"}
    assert [option.text for option in table("lossless", tiled=Tiled((), num_samples))[Tiling]] == ["no tiles"]


TILED = [row for row in rows("tiling") if "tiles of" in row["setting"] and "positions" not in row["setting"]]


@pytest.mark.parametrize("row", TILED, ids=lambda row: f"{row['model']}, {row['setting']}")
def test_tiles_cost_what_was_measured_within_a_third(row):
    cut = next(r for r in rows("tiling") if r["model"] == row["model"] and r["setting"].startswith("microbatches of 8"))
    overhead = (float(cut["cpu_time_ratio"]) - 1) / 7  # each of the other microbatches starts all operations again
    num_samples = 64
    options = dimensions(
        *(1000, 2000),
        **{"tier": "lossless", "num_samples": None, "is_cut_exact": False, "overhead": overhead},
        tiled=Tiled(("net",), num_samples),
    )[Tiling]
    size = int(row["setting"].split()[2])
    found = [option.time_factor for option in options if option.config and option.config.size == size]
    assert bool(found) is (size >= num_samples // 16)
    assert all(factor == pytest.approx(float(row["cpu_time_ratio"]), rel=1 / 3) for factor in found)


def test_a_loss_may_keep_no_logits_where_a_model_ends_in_many_classes():
    texts = [option.text for option in table("balanced", has_wide_head=True)[ActivationCompression]]
    assert texts == [
        "activations as they are",
        'activations="linear-cross-entropy"',
        'activations="exact"',
        'activations=["exact", "linear-cross-entropy"]',
        'activations=["exact", "linear-cross-entropy", "int8"]',
        'activations=["exact", "linear-cross-entropy", "int4"]',
    ]
    lossless = table("lossless", has_wide_head=True)[ActivationCompression]
    assert [option.loss_class for option in lossless] == ["exact"] * 4
    assert not any("linear" in option.text for option in table("balanced")[ActivationCompression])


def test_codecs_of_the_users_own_stay_beside_it():
    own = ActivationCompression(codecs=("int4", "offload"), max_gradient_noise=0.1)
    options = table("lossless", has_wide_head=True, own=own, noise_bounds=(0.1,))[ActivationCompression]
    assert [option.config.codecs for option in options[1:]] == [
        ("offload", "linear-cross-entropy"),
        ("exact", "offload"),
        ("exact", "offload", "linear-cross-entropy"),
        ("offload", "linear-cross-entropy", "int4"),
    ]
    head = ActivationCompression(codecs=("linear-cross-entropy", "int4"), max_gradient_noise=0.1)
    options = table("lossless", has_wide_head=True, own=head, noise_bounds=(0.1,))[ActivationCompression]
    assert [option.config.codecs for option in options[1:]] == [("exact", "linear-cross-entropy"), head.codecs]


def test_regions_for_another_budget_change_no_other_setting():
    options = [options[-1] for options in table("extreme").values()]
    changed = with_regions_for(options, 777)
    for before, after in zip(options, changed, strict=True):
        if isinstance(before.config, Checkpointing):
            assert after.config == Checkpointing(budget=777)
            assert after.time_factor == before.time_factor
        else:
            assert after is before
    assert time_factor(changed) == time_factor(options) == math.prod(option.time_factor for option in options)
