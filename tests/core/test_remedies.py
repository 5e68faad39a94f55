"""Advice for each category: only what is not on yet, and what nobody would refuse."""

from __future__ import annotations

import re

import pytest

from lightning_memsave import MemSave
from lightning_memsave.core.compatibility import COMPATIBILITY, SETTINGS, WAYS_OF_TRAINING
from lightning_memsave.core.remedies import REMEDIES, remedies_for
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.techniques.registry import TECHNIQUES

KNOWN = {*(technique.stem for technique in TECHNIQUES), *SETTINGS, *WAYS_OF_TRAINING}
ROWS = [(category, names, text) for category in CATEGORIES for names, text in REMEDIES[category]]


def refused(first, second):
    return any({row.first, row.second} == {first, second} and row.refused_because for row in COMPATIBILITY)


def test_every_category_has_a_remedy_and_every_name_is_in_the_table():
    assert list(REMEDIES.keys() - set(CATEGORIES)) == []
    for category in CATEGORIES:
        assert len(remedies_for(category, applied=())) == len(REMEDIES[category]) > 0
    assert {name for _, names, _ in ROWS for name in names} <= KNOWN


@pytest.mark.parametrize(("category", "names", "text"), ROWS)
def test_what_is_on_is_not_advised_again(category, names, text):
    for name in names:
        assert text not in remedies_for(category, applied=[name])
        assert text not in remedies_for(category, applied=(), fixed=[name])
    others = {name for _, others, _ in ROWS for name in others} - set(names)
    assert text in remedies_for(category, applied=others)


@pytest.mark.parametrize("way", WAYS_OF_TRAINING)
def test_a_way_of_training_leaves_what_it_does_not_refuse(way):
    for category in CATEGORIES:
        expected = [
            text
            for names, text in REMEDIES[category]
            if way not in names and not any(refused(name, way) for name in names)
        ]
        assert remedies_for(category, applied=(), fixed=[way]) == expected


def test_something_is_refused_somewhere():
    """Else the test above would compare what is always all."""
    assert any(refused(name, way) for _, names, _ in ROWS for name in names for way in WAYS_OF_TRAINING)


SLOTS = (
    *("microbatch", "tiling", "checkpointing", "activations", "optimizer_state", "precision", "sparsity", "low_rank"),
    "sparse_update",
)
ARGUMENTS = {
    text
    for _, _, remedy in ROWS
    for text in re.findall(r"`([^`]+)`", remedy)
    if text.partition("=")[0] in SLOTS and "=" in text
}


@pytest.mark.parametrize("argument", sorted(ARGUMENTS))
def test_an_advised_argument_is_one_that_memsave_takes(argument):
    assert eval(f"MemSave({argument})", {"MemSave": MemSave}).recipe.techniques


def test_an_unknown_category_has_none():
    assert remedies_for("other", applied=()) == []
