"""The table of techniques: each is found by its settings, and its slot takes what it says."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from lightning_memsave import MemSave
from lightning_memsave.techniques.registry import TECHNIQUES, technique_of

EXAMPLES = {
    "sparsity": (0.5, "2:4"),
    "low_rank": (8, 0.2),
    "sparse_update": ("256KiB", 0.2),
    "low_precision": ("bf16-sr", True),
    "microbatching": (4, "auto"),
    "activation_compression": ("exact", "int4"),
    "tiling": ("samples", "*MLP"),
    "checkpointing": ("blocks", True),
    "optimizer_state": ("8bit", "lean"),
}
BY_STEM = {technique.stem: technique for technique in TECHNIQUES}


def test_every_shorthand_has_an_example():
    assert set(EXAMPLES) == {technique.stem for technique in TECHNIQUES if technique.shorthand is not None}


@pytest.mark.parametrize(("stem", "value"), [(stem, value) for stem, values in EXAMPLES.items() for value in values])
def test_a_shorthand_makes_settings_of_its_technique(stem, value):
    config = BY_STEM[stem].shorthand(value)
    assert type(config) is BY_STEM[stem].config
    assert technique_of(config) is BY_STEM[stem]


@pytest.mark.parametrize("stem", EXAMPLES)
def test_a_shorthand_that_means_nothing_is_refused(stem):
    with pytest.raises(ValueError, match="got 'no such thing'"):
        BY_STEM[stem].shorthand("no such thing")


def test_slots_are_arguments_of_memsave_and_no_two_are_the_same():
    slots = [technique.slot for technique in TECHNIQUES if technique.slot is not None]
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(inspect.signature(MemSave).parameters)


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.stem)
def test_settings_are_frozen_and_taken_by_name_alone(technique):
    config = technique.config() if technique.stem != "microbatching" else technique.config(size=1)
    for each in fields(config):
        assert each.kw_only, each.name
        with pytest.raises(FrozenInstanceError):
            setattr(config, each.name, None)
    with pytest.raises(TypeError):
        technique.config("positional")
