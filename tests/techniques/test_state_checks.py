"""Damaged optimizer states: what loads is right, everything else is a `ValueError` that names the entry."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    decoded_state_dict,
)
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME

from .optimizer_state_subjects import run_steps, through_disk

NUM_MUTANTS = 500
FORMATS = ("4bit", "8bit", "fp8", "factored", "4bit-factored", "5bit-factored", "offload", "lowrank", "apollo")
SETTINGS = {
    **{name: dict(BY_NAME[name]) for name in FORMATS},
    **{f"{name}, compact": {**BY_NAME[name], "checkpoint": "compact"} for name in FORMATS[:6]},
    "bitsandbytes": {"first_moment": "8bit", "backend": "bitsandbytes"},
    "bitsandbytes, compact": {"first_moment": "8bit", "backend": "bitsandbytes", "checkpoint": "compact"},
    "into-state": {"first_moment": "8bit", "gradients": "into-state"},
    "into-state, 32bit": {"first_moment": "32bit", "gradients": "into-state"},
}


def trained(settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 7))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rank = {"rank": 4} if "projection" in settings else {}
    apply_optimizer_state(optimizer, OptimizerState(min_size=200, **settings, **rank), model)
    run_steps(model, optimizer, range(3))
    return model, optimizer


# ---------------------------------------------------------------------- damage
def places(value, path=()):
    """Every container and leaf of a state dict, by its path."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, each in items:
        if key != "param_groups" or path:
            yield from places(each, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def replaced(value, path, new):
    """A copy with something else at a path; `...`: with nothing there."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, tuple):
        items = list(value)
        items[key] = replaced(items[key], rest, new)
        return tuple(each for each in items if each is not ...)
    copied = copy.copy(value)
    copied[key] = replaced(copied[key], rest, new)
    if copied[key] is ...:
        del copied[key]
    return copied


def damaged_tensor(value: Tensor, choose: random.Random) -> Tensor:
    flat = value.reshape(-1)
    return choose.choice(
        [
            lambda: flat[:-1],
            lambda: flat[: len(flat) // 2],
            lambda: torch.cat([flat, flat[:1]]),
            lambda: value[None],
            lambda: value.new_empty(0),
            lambda: value.T if value.dim() == 2 else value.view(-1, 1),
            lambda: value.double(),
            lambda: value.long(),
            lambda: value > 0,
            lambda: value.half(),
            lambda: torch.full_like(value, 255 if value.dtype == torch.uint8 else math.nan),
            lambda: value.flip(0) if value.dim() else value + 1,
            lambda: value.expand(3, *value.shape),
            lambda: value.to_sparse() if value.is_floating_point() and value.dim() else value,
        ]
    )()


def changed(saved, path, choose: random.Random):
    """Something else than what is at a path; `...`: nothing."""
    value = at(saved, path)
    others = [
        ...,
        None,
        "nonsense",
        -1,
        0,
        1,
        2,
        3,
        2**40,
        2**70,
        math.nan,
        math.inf,
        True,
        [],
        {},
        (1,),
        {"layout": 1},
    ]
    if isinstance(value, Tensor) and choose.random() < 0.8:
        return damaged_tensor(value, choose)
    if choose.random() < 0.2:
        others = [at(saved, other) for other in places(saved)]
    return choose.choice(others)


def mutant(saved, choose: random.Random):
    """Where it was changed, and the state dict."""
    path = choose.choice(list(places(saved)))
    return path, replaced(saved, path, changed(saved, path, choose))


# ---------------------------------------------------------------------- what is right
def plain(entry):
    """The moment that an entry stands for, by plain numpy."""
    if not isinstance(entry, dict):
        return torch.as_tensor(entry, dtype=torch.float64)
    if entry["layout"] == "memsave-means":
        rows, columns = entry["rows"].double(), entry["columns"].double()
        return (torch.outer(rows, columns) / rows.mean().clamp_min(1e-38)).view(entry["shape"])
    size, width = math.prod(entry["shape"]), entry["bits"]
    bits = np.unpackbits(entry["codes"].numpy().ravel(), bitorder="little")[: size * width].reshape(size, width)
    codes = torch.from_numpy((bits * 2 ** np.arange(width)).sum(1))
    scales = entry["absmax"].double().repeat_interleave(256)[:size]
    return (entry["map"].double()[codes] * scales).view(entry["shape"])


def assert_loaded(found, given, state_format):
    for number in given["state"].keys() & found["state"].keys():  # others are of no parameter
        state = given["state"][number]
        for name in state.keys() & {"exp_avg", "exp_avg_sq", "step"}:
            expected, actual = plain(state[name]), plain(found["state"][number][name])
            assert name == "step" or actual.shape == expected.shape
            if name == "exp_avg_sq" and "factored" in state_format:  # another matrix than one of means is rounded far
                continue
            scale = expected.abs().amax() if expected.isfinite().all() else math.nan
            if not math.isnan(scale):
                assert (actual - expected).abs().max() <= 0.2 * scale, name


def check_mutants(name, numbers):
    settings = SETTINGS[name]
    model, optimizer = trained(settings)
    saved = through_disk(optimizer.state_dict())
    num_refused = 0
    for number in numbers:
        path, damaged = mutant(saved, random.Random(number))
        resumed = copy.deepcopy(optimizer)
        try:
            try:
                resumed.load_state_dict(damaged)
            except ValueError as error:
                assert "optimizer_state" in str(error) or "rank" in str(error), error  # noqa: PT017
                num_refused += 1
                continue
            assert_loaded(resumed.state_dict(), damaged, OptimizerState(**settings).format)
            run_steps(model, resumed, [3])
        except Exception as error:
            pytest.fail(f"mutant {number} of {name}, at {path}: {type(error).__name__}: {error}")
    assert num_refused > len(numbers) / 4


@pytest.mark.filterwarnings("ignore")  # torch's, of numbers that are not finite
@pytest.mark.parametrize("name", SETTINGS)
def test_damaged_states_load_rightly_or_are_refused_by_name(name):
    check_mutants(name, range(NUM_MUTANTS))


@pytest.mark.parametrize("name", [name for name in SETTINGS if "compact" in name])
def test_damaged_codes_are_decoded_rightly_or_refused_by_name(name):
    saved = through_disk(trained(SETTINGS[name])[1].state_dict())
    entries = [path for path in places(saved) if path[2:3] in (("exp_avg",), ("exp_avg_sq",)) and len(path) > 3]
    num_refused = 0
    for number in range(NUM_MUTANTS):
        choose = random.Random(number)
        path = choose.choice(entries)
        damaged = replaced(saved, path, changed(saved, path, choose))
        try:
            found = decoded_state_dict(damaged)
        except ValueError as error:
            assert f"optimizer_states[{path[1]}].{path[2]}" in str(error)  # noqa: PT017
            num_refused += 1
            continue
        is_ours = isinstance(at(damaged, path[:3]), dict) and "layout" in at(damaged, path[:3])
        if is_ours and at(damaged, path[:3])["layout"] in ("memsave-codes", "memsave-means"):  # others' is theirs
            assert_loaded(found, damaged, "")
    assert num_refused > NUM_MUTANTS / 3
