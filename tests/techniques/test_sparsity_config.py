"""Settings of sparse training, and the numbers that follow from them."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_memsave import Sparsity, apply_sparsity
from lightning_memsave.techniques.sparsity.sparsity_config import UpdateSchedule


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sparsity": 1.0}, "fraction from 0 to below 1"),
        ({"sparsity": -0.1}, "fraction from 0 to below 1"),
        ({"sparsity": True}, "fraction from 0 to below 1"),
        ({"sparsity": "4:2"}, "fraction from 0 to below 1"),
        ({"sparsity": "many"}, "fraction from 0 to below 1"),
        ({"method": "lottery"}, "must be one of 'static'"),
        ({"initial": "zeros"}, "must be one of 'random'"),
        ({"distribution": "even"}, "must be one of 'uniform'"),
        ({"sparsity": "2:4", "method": "set"}, "in groups"),
        ({"sparsity": "2:4", "distribution": "erk"}, "in groups"),
        ({"initial": "snip", "method": "rigl"}, '"snip" with method="static"'),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        Sparsity(**settings)


def test_a_pattern_that_stays_has_no_schedule():
    with pytest.raises(ValueError, match=r"Sparsity.schedule` is used with a method by which weights move only"):
        Sparsity(schedule=UpdateSchedule(every=50))
    assert Sparsity(schedule=UpdateSchedule()) == Sparsity()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every": 0}, "UpdateSchedule.every` must be a positive integer"),
        ({"fraction": 0.0}, "UpdateSchedule.fraction` must be between 0 and 1"),
        ({"fraction": 1.0}, "UpdateSchedule.fraction` must be between 0 and 1"),
        ({"fraction": float("nan")}, "UpdateSchedule.fraction` must be between 0 and 1"),
        ({"until": 0}, "UpdateSchedule.until` must be a positive number of steps, or a fraction"),
        ({"until": -1}, "UpdateSchedule.until` must be a positive number of steps, or a fraction"),
        ({"until": 1.5}, "UpdateSchedule.until` must be a positive number of steps, or a fraction"),
    ],
)
def test_wrong_schedules(settings, text):
    with pytest.raises(ValueError, match=text):
        UpdateSchedule(**settings)


def test_an_integer_counts_steps_and_a_float_is_a_fraction():
    assert UpdateSchedule(until=500).until == 500
    assert UpdateSchedule(until=1.0).until == 1.0


@pytest.mark.parametrize(
    ("sparsity", "density", "group"),
    [(0.0, 1.0, None), (0.9, 0.1, None), (0, 1.0, None), ("2:4", 0.5, (2, 4)), ("1:8", 0.125, (1, 8))],
)
def test_the_fraction_that_lives(sparsity, density, group):
    config = Sparsity.from_shorthand(sparsity)
    assert config.density == pytest.approx(density)
    assert config.group == group


PATTERNS = {
    "stays": {},
    "stays, in groups": {"sparsity": "2:4"},
    "found in the first step": {"initial": "snip"},
    "moves": {"method": "set"},
    "moves by gradients": {"method": "rigl"},
    "moves between layers": {"method": "dsr"},
    "grows": {"method": "gradual"},
}


@pytest.mark.parametrize(
    ("name", "starts_dense", "is_updated", "resizes"),
    [
        ("stays", False, False, False),
        ("stays, in groups", False, False, False),
        ("found in the first step", True, True, True),
        ("moves", False, True, False),
        ("moves by gradients", False, True, False),
        ("moves between layers", False, True, True),
        ("grows", True, True, True),
    ],
)
def test_what_follows_from_the_settings(name, starts_dense, is_updated, resizes):
    config = Sparsity(**PATTERNS[name])
    assert (config.starts_dense, config.is_updated, config.resizes) == (starts_dense, is_updated, resizes)
    assert bool(config.rows) == is_updated


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_are_as_the_settings_say(name):
    """The same, seen on a layer."""
    config, model = Sparsity(**{"sparsity": 0.5, **PATTERNS[name]}, min_size=1), nn.Sequential(nn.Linear(16, 8))
    apply_sparsity(model, config)
    assert model[0].values.numel() == (128 if config.starts_dense else 64)
