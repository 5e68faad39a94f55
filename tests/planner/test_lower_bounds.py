"""Bounds of what settings need: never above what modelled steps take, and as high as arithmetic says."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memsave import Checkpointing, EarlyZeroGrad
from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.planner.lower_bounds import LowerBounds
from lightning_memsave.planner.search import in_order
from lightning_memsave.planner.search_space import regions_for
from lightning_memsave.simulation.predicted_step import CudaBytes, Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState
from tests.planner.test_search import Model
from tests.planner.test_search_space import table

TABLE = table("extreme")
KINDS, CHOICES = tuple(TABLE), list(itertools.product(*TABLE.values()))
NOTHING = tuple(dimension[0] for dimension in TABLE.values())


def choice(**texts):
    """All off but what is named: the kind of a dimension and the start of a text."""
    options = {kind.__name__: dimension for kind, dimension in TABLE.items()}
    found = {
        name: min((o for o in options[name] if o.text.startswith(text)), key=lambda o: len(o.text))
        for name, text in texts.items()
    }
    return tuple(found.get(kind.__name__, dimension[0]) for kind, dimension in TABLE.items())


def predicted(moments):
    """A step with these bytes by category at its moments."""
    columns = {name: tuple(moment.get(name, 0) for moment in moments) for name in CATEGORIES}
    line = Timeline(events=tuple(range(len(moments))), by_category=columns)
    highest = max(range(len(moments)), key=line.total_bytes.__getitem__)
    split = {name: sizes[highest] for name, sizes in columns.items()}
    return Prediction(peak_bytes=sum(split.values()), by_category=split, timeline=line)


STEP = predicted(
    [
        {"weights": 100, "optimizer_state": 200, "data": 10},
        {"weights": 100, "optimizer_state": 200, "data": 10, "activations": 800, "temporary": 80},
        {"weights": 100, "optimizer_state": 200, "data": 10, "activations": 400, "gradients": 60},
        {"weights": 100, "optimizer_state": 200, "data": 10, "gradients": 100, "temporary": 70},
    ]
)


@pytest.fixture
def bounds():
    found = LowerBounds(KINDS, CHOICES)
    found.learn(NOTHING, STEP)
    return found


def test_microbatches_hold_all_gradients_and_a_part_of_what_samples_take(bounds):
    assert bounds.of(NOTHING) == STEP.peak_bytes == 1190
    assert bounds.of(choice(Microbatching="microbatch=32")) == 100 + 200 + 10 + 100 + (800 + 80) / 2
    assert bounds.of(choice(Microbatching="microbatch=1")) == 100 + 200 + 10 + 100 + 70, "the update stays as it is"


def test_what_asking_takes_is_there_beside_what_stays():
    """How the loss depends on the batch is found out by some steps of runs that cut their batches."""
    asking = lambda chosen: 900 if any(isinstance(option.config, Microbatching) for option in chosen) else 0  # noqa: E731
    bounds = LowerBounds(KINDS, CHOICES, asking)
    bounds.learn(NOTHING, STEP)
    assert bounds.of(choice(OptimizerState='optimizer_state="8bit"')) == 100 + 200 / 4 + 10 + 880, "it does not ask"
    assert bounds.of(choice(Microbatching="microbatch=1")) == 900 + 100 + 200 + 10
    few = choice(Microbatching="microbatch=1", OptimizerState='optimizer_state="8bit"')
    assert bounds.of(few) == 900 + 100 + 200 / 4 + 10


def test_gradients_that_are_released_and_state_of_few_bits(bounds):
    assert bounds.of(choice(OptimizerState='optimizer_state="8bit"')) == 100 + 200 / 4 + 10 + 880
    released = choice(OptimizerState='optimizer_state=OptimizerState(first_moment="32bit"')
    assert bounds.of(released) == STEP.peak_bytes, "the peak has no gradients"
    small = LowerBounds(KINDS, CHOICES)
    small.learn(NOTHING, predicted([{"weights": 10, "activations": 20}, {"weights": 10, "gradients": 30}]))
    assert small.of(released) == 10 + 20


def test_a_weaker_setting_needs_no_less(bounds):
    coded = choice(ActivationCompression='activations=["exact", "int4"]')
    bounds.learn(coded, predicted([{"weights": 100, "activations": 500}]))
    assert bounds.of(choice(ActivationCompression='activations=["exact", "int8"]')) == 600
    assert bounds.of(choice(ActivationCompression='activations="exact"')) == 600


def test_what_a_codec_left_alone_it_leaves_at_least_four_fifths_of_beside_regions():
    coded, regions = {"ActivationCompression": 'activations="exact"'}, {"Checkpointing": 'checkpointing="blocks"'}
    bounds = LowerBounds(KINDS, CHOICES)
    for settings, num_bytes in (({}, 800), (regions, 600)):
        bounds.learn(choice(**settings), predicted([{"weights": 100, "activations": num_bytes}]))
    assert bounds.of(choice(**coded, **regions)) == 100 + 0.2 * 600
    bounds.learn(choice(**coded), predicted([{"weights": 100, "activations": 400}]))
    assert bounds.of(choice(**coded, **regions)) == pytest.approx(100 + 0.5 * 0.8 * 600)


def test_what_has_no_effect_alone_has_none_beside_others(bounds):
    bounds.learn(choice(Checkpointing='checkpointing="sqrt"'), STEP)
    bounds.learn(choice(ActivationCompression='activations="exact"'), predicted([{"activations": 500}]))
    both = choice(ActivationCompression='activations="exact"', Checkpointing='checkpointing="sqrt"')
    assert bounds.of(both) >= 500


def test_regions_that_met_their_budget_say_nothing_of_others(bounds):
    """They use their budget up, whatever else is on."""
    fits = choice(Checkpointing="checkpointing=Checkpointing(budget=")
    bounds.learn(fits, predicted([{"weights": 100, "activations": 890}]))
    coded = choice(ActivationCompression='activations="exact"')
    bounds.learn(coded, predicted([{"weights": 100, "activations": 900}]))
    both = choice(ActivationCompression='activations="exact"', Checkpointing='checkpointing="sqrt"')
    assert bounds.of(both) < 500


def test_regions_that_could_not_meet_their_budget_bound_what_is_weaker(bounds):
    refused = choice(ActivationCompression='activations="exact"', Checkpointing="checkpointing=Checkpointing(budget=")
    bounds.learn_refusal(refused, 700)
    assert bounds.of(refused) == math.inf
    assert bounds.of(choice(Checkpointing="checkpointing=Checkpointing(budget=")) >= 700


def test_gradients_that_microbatches_hold_are_not_taken_for_activations(bounds):
    regions = {"Checkpointing": "checkpointing=Checkpointing(budget="}
    bounds.learn_refusal(choice(Microbatching="microbatch=32", **regions), 700)
    assert bounds.of(choice(**regions)) <= 700 - 100


def test_what_is_refused_alone_is_ruled_out_and_what_is_known_stays(bounds):
    regions = choice(Checkpointing='checkpointing="blocks"')
    both = choice(ActivationCompression='activations="exact"', Checkpointing='checkpointing="blocks"')
    bounds.learn_refusal(both)
    assert bounds.of(regions) < math.inf
    bounds.learn_refusal(regions)
    has_it = [c for c in CHOICES if any(o.text == 'checkpointing="blocks"' for o in c)]
    assert {bounds.of(c) for c in has_it} == {math.inf}
    assert bounds.of(NOTHING) == STEP.peak_bytes


def test_other_settings_and_what_a_plan_adds(bounds):
    assert bounds.of((*NOTHING[:-2], regions_for(7, 1.0), NOTHING[-1])) == 0, "not among the choices"
    more = LowerBounds(KINDS, CHOICES)
    more.learn(NOTHING, STEP.with_bytes("data", 1000))
    assert more.of(choice(Microbatching="microbatch=32")) == bounds.of(choice(Microbatching="microbatch=32")) + 1000


def test_on_cuda_half_of_what_lies_between_tensors_may_go():
    found = LowerBounds(KINDS, CHOICES)
    cuda = CudaBytes(allocated_bytes=1190, reserved_bytes=1290)
    found.learn(NOTHING, dataclasses.replace(STEP, cuda=cuda))
    assert found.of(NOTHING) == 1290
    assert found.of(choice(OptimizerState='optimizer_state="8bit"')) == 100 + 200 / 4 + 10 + 880 + 50


def taken(model, settings):
    on = [o.config for o in settings if o.config is not None]
    return model(in_order([EarlyZeroGrad(), *on]))


@given(st.integers(0, 10**6), st.lists(st.sampled_from(CHOICES), min_size=1, max_size=12), st.sampled_from(CHOICES))
def test_no_bound_lies_above_what_a_modelled_step_needs(seed, asked, other):
    _check_bounds(Model(seed), CHOICES, [NOTHING, *asked], other)


WITH_HEAD = list(itertools.product(*table("balanced", has_wide_head=True).values()))


@given(st.integers(0, 10**6), st.lists(st.sampled_from(WITH_HEAD), min_size=1, max_size=12), st.sampled_from(WITH_HEAD))
def test_no_bound_lies_above_it_where_logits_hide_what_settings_leave(seed, asked, other):
    _check_bounds(Model(seed, has_logits=True), WITH_HEAD, [WITH_HEAD[0], *asked], other)


def _check_bounds(model, choices, asked, other):
    found = LowerBounds(KINDS, choices)
    for each in asked:
        try:
            found.learn(each, taken(model, each))
        except ValueError:
            found.learn_refusal(each)
    try:
        assert found.of(other) <= taken(model, other).peak_bytes + 5  # each category is rounded down
    except ValueError:  # the model refuses it
        return


def test_the_kinds_of_the_table_are_those_that_are_bounded():
    assert set(KINDS) >= {ActivationCompression, Checkpointing, Microbatching, OptimizerState}
