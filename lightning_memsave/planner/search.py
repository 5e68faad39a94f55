"""The search: the cheapest settings with which a step fits, from predictions of some of them.

Level by level (`search_space`), so that a result is never changed where an exact setting would do; within a level, the
least time. For each choice of the other dimensions, in the order of their time, the fewest microbatches that fit are
found by bisection; the search ends at the first choice that could no longer beat the best one. Predictions are kept;
what is weaker in every dimension than a choice that did not fit is not asked for. Where predictions are real steps on
CPU, they were timed as well, and the fastest of all that fit is taken.

The smallest peak of a level is found by coordinate descent from strong settings, once with microbatches chosen first
and once last, until a step gains less than half a percent, or nothing at all where the peak is close to the limit. That
is exact, up to about a percent, where the best setting of a dimension does not hang on two others at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.core.errors import BudgetTooSmallError
from lightning_memsave.core.report import LOSS_CLASSES, LossClass
from lightning_memsave.planner.memory_budget import needed_bytes
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.planner.search_space import Dimension, Option, describe, levels, time_factor, with_regions_for
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.registry import TECHNIQUES, Config

MAX_PREDICTIONS = 100
"""More are not made; then the best choice that is known is taken, and the plan says so."""

_MAX_LEAST = 3  # budgets of regions, each of which the one before has named
_LEAST_GAIN = 0.005
"""Fraction of a peak: the search for the smallest one ends where a step of it gains less."""
_CLOSE = 1.05
"""Peaks up to this factor above a limit are lowered by whatever there is."""
_SCATTER = 0.05
"""Fraction of measured times: what is faster by less is not known to be."""
_MODEL_SCATTER = 0.1
"""Fraction of the model's times: what is slower by less may be faster."""
_NUM_BISECTIONS, _LOWEST_BOUND = 3, 10.0
"""Predictions for a lower bound of noise; part of the lowest bound of the table that they go down to."""

Choice = tuple[Option, ...]
"""A setting for each dimension."""
Peak = Callable[[Choice], float]
"""The bytes that a choice needs."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    choice: Choice
    prediction: Prediction
    limit_bytes: int
    why_ended: str
    """Why the search ended before all was asked that had to be; empty where all was."""
    beyond_bytes: int = 0  # what `prediction` needs above the less certain one that the search went by

    @property
    def loss_class(self) -> LossClass:
        """The worst of its settings."""
        return max((option.loss_class for option in self.choice), key=LOSS_CLASSES.index)


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
    """

    def __init__(
        self,
        table: Mapping[type[Config], Dimension],
        predict: Callable[[Sequence[Config]], Prediction],
        fixed: Sequence[Config] = (),
        ways: Sequence[str] = (),
        max_predictions: int = MAX_PREDICTIONS,
        watch: SearchWatch | None = None,
    ) -> None:
        self._kinds, self._dimensions = tuple(table), tuple(table.values())
        self._levels = levels(table)
        self._predict, self._fixed, self._ways = predict, tuple(fixed), tuple(ways)
        self._max_predictions, self._watch = max_predictions, watch or SearchWatch()
        self._limit_bytes = -1  # nothing fits
        self._ended = ""  # why something was not asked
        self._known: dict[str, tuple[Choice, Prediction | None]] = {}
        self.refusals: dict[str, str] = {}
        """Why settings could not be used, by their text."""
        self._least_budgets: dict[str, int] = {}
        """Least budgets that regions can meet where they cannot meet this one, by the text of the settings."""
        self._all = [self]  # of those that share what is known
        self.num_predictions = 0
        """How many have been made, those that ended in a refusal among them."""

    def among(self, table: Mapping[type[Config], Dimension]) -> Search:
        """Return a search among other settings of the same dimensions, which shares all predictions with this one."""
        other = Search(table, self._predict, self._fixed, self._ways, self._max_predictions, self._watch)
        other._known, other.refusals, other._least_budgets = self._known, self.refusals, self._least_budgets
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
            self._known[key] = choice, self._predict_new(self.techniques(choice))
        except ValueError as error:
            self.refuse(choice, error)
        self._watch.tell(sum(each.num_predictions for each in self._all), min(self._needed(), default=None))
        return self._known[key][1]

    def refuse(self, choice: Choice, error: ValueError) -> None:
        """Take note that these settings cannot be used after all."""
        key = describe(choice)
        self._known[key], self.refusals[key] = (choice, None), str(error)
        if isinstance(error, BudgetTooSmallError):
            self._least_budgets[key] = error.lowest_bytes

    def _predict_new(self, techniques: tuple[Config, ...]) -> Prediction:
        check_compatibility([*Recipe("planned", techniques).rows(), *self._ways])
        self.num_predictions += 1
        return self._predict(techniques)

    def peak(self, choice: Choice) -> float:
        """Return bytes that are needed; infinite where there is no prediction."""
        prediction = self.predict(choice)
        return math.inf if prediction is None else needed_bytes(prediction)

    def _fits(self, choice: Choice, limit_bytes: int) -> bool:
        if describe(choice) not in self._known and any(
            prediction is not None and needed_bytes(prediction) > limit_bytes and self._is_weaker(choice, other)
            for other, prediction in self._known.values()
        ):
            return False
        return self.peak(choice) <= limit_bytes

    @staticmethod
    def _is_weaker(choice: Choice, other: Choice) -> bool:
        """Return whether `choice` is no stronger than `other` in any dimension, as far as that is known."""
        settings = zip(choice, other, strict=True)
        return all(mine == theirs or mine.is_no_stronger_than(theirs) for mine, theirs in settings)

    # ------------------------------------------------------------------ the search
    def cheapest(self, limit_bytes: int) -> Found | None:
        """Return the cheapest choice within `limit_bytes`; `None` when there is none."""
        self._limit_bytes, self._ended = limit_bytes, ""
        if self._fits(self.nothing, limit_bytes):
            return self._found(self.nothing, limit_bytes)
        for level in self._levels:
            start = self._lowest(level, self.peak, limit_bytes)
            if self.peak(start) <= limit_bytes:
                best = self._fastest(level, self._cheapest(level, start, limit_bytes), limit_bytes)
                return self._found(self._quietest(best, limit_bytes), limit_bytes)
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
        again: set[str] = set()
        while (own := self._seconds(best)) < math.inf:
            fastest = min(self._useful(level, limit_bytes), key=self._seconds, default=best)
            if self.peak(best) <= limit_bytes and own <= (1 + _SCATTER) * self._seconds(fastest):
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
        self._known[describe(choice)] = choice, again

    def _found(self, choice: Choice, limit_bytes: int) -> Found:
        prediction = self.predict(choice)
        assert prediction is not None, "it has been found to fit"
        return Found(choice, prediction, limit_bytes, self._ended)

    def lowest(self, enough_bytes: int = 0) -> Choice:
        """Return the choice with the smallest peak of all levels, or the first that is found with `enough_bytes`."""
        return self._least(self._lowest(self._levels[-1], self._peak_of_least, enough_bytes))

    def _peak_of_least(self, choice: Choice) -> float:
        return self.peak(self._least(choice))

    def _least(self, choice: Choice) -> Choice:
        """Replace the budget of regions by the smallest one that they can meet, where they cannot meet theirs."""
        for _ in range(_MAX_LEAST):
            if self.predict(choice) is None and (least := self._least_budgets.get(describe(choice))) is not None:
                choice = with_regions_for(choice, least)
        return choice

    @property
    def _position(self) -> int | None:
        """Return the position of microbatches among the dimensions."""
        return self._kinds.index(Microbatching) if Microbatching in self._kinds else None

    def _allowed(self, level: tuple[int, int]) -> list[Dimension]:
        return [tuple(option for option in dimension if option.level <= level) for dimension in self._dimensions]

    def _lowest(self, level: tuple[int, int], peak: Peak, enough_bytes: int = 0) -> Choice:
        """Return the choice with the smallest peak, from two starts, or the first that needs at most `enough_bytes`."""
        allowed, best = self._allowed(level), self.nothing
        for order in self._orders():
            found = self._descend(self._strongest(allowed, order, peak, enough_bytes), allowed, peak, enough_bytes)
            if peak(found) < peak(best):
                best = found
            if peak(best) <= enough_bytes:
                break
        return best

    def _orders(self) -> Iterator[list[int]]:
        """Yield the orders to try: microbatches first, then microbatches last, because some settings exclude them."""
        position = self._position
        others = [number for number in range(len(self._dimensions)) if number != position]
        yield [*([] if position is None else [position]), *others]
        if position is not None:
            yield [*reversed(others), position]

    def _strongest(
        self, allowed: Sequence[Dimension], order: Sequence[int], peak: Peak, enough_bytes: int = 0
    ) -> Choice:
        """Return the strongest setting of each dimension in turn that works beside the ones before."""
        best = self.nothing
        for number in order:
            if peak(best) <= enough_bytes:
                break
            if self._is_useless(number, best):
                continue
            for option in reversed(allowed[number][1:]):
                tried = _with(best, number, option)
                if peak(tried) < peak(best):
                    best = tried
                    break
        return best

    def _descend(self, best: Choice, allowed: Sequence[Dimension], peak: Peak, enough_bytes: int) -> Choice:
        """Lower one dimension after the other, until a round lowers the peak by next to nothing."""
        while True:
            before = peak(best)
            for number, dimension in enumerate(allowed):
                if number == self._position:
                    best = self._best_size(best, number, dimension, peak, enough_bytes)
                elif not self._is_useless(number, best):
                    best = self._best_option(best, number, dimension, peak, enough_bytes)
            if not _goes_on(before, peak(best), enough_bytes):
                return best

    @staticmethod
    def _best_option(best: Choice, number: int, dimension: Dimension, peak: Peak, enough_bytes: int) -> Choice:
        """Return the choice with the option of a dimension that has the smallest peak, or the first that is enough."""
        for option in dimension:
            if peak(best) <= enough_bytes:
                break
            tried = _with(best, number, option)
            if not option.is_no_stronger_than(best[number]) and peak(tried) < peak(best):
                best = tried
        return best

    def _is_useless(self, number: int, choice: Choice) -> bool:
        """Return whether a dimension that is off can save next to nothing, as the peak has hardly any activations.

        With reserved bytes of CUDA this is not told, because they come from more moments than the peak.
        """
        is_of_activations = self._kinds[number] in (ActivationCompression, Checkpointing)
        if not is_of_activations or choice[number].config is not None or (found := self.predict(choice)) is None:
            return False
        return (
            found.cuda is None
            and found.by_category.get("activations", found.peak_bytes) < _LEAST_GAIN * found.peak_bytes
        )

    def _best_size(self, best: Choice, number: int, sizes: Dimension, peak: Peak, enough_bytes: int) -> Choice:
        """Return the microbatches with the smallest peak: from the present size on, while the peak falls.

        Smaller ones keep less, but something is noted of each, so the peak falls towards one size from both sides.
        """
        off, start = sizes[0], sizes.index(best[number])
        for path in (sizes[start + 1 :], sizes[1:start][::-1]) if start else (sizes[:0:-1],):
            for size in path:
                if (before := peak(best)) <= enough_bytes:
                    return best
                was_off = best[number] == off
                best = min(best, tried := _with(best, number, size), key=peak)
                if not was_off and peak(tried) < math.inf and not _goes_on(before, peak(tried), enough_bytes):
                    break
        return min(best, _with(best, number, off), key=peak)

    def _cheapest(self, level: tuple[int, int], start: Choice, limit_bytes: int) -> Choice:
        allowed = self._allowed(level)
        position = self._position
        parts = allowed[position] if position is not None else (None,)
        others = [dimension if number != position else dimension[:1] for number, dimension in enumerate(allowed)]
        best = start
        for other in sorted(itertools.product(*others), key=_cost):
            if not self._is_worth_asking(other, best):
                break
            tries = [other if part is None else _with(other, position, part) for part in parts]
            tries = [choice for choice in tries if self._is_worth_asking(choice, best)]
            fewest = self._first_that_fits(tries, limit_bytes)
            if fewest is not None and _cost(fewest) < _cost(best):
                best = fewest
        return best

    def _is_worth_asking(self, choice: Choice, best: Choice) -> bool:
        """Return whether it may be faster; with real steps, also where the model has it a little slower."""
        if _cost(choice) < _cost(best):
            return True
        plain = self.predict(self.nothing)
        return plain is not None and plain.is_timed and time_factor(choice) < (1 + _MODEL_SCATTER) * time_factor(best)

    def _first_that_fits(self, tries: Sequence[Choice], limit_bytes: int) -> Choice | None:
        """Find the fewest microbatches: none, else by bisection.

        More microbatches need no more memory than two, which hold gradients.
        """
        if not tries:
            return None
        if self._fits(tries[0], limit_bytes):
            return tries[0]
        tries = tries[1:]
        if not tries or not self._fits(tries[-1], limit_bytes):
            return None
        low, high = 0, len(tries) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(tries[middle], limit_bytes) else (middle + 1, high)
        return tries[high]


def _goes_on(before: float, after: float, enough_bytes: int) -> bool:
    """Return whether a search goes on: a step of it gained something, and not next to nothing far from the goal."""
    least_gain = 0 if after < _CLOSE * enough_bytes else _LEAST_GAIN
    return after < (1 - least_gain) * before


def in_order(techniques: Sequence[Config]) -> tuple[Config, ...]:
    """Return the settings in the order of the registry."""
    kinds = [technique.config for technique in TECHNIQUES]
    return tuple(sorted(techniques, key=lambda config: kinds.index(type(config))))


def _with(choice: Choice, position: int | None, option: Option) -> Choice:
    assert position is not None, "there is such a dimension"
    return (*choice[:position], option, *choice[position + 1 :])


def _cost(choice: Sequence[Option]) -> tuple[float, int]:
    """Return the modelled time against the plain step, then the number of settings."""
    return round(time_factor(choice), 6), sum(option.config is not None for option in choice)
