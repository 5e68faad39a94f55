from __future__ import annotations

import json

import pytest
from torch import nn

from lightning_memsave import Checkpointing, EarlyZeroGrad, Microbatching, OptimizerState, Recipe
from lightning_memsave.planner.recipes import RECIPES, resolve
from lightning_memsave.techniques.registry import TECHNIQUES, technique_of


@pytest.mark.parametrize("one", ["sparsity", "low_rank", "sparse_update"])
def test_the_order_is_the_registrys_whatever_the_order_of_the_arguments(one):
    slots = {"optimizer_state": "8bit", "microbatch": 2, "checkpointing": "blocks", "activations": "int4"}
    slots |= {"precision": "bf16-sr", one: 0.9, "tiling": "samples"}
    recipe = resolve("lossless", slots)
    others = {"sparsity", "low_rank", "sparse_update"} - {one}
    assert recipe.stems() == tuple(technique.stem for technique in TECHNIQUES if technique.stem not in others)


def test_slots_do_not_change_the_recipe_they_start_from():
    mine = Recipe("mine", (Microbatching(size=2),))
    assert resolve(mine, {"microbatch": 5}).get(Microbatching).size == 5
    assert resolve(mine, {"microbatch": False}).techniques == ()
    assert mine.get(Microbatching).size == 2
    assert resolve("measure", {}) == RECIPES["measure"]


def test_as_dict_is_plain_and_names_functions_and_classes():
    def tokens(batch):
        return 1

    recipe = Recipe(
        "mine",
        (
            EarlyZeroGrad(),
            Microbatching(size=2, weight_fn=tokens),
            Checkpointing(modules=nn.Linear),
            OptimizerState(),
        ),
    )
    plain = json.loads(json.dumps(recipe.as_dict()))
    assert plain["microbatching"]["size"] == 2
    assert plain["microbatching"]["weight_fn"].endswith("tokens")
    assert plain["checkpointing"]["modules"] == "Linear"
    assert plain["recipe"].startswith("mine, microbatch=Microbatching(size=2, weight_fn=")
    assert plain["recipe"].endswith(", checkpointing=Checkpointing(modules=Linear), optimizer_state=8bit")


def test_unknown_recipes_list_what_there_is():
    with pytest.raises(
        ValueError, match=r"'measure', 'lossless', 'exact', 'balanced', 'extreme' or a `Recipe`, got 'fast'"
    ):
        resolve("fast", {})


def test_every_config_belongs_to_one_row():
    for technique in TECHNIQUES:
        config = technique.config(size=1) if technique.config is Microbatching else technique.config()
        assert technique_of(config) is technique


WAYS = {
    "DeepSpeed": "its engine counts backward passes",
    "DDP": "stays off with DDP unless it is asked for",
    "tensor parallelism": "cannot be caught up with",
    "dataloader_iter": "draws its batches itself",
    "DDP with static_graph": "one backward per step",
}


@pytest.mark.parametrize("way", WAYS)
def test_defaults_step_aside_and_what_was_asked_for_does_not(way):
    lossless = RECIPES["lossless"]
    left, (reason,) = lossless.stepping_aside([way])
    assert left.stems() == ("early_zero_grad",)
    assert WAYS[way] in reason
    assert lossless.stepping_aside([]) == (lossless, [])
    asked = resolve("lossless", {"microbatch": "auto"})
    assert asked.stepping_aside([way]) == (asked, [])
    assert asked.rows() == ("early_zero_grad", "microbatching", "out-of-memory recovery")
    assert resolve("lossless", {"microbatch": 4}).rows() == ("early_zero_grad", "microbatching")
