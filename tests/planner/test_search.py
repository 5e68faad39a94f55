"""The search against all combinations, on modelled steps whose peaks are a formula."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from lightning_memsave import Checkpointing, EarlyZeroGrad, Microbatching, OptimizerState
from lightning_memsave.core.errors import BudgetTooSmallError
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.planner.search import Search, SearchWatch, in_order
from lightning_memsave.planner.search_space import TIERS, describe, regions_for, time_factor
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.sparsity import Sparsity
from tests.planner.test_search_space import table


class Model:
    """A step whose bytes are a formula of the settings."""

    def __init__(self, seed: int, has_logits: bool = False) -> None:
        draw = random.Random(seed)
        self.weights, self.activations = draw.randint(10, 1000), draw.randint(10, 10_000)
        self.samples, self.num_calls = 64, 0
        self.codec = {"exact": draw.uniform(0.5, 0.9), "int8": draw.uniform(0.28, 0.45), "int4": 0.2}
        self.regions = {"blocks": draw.uniform(0.1, 0.6), "sqrt": draw.uniform(0.1, 0.6), "recursive": 0.08}
        self.refused = draw.choice([None, "recursive", "4bit"])
        self.logits = draw.choice([0.0, 0.3, 1.0, 5.0]) * self.activations if has_logits else 0.0

    def __call__(self, techniques):
        self.num_calls += 1
        recipe = Recipe("modelled", tuple(techniques))
        weights = self.weights * (0.2 if recipe.get(Sparsity) else 1) * (0.5 if recipe.get(LowPrecision) else 1)
        state = recipe.get(OptimizerState)
        gradients = weights * (0.1 if state and state.gradients == "release" else 1)
        factor = {None: 2.0, "32bit": 2.0, "8bit": 0.5, "4bit": 0.25}[state.format if state else None]
        if state and state.format == self.refused:
            raise ValueError("not this optimizer")
        parts = recipe.get(Microbatching)
        gradients *= 1 if parts else 0.4  # microbatches hold them through the next forward pass
        num_parts = 1 if parts is None else math.ceil(self.samples / parts.size)
        kept, logits = self.activations / num_parts, self.logits / num_parts
        codes = recipe.get(ActivationCompression)
        codecs = () if codes is None else codes.codecs
        if "linear-cross-entropy" in codecs:
            logits = 0
        if values := [codec for codec in codecs if codec in self.codec]:
            kept *= self.codec[values[-1]]
        if regions := recipe.get(Checkpointing):
            if regions.budget is not None:
                kept *= 0.7
            elif regions.method == self.refused:
                raise ValueError("not this model")
            else:
                kept *= self.regions[regions.method]
        split = dict.fromkeys(CATEGORIES, 0)
        split |= {"weights": int(weights), "gradients": int(gradients)}
        split |= {"optimizer_state": int(weights * factor), "activations": int(kept), "temporary": int(logits)}
        return Prediction(peak_bytes=sum(split.values()), by_category=split)


def everything(model, options):
    """Every combination that can be used, with its peak."""
    for choice in itertools.product(*options.values()):
        try:
            techniques = in_order([EarlyZeroGrad(), *(o.config for o in choice if o.config is not None)])
            yield choice, model(Recipe("all", techniques).techniques).peak_bytes
        except ValueError:
            continue


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("tier", "has_logits"), [*((tier, False) for tier in TIERS), ("lossless", True), ("balanced", True)]
)
def test_the_choice_is_the_cheapest_of_all_and_the_smallest_is_the_smallest_of_all(seed, tier, has_logits):
    model, options = Model(seed, has_logits), table(tier, has_wide_head=has_logits)
    combinations = list(everything(model, options))
    least, most = min(peak for _, peak in combinations), max(peak for _, peak in combinations)
    search = Search(options, model, [EarlyZeroGrad()], max_predictions=10**6)
    assert search.peak(search.lowest()) <= 1.01 * least  # each step of the search may leave half a percent
    assert search.cheapest(least + 1).prediction.peak_bytes <= least + 1, "close to a limit; bytes are rounded down"
    for fraction in (0.05, 0.2, 0.5, 0.8, 1.0):
        limit = int(least + fraction * (most - least))
        best = min(
            (max(o.level for o in choice), round(time_factor(choice), 6))
            for choice, peak in combinations
            if peak <= limit
        )
        found = search.cheapest(limit)
        assert found.prediction.peak_bytes <= limit
        assert (max(o.level for o in found.choice), round(time_factor(found.choice), 6)) == best
    assert search.cheapest(least - 1) is None


@pytest.mark.parametrize("seed", range(6))
def test_few_predictions_are_enough(seed):
    model = Model(seed)
    search = Search(table("extreme"), model, [EarlyZeroGrad()])
    plain = search.peak(search.nothing)
    assert search.cheapest(int(0.6 * plain)) is not None
    assert search.num_predictions <= 4
    assert model.num_calls == search.num_predictions


def test_no_more_than_the_allowed_predictions_are_made_and_the_search_says_so():
    model = Model(3)
    search = Search(table("extreme"), model, [EarlyZeroGrad()], max_predictions=2)
    search.lowest()
    assert model.num_calls == 2
    assert search.is_exhausted


class Ends(SearchWatch):
    """Ends a search after a number of predictions, once something fits."""

    def __init__(self, after):
        self.after, self.told = after, []

    def why_over(self, has_plan):
        return "by the test" if has_plan and len(self.told) >= self.after else ""

    def tell(self, num_predictions, best_bytes):
        self.told.append((num_predictions, best_bytes))


def test_a_search_that_is_ended_gives_the_best_so_far_and_one_without_a_plan_goes_on():
    model, plain = Model(0), Search(table("extreme"), Model(0), [EarlyZeroGrad()])
    limit = int(0.2 * plain.peak(plain.nothing))
    whole = plain.cheapest(limit)
    assert whole.why_ended == ""
    watch = Ends(after=1)
    found = Search(table("extreme"), model, [EarlyZeroGrad()], watch=watch).cheapest(limit)
    assert found.why_ended == "by the test"
    assert found.prediction.peak_bytes <= limit
    assert 1 < len(watch.told) < plain.num_predictions
    assert watch.told[0][0] == 1
    assert watch.told[-1][1] == min(best for _, best in watch.told) <= limit
    assert time_factor(found.choice) >= time_factor(whole.choice)


class Timed(Model):
    """Its predictions are real steps, whose times are those of the ladder but for one text."""

    def __init__(self, seed, factors):
        super().__init__(seed)
        self.factors, self.refused = factors, None

    def __call__(self, techniques):
        kinds = {type(t): t for t in techniques}
        seconds = 1.0
        for kind, options in table("balanced").items():
            option = next((o for o in options if o.config is not None and o.config == kinds.get(kind)), options[0])
            seconds *= self.factors.get(option.text, option.time_factor)
        return dataclasses.replace(super().__call__(techniques), seconds=seconds, is_timed=True)


def chosen(factors, seed=1, fraction=0.5):
    model = Timed(seed, factors)
    search = Search(table("balanced"), model, [EarlyZeroGrad()])
    limit = int(fraction * search.peak(search.nothing))
    found = search.cheapest(limit)
    assert found.prediction.peak_bytes <= limit
    return describe(found.choice), search


def test_measured_times_that_agree_with_the_model_change_nothing():
    expected = Search(table("balanced"), Timed(1, {}), [EarlyZeroGrad()])
    plain = expected.peak(expected.nothing)
    modelled = Search(table("balanced"), Model(1), [EarlyZeroGrad()]).cheapest(int(0.5 * plain))
    assert chosen({})[0] == describe(modelled.choice)


def test_of_what_fits_the_one_that_was_measured_to_be_fastest_is_taken():
    by_the_model, search = chosen({})
    slow = {text: 5.0 for text in by_the_model.split(", ")}
    assert all(text in {option.text for option in search.stronger_options(search.nothing)} for text in slow)
    by_the_clock, _ = chosen(slow)
    assert by_the_clock != by_the_model
    assert not set(slow) & set(by_the_clock.split(", "))


def test_what_is_faster_by_no_more_than_times_scatter_is_not():
    by_the_model, search = chosen({})
    factors = {o.text: o.time_factor for o in search.stronger_options(search.nothing)}
    assert chosen({text: 1.02 * factors[text] for text in by_the_model.split(", ")})[0] == by_the_model


def test_a_time_that_was_short_once_does_not_choose():
    """The least of many is one by chance; so both are timed again."""
    by_the_model, modelled = chosen({})
    asked = []

    class Lucky(Timed):
        def __call__(self, techniques):
            found = super().__call__(techniques)
            is_first = techniques not in asked
            asked.append(techniques)
            is_lucky = is_first and repr(techniques) != describe_techniques(modelled, by_the_model)
            return dataclasses.replace(found, seconds=0.1 * found.seconds) if is_lucky else found

    search = Search(table("balanced"), Lucky(1, {}), [EarlyZeroGrad()])
    limit = int(0.5 * search.peak(search.nothing))
    found = search.cheapest(limit)
    assert len(asked) > len({repr(techniques) for techniques in asked}), "two were timed again"
    assert describe(found.choice) == by_the_model


def test_a_setting_that_saves_nothing_is_not_taken_for_a_lucky_time():
    """However fast it was, twice: the same without it takes no more."""

    class NoEffect(Timed):
        def __call__(self, techniques):
            found = super().__call__([t for t in techniques if not isinstance(t, OptimizerState)])
            is_on = any(isinstance(t, OptimizerState) for t in techniques)
            return dataclasses.replace(found, seconds=0.01 * found.seconds) if is_on else found

    knobs_of = table("lossless")
    search = Search(knobs_of, NoEffect(1, {}), [EarlyZeroGrad()])
    limit = int(0.5 * search.peak(search.nothing))
    found = search.cheapest(limit)
    strongest = tuple(dimension[-1 if kind is Checkpointing else 0] for kind, dimension in knobs_of.items())
    lucky = tuple(
        knobs_of[kind][1] if kind is OptimizerState else o for kind, o in zip(knobs_of, strongest, strict=True)
    )
    assert search.peak(lucky) == search.peak(strongest) <= limit
    assert search.cheapest(limit) == found


def test_what_cannot_be_timed_again_does_not_choose():
    """No predictions are left for a second time."""
    by_the_model, search = chosen({})
    asked = []

    class Lucky(Timed):
        def __call__(self, techniques):
            found = super().__call__(techniques)
            asked.append(techniques)
            return dataclasses.replace(found, seconds=found.seconds / len(asked))

    limited = Search(table("balanced"), Lucky(1, {}), [EarlyZeroGrad()], max_predictions=search.num_predictions)
    found = limited.cheapest(int(0.5 * limited.peak(limited.nothing)))
    assert len(asked) <= search.num_predictions
    assert describe(found.choice) == by_the_model


def test_what_takes_more_the_second_time_is_not_taken():
    by_the_model, _ = chosen({})
    slow = {text: 5.0 for text in by_the_model.split(", ")}
    by_the_clock, _ = chosen(slow)
    asked = []

    class Grows(Timed):
        def __call__(self, techniques):
            found = super().__call__(techniques)
            is_again = repr(techniques) in asked
            asked.append(repr(techniques))
            return dataclasses.replace(found, workspace_bytes=10**9) if is_again else found

    search = Search(table("balanced"), Grows(1, slow), [EarlyZeroGrad()])
    found = search.cheapest(int(0.5 * search.peak(search.nothing)))
    assert describe(found.choice) != by_the_clock


def test_a_second_time_that_cannot_be_taken_is_none():
    """The fastest fails when it is timed again: the next one is taken."""
    expected, _ = chosen({})
    slow = {text: 5.0 for text in expected.split(", ")}
    second, _ = chosen(slow)
    asked = []

    class FailsAgain(Timed):
        def __call__(self, techniques):
            is_again = repr(techniques) in asked
            asked.append(repr(techniques))
            if is_again and self.forbidden(techniques):
                raise ValueError("not a second time")
            return super().__call__(techniques)

    model = FailsAgain(1, slow)
    search = Search(table("balanced"), model, [EarlyZeroGrad()])
    model.forbidden = lambda techniques: describe_techniques(search, second) == repr(techniques)
    limit = int(0.5 * search.peak(search.nothing))
    found = search.cheapest(limit)
    assert found.prediction.peak_bytes <= limit
    assert describe(found.choice) != second


def describe_techniques(search, text):
    """The Configs that a choice stands for, as text."""
    options = {o.text: o for o in search.stronger_options(search.nothing)}
    choice = [options[each].config for each in text.split(", ")]
    return repr(in_order([EarlyZeroGrad(), *choice]))


def test_the_smallest_peak_is_that_of_regions_with_room_where_the_budget_leaves_them_none():
    """Below 400 bytes no regions are found; at that, they take least of all."""

    def predict(techniques):
        regions = next((t for t in techniques if isinstance(t, Checkpointing)), None)
        parts = next((t.size for t in techniques if isinstance(t, Microbatching)), 64)
        if regions is None or regions.budget is None:
            return Prediction(peak_bytes=1000 + parts, by_category={"activations": 1000 + parts})
        if regions.budget < 400 + parts:
            error = BudgetTooSmallError("too small")
            error.lowest_bytes = 400 + parts
            raise error
        return Prediction(peak_bytes=400 + parts, by_category={"activations": 400 + parts})

    only = {kind: dimension for kind, dimension in table("lossless").items() if kind in (Checkpointing, Microbatching)}
    small = {**only, Checkpointing: (only[Checkpointing][0], regions_for(200, 1.2), *only[Checkpointing][2:])}
    search = Search(small, predict)
    assert search.cheapest(200) is None
    least = search.peak(search.lowest())
    assert 400 + 1 <= least <= 1.005 * (400 + 1)
    assert Checkpointing(budget=least) in search.techniques(search.lowest())


def test_modelled_times_do_not_choose():
    """A step that reads values is measured as well, but its time is a model's."""
    by_the_model, _ = chosen({})
    slow = {text: 5.0 for text in by_the_model.split(", ")}

    class Modelled(Timed):
        def __call__(self, techniques):
            return dataclasses.replace(super().__call__(techniques), source="measured", is_timed=False)

    search = Search(table("balanced"), Modelled(1, slow), [EarlyZeroGrad()])
    assert describe(search.cheapest(int(0.5 * search.peak(search.nothing))).choice) == by_the_model


def test_a_faster_setting_of_a_worse_loss_class_is_not_taken():
    found, search = chosen({'activations=["exact", "int8"]': 0.01, 'optimizer_state="8bit"': 0.01})
    texts = {option.text for option in search.stronger_options(search.nothing) if option.loss_class == "exact"}
    assert set(found.split(", ")) <= texts


def test_settings_that_exclude_each_other_are_never_predicted():
    asked = []

    def predict(techniques):
        asked.append(techniques)
        Recipe("asked", tuple(techniques))  # raises where two exclude each other
        return Prediction(peak_bytes=10)

    search = Search(table("extreme"), predict)
    search.lowest()
    assert not any(
        OptimizerState(first_moment="4bit", gradients="release") in each
        and any(isinstance(t, Microbatching) for t in each)
        for each in asked
    )
    assert describe(search.nothing) == "nothing"
    scaled = Search(table("extreme"), predict, ways=["fp16 with a GradScaler"])
    asked.clear()
    scaled.lowest()
    assert not any(isinstance(t, OptimizerState) and t.gradients == "release" for each in asked for t in each)
