"""The search: the cheapest settings with which a step fits, from predictions of a few of them.

Level by level (`search_space`), so that a result is never changed where an exact setting would do; within a level, the
least time. Each prediction bounds from below what all other choices need (`lower_bounds`), so the search asks for the
cheapest choice that no bound rules out, until one fits. The smallest peak is found by asking for the lowest bound,
until no bound lies more than half a percent below the best peak. Predictions are kept. Where they are real steps on
CPU, they were timed as well, and the fastest of all that fit is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.core.errors import BudgetTooSmallError
from lightning_memsave.planner.lower_bounds import LowerBounds
from lightning_memsave.planner.memory_budget import needed_bytes
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.planner.search_space import (
    Choice,
    Dimension,
    Option,
    describe,
    levels,
    time_factor,
    with_regions_for,
)
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.registry import TECHNIQUES, Config

MAX_PREDICTIONS = 100
"""More are not made; then the best choice that is known is taken, and the plan says so."""

_LEAST_GAIN = 0.005
"""Fraction of a peak: the search for the smallest one ends where a step of it gains less."""
_CLOSE = 1.05
"""Peaks up to this factor above a limit are lowered by whatever there is."""
SCATTER = 0.05
"""Fraction of measured times: what is faster by less is not known to be."""
_MODEL_SCATTER = 0.1
"""Fraction of the model's times: what is slower by less may be faster."""
_NUM_BISECTIONS, _LOWEST_BOUND = 3, 10.0
"""Predictions for a lower bound of noise; part of the lowest bound of the table that they go down to."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    choice: Choice
    prediction: Prediction
    limit_bytes: int
    why_ended: str
    """Why the search ended before all was asked that had to be; empty where all was."""
    beyond_bytes: int = 0  # what `prediction` needs above the less certain one that the search went by


class SearchWatch:
    """Is told how far a search is, and may end it; this one never does."""

    def why_over(self, has_plan: bool) -> str:
        """Return why the search has to end; empty while it may go on.

        Args:
            has_plan: whether something was found that fits.
        """
        return ""

    def tell(self, num_predictions: int, best_bytes: int | None) -> None:
        """Take note of a prediction.

        Args:
            num_predictions: so far, those of other searches among the same dimensions as well.
            best_bytes: the smallest number that a step is predicted to need; `None` before the first prediction.
        """


class Search:
    """Chooses among the settings of all dimensions.

    Args:
        table: the dimensions, as `search_space.dimensions` makes them.
        predict: predicts a step under a tuple of Configs; raises `ValueError` where they cannot be used.
        fixed: Configs that are there in any case.
        ways: of training, in the words of `core.compatibility`: what they refuse is not asked for.
        max_predictions: of `predict`; at least one is always made.
        watch: is told of predictions, and may end the search.
        asking: bytes that some steps of a choice need beside weights, optimizer state and data.
    """

    def __init__(
        self,
        table: Mapping[type[Config], Dimension],
        predict: Callable[[Sequence[Config]], Prediction],
        fixed: Sequence[Config] = (),
        ways: Sequence[str] = (),
        max_predictions: int = MAX_PREDICTIONS,
        watch: SearchWatch | None = None,
        asking: Callable[[Choice], int] | None = None,
    ) -> None:
        self._kinds, self._dimensions = tuple(table), tuple(table.values())
        self._levels = levels(table)
        self._predict, self._fixed, self._ways = predict, tuple(fixed), tuple(ways)
        self._choices: list[Choice] = sorted(
            filter(self._is_compatible(), itertools.product(*self._dimensions)), key=_order
        )
        ranks = [self._levels.index(max(option.level for option in choice)) for choice in self._choices]
        self._ranks = torch.tensor(ranks, device="cpu")
        self._bounds, self._num_learned = LowerBounds(self._kinds, self._choices, asking), 0
        self._asking = asking
        self._max_predictions, self._watch = max_predictions, watch or SearchWatch()
        self._limit_bytes = -1  # nothing fits
        self._ended = ""  # why something was not asked
        self._known: dict[str, tuple[Choice, Prediction | None]] = {}
        self._news: list[tuple[Choice, Prediction | ValueError]] = []  # in the order in which it became known
        self.refusals: dict[str, str] = {}
        """Why settings could not be used, by their text."""
        self._least_budgets: dict[str, int] = {}
        """Least budgets that regions can meet where they cannot meet this one, by the text of the settings."""
        self._coded = set[str]()  # choices whose codecs have been predicted without a bound of noise
        self._all = [self]  # of those that share what is known
        self.num_predictions = 0
        """How many have been made, those that ended in a refusal among them."""

    def among(self, table: Mapping[type[Config], Dimension], most: int | None = None) -> Search:
        """Return a search among other settings of the same dimensions, which shares all predictions with this one.

        Args:
            table: the settings.
            most: predictions that it makes of its own; by default as many as this one.
        """
        most = self._max_predictions if most is None else most
        other = Search(table, self._predict, self._fixed, self._ways, most, self._watch, self._asking)
        other._known, other._news, other._coded = self._known, self._news, self._coded
        other.refusals, other._least_budgets = self.refusals, self._least_budgets
        other._all = self._all
        self._all.append(other)
        return other

    # ------------------------------------------------------------------ predictions
    @property
    def is_exhausted(self) -> bool:
        """Whether no more will be made."""
        return bool(self.why_ended)

    @property
    def why_ended(self) -> str:
        """Why no more will be made; empty while they are."""
        if self.num_predictions >= self._max_predictions:
            return f"after {self.num_predictions} predictions"
        return self._watch.why_over(any(needed <= self._limit_bytes for needed in self._needed()))

    @property
    def is_late(self) -> bool:
        """Whether it is time to come to an end, with a plan or without."""
        return bool(self._watch.why_over(True))

    def _needed(self) -> list[int]:
        return [needed_bytes(prediction) for _, prediction in self._known.values() if prediction is not None]

    def _is_compatible(self) -> Callable[[Choice], bool]:
        """Return whether settings work together, of each choice; with all of them off, there is one in any case."""
        always = (*Recipe("planned", self._fixed).rows(), *self._ways)

        @functools.cache
        def works(rows: tuple[str, ...]) -> bool:
            try:
                check_compatibility([*always, *rows])
            except ValueError:
                return not rows
            return True

        options = itertools.chain(*self._dimensions)
        rows = {o.text: Recipe("planned", (o.config,)).rows() for o in options if o.config is not None}
        return lambda choice: works(tuple(row for option in choice for row in rows.get(option.text, ())))

    @property
    def fixed_kinds(self) -> set[type[Config]]:
        """Techniques that are there in any case."""
        return {type(config) for config in self._fixed}

    def stronger_options(self, choice: Choice) -> Iterator[Option]:
        """Yield the settings that may save more than those of a choice, each in its dimension."""
        for dimension, chosen in zip(self._dimensions, choice, strict=True):
            yield from (each for each in dimension if each != chosen and not each.is_no_stronger_than(chosen))

    @property
    def nothing(self) -> Choice:
        """Every dimension off."""
        return tuple(dimension[0] for dimension in self._dimensions)

    def techniques(self, choice: Choice) -> tuple[Config, ...]:
        """Return the Configs of a choice, in the order of the registry."""
        return in_order([*self._fixed, *(option.config for option in choice if option.config is not None)])

    def changed(self, choice: Choice, option: Option) -> Choice:
        """Return the choice with `option` at its dimension."""
        return _with(choice, next(i for i, dimension in enumerate(self._dimensions) if option in dimension), option)

    def predict(self, choice: Choice) -> Prediction | None:
        """Return the prediction, made once.

        `None` where the settings cannot be used, or no more predictions are made.
        """
        key = describe(choice)
        if key in self._known:
            return self._known[key][1]
        if self.num_predictions and (why := self.why_ended):
            self._ended = why
            return None
        try:
            self._note(choice, self._predict_new(self.techniques(choice)))
        except ValueError as error:
            self.refuse(choice, error)
            if not isinstance(error, BudgetTooSmallError):
                self._find_what_is_refused(choice)
        self._watch.tell(sum(each.num_predictions for each in self._all), min(self._needed(), default=None))
        return self._known[key][1]

    def _find_what_is_refused(self, choice: Choice) -> None:
        """Ask for each setting alone that has never worked: what is refused alone is refused beside others."""
        worked = {option.text for seen, prediction in self._known.values() if prediction is not None for option in seen}
        for option in choice:
            is_new = option.config is not None and option.text not in worked
            if is_new and self.predict(self.changed(self.nothing, option)) is None:
                break

    def refuse(self, choice: Choice, error: ValueError) -> None:
        """Take note that these settings cannot be used after all."""
        key = describe(choice)
        self.refusals[key] = str(error)
        if isinstance(error, BudgetTooSmallError):
            self._least_budgets[key] = error.lowest_bytes
        self._note(choice, error)

    def _note(self, choice: Choice, found: Prediction | ValueError) -> None:
        self._known[describe(choice)] = choice, found if isinstance(found, Prediction) else None
        self._news.append((choice, found))

    def _predict_new(self, techniques: tuple[Config, ...]) -> Prediction:
        check_compatibility([*Recipe("planned", techniques).rows(), *self._ways])
        self.num_predictions += 1
        return self._predict(techniques)

    def peak(self, choice: Choice) -> float:
        """Return bytes that are needed; infinite where there is no prediction."""
        prediction = self.predict(choice)
        return math.inf if prediction is None else needed_bytes(prediction)

    def _learn(self) -> LowerBounds:
        """Return bounds from all that is known by now."""
        for choice, found in self._news[self._num_learned :]:
            if isinstance(found, Prediction):
                self._bounds.learn(choice, found)
            else:
                self._bounds.learn_refusal(choice, getattr(found, "lowest_bytes", None))
        self._num_learned = len(self._news)
        return self._bounds

    # ------------------------------------------------------------------ the search
    def cheapest(self, limit_bytes: int) -> Found | None:
        """Return the cheapest choice within `limit_bytes`; `None` when there is none."""
        self._limit_bytes, self._ended = limit_bytes, ""
        if self.peak(self.nothing) <= limit_bytes:
            return self._found(self.nothing, limit_bytes)
        for rank, level in enumerate(self._levels):
            if (best := self._first_that_fits(rank, limit_bytes)) is not None:
                best = self._fastest(level, best, limit_bytes)
                return self._found(self._quietest(best, limit_bytes), limit_bytes)
        return None

    def _first_that_fits(self, rank: int, limit_bytes: int) -> Choice | None:
        """Ask for the cheapest choice of a level that may fit, until one does.

        Once time is over, for the cheapest whose bound leaves room, each time twice as much.
        """
        room = 1.0
        while True:
            bounds = self._learn()
            may_fit = ((bounds.bytes <= limit_bytes) & (self._ranks <= rank)).nonzero().flatten()
            if not len(may_fit):
                return None
            number = int(may_fit[0])
            if self._ended or self.is_late:
                room /= 2
                known, far = may_fit[bounds.is_known[may_fit]], may_fit[bounds.bytes[may_fit] <= room * limit_bytes]
                lowest = may_fit[bounds.bytes[may_fit].argmin()]
                number = int(known[0] if len(known) else far[0] if len(far) else lowest)
            if bounds.is_known[number]:
                self._ended = self._ended or (self.why_ended if number != may_fit[0] else "")
                return self._choices[number]
            if self._ended:
                return None
            self._ask(self._choices[number])

    def _ask(self, choice: Choice) -> None:
        """Predict a choice; before noise is measured for it, what its codecs take where all of them are used."""
        coded = tuple(option.without_noise_bound() for option in choice)
        if coded == choice or describe(coded) in self._coded or self.is_exhausted:
            self.predict(choice)
            return
        self._coded.add(describe(coded))
        try:
            self._news.append((coded, self._predict_new(self.techniques(coded))))
        except ValueError as error:
            self._news.append((coded, error))

    def may_lower(self, choice: Choice, option: Option) -> bool:
        """Return whether a setting may take less than the one that a choice has, as far as bounds tell."""
        return self._learn().of(self.changed(choice, option)) < self.peak(choice)

    def rival(self, best: Choice, limit_bytes: int) -> Choice | None:
        """Return the first choice of the same level that fits and is by the model of time only a little slower.

        One that only adds settings to `best` is none, nor is one whose noise would have to be measured.
        """
        bounds, level = self._learn(), max(option.level for option in best)
        for number in (bounds.bytes <= limit_bytes).nonzero().flatten():
            choice = self._choices[int(number)]
            if time_factor(choice) > (1 + _MODEL_SCATTER) * time_factor(best):
                break
            if any(option.level > level or option.noise_bound is not None for option in choice):
                continue
            has_more = all(old in (new, off) for new, old, off in zip(choice, best, self.nothing, strict=True))
            if not has_more and self.peak(choice) <= limit_bytes:
                return choice
        return None

    def _quietest(self, best: Choice, limit_bytes: int) -> Choice:
        """Lower the bound of noise, if there is one, as far as it fits: to one of the table, then by bisection."""
        for number, dimension in enumerate(self._dimensions):
            if (high := best[number].noise_bound) is None:
                continue
            lower = [each for each in dimension if each.noise_bound is not None and each.noise_bound < high]
            fitting = next((each for each in lower if self.peak(_with(best, number, each)) <= limit_bytes), None)
            if fitting is not None:
                best, high = _with(best, number, fitting), fitting.noise_bound or high
            low = max(
                (bound for each in lower if (bound := each.noise_bound or 0) < high), default=high / _LOWEST_BOUND
            )
            for _ in range(_NUM_BISECTIONS):
                middle = float(f"{math.sqrt(low * high):.2g}")
                if not low < middle < high:
                    break
                tried = _with(best, number, best[number].with_noise_bound(middle))
                if self.peak(tried) <= limit_bytes:
                    best, high = tried, middle
                else:
                    low = middle
        return best

    def _fastest(self, level: tuple[int, int], best: Choice, limit_bytes: int) -> Choice:
        """Return the fastest choice that is known to fit: the model's, unless another was measured faster twice.

        The least of many times is often the least by chance, so both it and the model's choice are timed again.
        """
        if self._seconds(best) < math.inf:
            self.rival(best, limit_bytes)  # which times it
        again: set[str] = set()
        while (own := self._seconds(best)) < math.inf:
            fastest = min(self._useful(level, limit_bytes), key=self._seconds, default=best)
            if self.peak(best) <= limit_bytes and own <= (1 + SCATTER) * self._seconds(fastest):
                break
            if describe(fastest) in again:
                return fastest
            due = [choice for choice in (best, fastest) if describe(choice) not in again]
            self._ended = self._ended or self.why_ended
            if self._ended or self.num_predictions + len(due) > self._max_predictions:
                break
            for choice in due:
                self._time_again(choice)
            again |= set(map(describe, due))
        return best

    def _useful(self, level: tuple[int, int], limit_bytes: int) -> list[Choice]:
        """Return the choices that are known to fit, except where one with some of the settings off takes no more.

        A setting that saves nothing is faster only by chance.
        """
        known = [choice for choice, _ in self._known.values() if all(option.level <= level for option in choice)]
        fitting = [choice for choice in known if self.peak(choice) <= limit_bytes]
        return [choice for choice in fitting if not any(self._has_more(choice, other) for other in fitting)]

    def _has_more(self, choice: Choice, other: Choice) -> bool:
        settings = zip(choice, other, self.nothing, strict=True)
        has_all = choice != other and all(theirs in (mine, off) for mine, theirs, off in settings)
        return has_all and self.peak(other) <= self.peak(choice)

    def _seconds(self, choice: Choice) -> float:
        prediction = self.predict(choice)
        return math.inf if prediction is None else prediction.measured_seconds

    def _time_again(self, choice: Choice) -> None:
        prediction = self.predict(choice)
        assert prediction is not None, "it has been found to fit"
        again = dataclasses.replace(prediction, seconds=None)
        with contextlib.suppress(ValueError):
            again = self._predict_new(self.techniques(choice))
        self._note(choice, again)

    def _found(self, choice: Choice, limit_bytes: int) -> Found:
        prediction = self.predict(choice)
        assert prediction is not None, "it has been found to fit"
        return Found(choice, prediction, limit_bytes, self._ended)

    def lowest(self, enough_bytes: int = 0) -> Choice:
        """Return the choice with the smallest peak of all levels, or the first that is found with `enough_bytes`.

        Of the smallest, settings are left out that save next to nothing.
        """
        while True:
            best, bounds = self._best_known(), self._learn()
            peak, left = self.peak(best), torch.where(bounds.is_known, math.inf, bounds.bytes)
            least_gain = 0 if peak < _CLOSE * enough_bytes else _LEAST_GAIN
            goal = (1 - least_gain) * peak
            if peak <= enough_bytes or self._ended or (peak < math.inf and self.is_late):
                return best
            if (choice := self._with_room(goal)) is None and left.min() < goal:
                choice = self._choices[int(left.argmin())]
            if choice is None:
                return self._simpler(best)
            self._ask(choice)

    def _simpler(self, best: Choice) -> Choice:
        most = (1 + _LEAST_GAIN) * self.peak(best)
        for number, off in enumerate(self.nothing):
            tried = _with(best, number, off)
            if tried != best and self._learn().of(tried) <= most and self.peak(tried) <= most:
                best = tried
        return best

    def _with_room(self, goal_bytes: float) -> Choice | None:
        """Return settings whose regions could not meet their budget, with the least budget that they can meet.

        `None` where that has been tried, or is not below the goal.
        """
        for key, least in sorted(self._least_budgets.items(), key=lambda item: item[1]):
            choice = with_regions_for(self._known[key][0], least)
            if least < goal_bytes and self._is_allowed(choice) and describe(choice) not in self._known:
                return choice
        return None

    def _is_allowed(self, choice: Choice) -> bool:
        return all(option.level <= self._levels[-1] for option in choice)

    def _best_known(self) -> Choice:
        """Return what needs least of what has been predicted and this search may use."""
        known = [choice for choice, _ in self._known.values() if self._is_allowed(choice)]
        return min(known, key=self.peak, default=self.nothing)


def in_order(techniques: Sequence[Config]) -> tuple[Config, ...]:
    """Return the settings in the order of the registry."""
    kinds = [technique.config for technique in TECHNIQUES]
    return tuple(sorted(techniques, key=lambda config: kinds.index(type(config))))


def _with(choice: Choice, position: int, option: Option) -> Choice:
    return (*choice[:position], option, *choice[position + 1 :])


def _order(choice: Choice) -> tuple[float, int, float]:
    """Return the modelled time, then the number of settings; of bounds of noise the highest first."""
    noise = sum(option.noise_bound or 0.0 for option in choice)
    return round(time_factor(choice), 6), sum(option.config is not None for option in choice), -noise
