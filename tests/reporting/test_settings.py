"""Settings of runs: what is told of them is what somebody has set."""

from __future__ import annotations

import json

import pytest

from lightning_memsave import ActivationCompression, Checkpointing, Microbatching, Recipe, wandb_logger
from lightning_memsave.planner.recipes import resolve
from lightning_memsave.reporting.settings import differences
from lightning_memsave.reporting.wandb_run import record_config
from lightning_memsave.techniques.registry import TECHNIQUES
from tests.reporting.test_wandb_run import only_file, wandb_session


def of(recipe, slots=None, **others):
    return {"memsave": {**resolve(recipe, slots or {}).as_dict(), "every": 200}, **others}


def test_only_what_was_set_is_told():
    found = differences(
        [of("measure"), of("lossless", {"microbatch": 10}), of("lossless", {"optimizer_state": "4bit"})]
    )
    assert found == {
        "memsave.recipe": ("measure", "lossless, microbatch=10", "lossless, optimizer_state=4bit"),
        "memsave.microbatching.size": ("", "10", "auto"),
        "memsave.optimizer_state.first_moment": ("", "", "4bit"),
    }


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.stem)
def test_a_technique_with_its_defaults_is_told_by_the_recipe_alone(technique):
    on = {"memsave": Recipe("mine", (technique.config(),)).as_dict()}
    assert set(differences([{"memsave": {"recipe": "other"}}, on])) == {"memsave.recipe"}


def test_what_all_runs_have_set_is_not_told_and_what_one_has_is():
    strict = {"microbatch": Microbatching(size=4, strict=True)}
    assert differences([of("lossless", strict), of("lossless", strict)]) == {}
    found = differences([of("lossless", strict), of("lossless", {"microbatch": 4})])
    assert found["memsave.microbatching.strict"] == ("true", "false")
    assert "memsave.microbatching.size" not in found


def test_settings_of_others_have_no_defaults():
    assert differences([of("lossless", lr=0.1), of("lossless")]) == {"lr": ("0.1", "")}
    assert set(differences([{"every": 200}, {"every": 100}])) == {"every"}


def test_a_plan_is_told_by_its_settings_not_by_its_text():
    plan = of("lossless", {"microbatch": 4})
    plan["memsave"]["plan"] = "{...}"
    assert set(differences([plan, of("measure")])) == {"memsave.recipe", "memsave.microbatching.size"}


@pytest.mark.parametrize(
    ("recipe", "slots", "text"),
    [
        ("lossless", {}, "lossless"),
        ("extreme", {}, "extreme"),
        ("measure", {"microbatch": 10}, "measure, microbatch=10"),
        ("lossless", {"microbatch": False}, "lossless, microbatch=False"),
        ("lossless", {"microbatch": True}, "lossless, microbatch=auto"),
        ("lossless", {"activations": "int4"}, "lossless, activations=int4"),
        ("lossless", {"activations": ["exact", "int4"]}, "lossless, activations=[exact, int4]"),
        ("lossless", {"optimizer_state": "lean"}, "lossless, optimizer_state=lean"),
        ("lossless", {"precision": "bf16+8", "sparsity": 0.9}, "lossless, sparsity=0.9, precision=bf16+8"),
        (
            "lossless",
            {"checkpointing": Checkpointing(budget="1GiB")},
            "lossless, checkpointing=Checkpointing(budget=1GiB)",
        ),
    ],
)
def test_the_recipe_names_what_was_set(recipe, slots, text):
    assert resolve(recipe, slots).as_dict()["recipe"] == text


def test_wandb_gets_values_and_not_their_text(tmp_path):
    activations = ActivationCompression(codecs=("exact", "int4"), modules={"net.*": "int8"})
    settings = resolve("lossless", {"activations": activations, "sparsity": 0.9}).as_dict()
    with wandb_session():
        record_config(wandb_logger("p", save_dir=str(tmp_path), offline=True, quiet=True).experiment, settings)
    written = only_file(tmp_path).config["memsave"]
    assert written == json.loads(json.dumps(settings))
    assert written["activation_compression"]["codecs"] == ["exact", "int4"]
    assert written["activation_compression"]["modules"] == {"net.*": "int8"}
    assert written["sparsity"]["schedule"]["every"] == 100
