"""Layers that get other parameters, and reasons why others stay as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_memsave.torch_internals.layer_selection import Wanted, is_conv1d_of_transformers, select_layers

WANTED = Wanted("slot", "changed", (nn.Linear, nn.Embedding), "Linear or Embedding")


class Settings(SimpleNamespace):
    modules = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.tied = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.tied.weight = self.embed.weight
        self.plain, self.frozen, self.other = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 1)
        self.frozen.weight.requires_grad_(False)
        self.computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.lazy, self.gpt, self.edits = nn.LazyLinear(4), Conv1D(4, 4), nn.Embedding(5, 4, max_norm=1.0)


def select(settings=None, why_dense=lambda module, weight: None):
    return select_layers(Model(), settings or Settings(), WANTED, why_dense)


def test_what_is_chosen_and_why_the_rest_stays():
    chosen, left = select()
    assert list(chosen) == ["plain", "gpt"]
    assert left == {
        "embed": "tied weights",
        "tied": "tied weights",
        "frozen": "frozen",
        "computed": "its weight is computed",
        "lazy": "its weight is computed",
        "edits": "an embedding with `max_norm`",
    }
    chosen, left = select(why_dense=lambda module, weight: "a Linear" if isinstance(module, nn.Linear) else None)
    assert list(chosen) == ["gpt"]
    assert left["plain"] == "a Linear"
    assert left["frozen"] == "frozen", "which is found out first"


@pytest.mark.parametrize(("name", "text"), [("tied", "tied weights, got 'embed"), ("edits", "max_norm`, got 'edits")])
def test_what_is_asked_for_by_name_and_cannot_be_is_refused_with_the_way_out(name, text):
    with pytest.raises(ValueError, match=rf"`slot` cannot take .*{text}.*Settings\(modules=.*!= '{name}'"):
        select(Settings(modules=name))


def test_nothing_that_matches_is_an_error_that_says_what_did():
    with pytest.raises(ValueError, match=r"`Settings.modules` must match .* changed, got 'frozen'.*frozen \(frozen\)"):
        select(Settings(modules="frozen"))
    with pytest.raises(ValueError, match=r"`slot` must match .*Matching, but dense: no Linear or Embedding"):
        select_layers(nn.ReLU(), Settings(), WANTED, lambda module, weight: None)


def test_conv1d_is_that_of_transformers_alone():
    assert is_conv1d_of_transformers(Conv1D(2, 2))
    assert not is_conv1d_of_transformers(nn.Conv1d(2, 2, 1))
    assert not is_conv1d_of_transformers(type("Conv1D", (nn.Linear,), {})(2, 2))
