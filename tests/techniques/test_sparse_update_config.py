"""Settings of a sparse update that mean nothing are refused with the way out."""

from __future__ import annotations

import pytest

from lightning_memsave import SparseUpdate


def test_shorthands_are_budgets():
    assert SparseUpdate.from_shorthand("256KiB") == SparseUpdate(budget="256KiB")
    assert SparseUpdate.from_shorthand(0.2) == SparseUpdate()
    assert SparseUpdate(budget=1000).budget_bytes(10) == 1000
    assert SparseUpdate(budget="1kB").budget_bytes(10) == 1000
    assert SparseUpdate(budget=0.5).budget_bytes(10) == 5


def test_layers_are_kept_as_fractions_and_channels():
    config = SparseUpdate(layers={"a": 1, "b": [3, 1, 3]}, biases=["a"])
    assert config.layers == {"a": 1.0, "b": (1, 3)}
    assert config.biases == ("a",)
    assert not config.needs_a_plan
    assert SparseUpdate().needs_a_plan


@pytest.mark.parametrize("budget", [0, -1, 0.0, 1.0, 1.5, "much", True, None])
def test_budgets_that_are_none_are_refused(budget):
    with pytest.raises(ValueError, match=r"`sparse_update` must be a (positive size|fraction between 0 and 1)"):
        SparseUpdate(budget=budget)


@pytest.mark.parametrize("share", [0, 0.0, 1.5, True, (), (-1,), (0.5,), "half", None])
def test_shares_that_are_none_are_refused(share):
    with pytest.raises(ValueError, match=r"`SparseUpdate.layers\['a'\]` must be a fraction up to 1.0, or integers"):
        SparseUpdate(layers={"a": share})


def test_other_settings_that_are_wrong_are_refused():
    for layers in ({}, ["a"], "a"):
        with pytest.raises(ValueError, match=r"`SparseUpdate.layers` must map patterns to fractions"):
            SparseUpdate(layers=layers)
    with pytest.raises(ValueError, match=r"`SparseUpdate.budget` is used with `layers=None` only"):
        SparseUpdate(layers={"a": 0.5}, budget="1MiB")
    for biases in ("a", 1, [1]):
        with pytest.raises(ValueError, match=r"`SparseUpdate.biases` must be `True`, `False` or patterns"):
            SparseUpdate(biases=biases)
