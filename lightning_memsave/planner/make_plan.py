"""Make a plan for a budget: search the dimensions that a recipe leaves open, and explain the choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_memsave.core.compatibility import check_compatibility, costs_of
from lightning_memsave.core.errors import BudgetTooSmallError, setting_error
from lightning_memsave.core.units import format_bytes
from lightning_memsave.planner.memory_budget import MEANINGS, Budget, needed_bytes
from lightning_memsave.planner.plan import Plan, PlanStep
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.planner.search import SCATTER, Found, Search, SearchWatch, in_order
from lightning_memsave.planner.search_space import (
    MANY_BLOCKS,
    NOT_TILED,
    OVERHEAD,
    TIERS,
    Choice,
    Dimension,
    Option,
    Tiled,
    describe,
    dimensions,
    in_host_memory,
    tiles,
)
from lightning_memsave.saved_tensors.codec_names import HEAD
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.registry import Config, technique_of
from lightning_memsave.techniques.tiling import Tiling

Predict = Callable[[Sequence[Config]], Prediction]
_MAX_CONFIRMATIONS = 4
_SHORT_SECONDS = 0.05
"""Length of a step below which it is mostly starting operations, which the model of time knows less of."""
_MARGIN = 200  # of a budget, one part is left free: what kernels take differs from step to step
_BEYOND = {
    "activations": "shorter samples or fewer of them",
    "temporary": "shorter samples",
    "weights": "a smaller model, or sharding over devices",
    "gradients": "a smaller model, or sharding over devices",
    "optimizer_state": "an optimizer with less state",
    "data": "smaller batches",
}
"""What is left to do by category, once a planner has tried every technique (what these are for: `core/remedies.py`)."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a planner has to know besides predictions."""

    num_samples: int | None = None
    """Number of samples of the batch; `None` when it cannot be cut."""
    why_whole: str = ""
    """Why it will not be, where its samples can be told."""
    is_cut_exact: bool = True
    """Whether microbatches leave the model's result as it is."""
    device_type: str = "cpu"
    device_bytes: int | None = None
    """The memory of the device; `None` where it is not told."""
    ways: tuple[str, ...] = ()
    """Ways of training, in the words of `core.compatibility`."""
    asking_bytes: tuple[int, int] = (0, 0)
    """What finding out how the loss depends on the batch takes for each sample that it is evaluated on: in a plain
    model, and where a loss keeps no logits."""
    fewest_asked: int = 1
    """Samples that it is evaluated on at least."""
    noted_bytes: int = 0
    """What recovery notes of a batch's start, which is in no prediction."""
    overhead: float = OVERHEAD
    """The part of a plain step's time that goes into starting operations."""
    tiled: Tiled = NOT_TILED
    """Modules that may run in tiles of samples, where microbatches cannot be had without another result."""
    find_positions: Callable[[], Tiled] = Tiled
    """Finds modules that may run in tiles of positions; asked where nothing else fits."""
    has_wide_head: bool = False
    """Whether the model ends in so many classes that a loss had better not keep logits of them."""
    num_blocks: int = MANY_BLOCKS
    """Number of blocks that the model repeats."""
    can_bound_noise: bool = False
    """Whether codecs of activations can be chosen for a bound of a gradient's noise."""

    def asking_of(self, settings: Sequence[Option] | Sequence[Config]) -> int:
        """Return what finding out how the loss depends on the batch takes in a run with these settings, on CPU.

        That needs a number of samples at once, however few a microbatch has.
        """
        configs = [each.config if isinstance(each, Option) else each for each in settings]
        size = next((each.size for each in configs if isinstance(each, Microbatching)), None)
        if not isinstance(size, int) or self.device_type != "cpu":
            return 0
        keeps_none = any(HEAD in each.written_out for each in configs if isinstance(each, ActivationCompression))
        return min(self.num_samples or size, max(size, self.fewest_asked)) * self.asking_bytes[keeps_none]


def make_plan(
    budget: Budget,
    recipe: Recipe,
    situation: Situation,
    plain: Prediction,
    predict: Predict,
    confirm: Predict | None = None,
    watch: SearchWatch | None = None,
) -> Plan:
    """Return the cheapest settings with which a step fits.

    Args:
        budget: what it has to fit into.
        recipe: what may be used (`search_space.TIERS`; any other name as `"lossless"`). What was set, or switched off,
            stays as it is; the rest is open.
        situation: model, batch and device.
        plain: the step without any technique.
        predict: predicts a step under Configs; raises `ValueError` where they cannot be used.
        confirm: the same with more certainty and at a higher price, asked about the choice only; a choice that takes
            more, or whose regions cannot meet their budget, is replaced.
        watch: is told of predictions, and may end the search; then the best plan so far is taken.

    Raises:
        ValueError: nothing that the recipe allows fits: the smallest peak, what dominates it, and what other recipes
            would come to.
    """
    budget_bytes = budget.in_bytes(needed_bytes(plain), situation.device_bytes)
    sizes = budget_bytes, needed_bytes(plain)
    fixed = [t for t in recipe.techniques if not _is_open(recipe, t)]

    table = _open_dimensions(sizes, recipe, situation, recipe.name)
    search = Search(table, predict, fixed, situation.ways, watch=watch, asking=situation.asking_of)
    room = budget_bytes - situation.noted_bytes
    found, smallest = _fit_closely(search, room, confirm)
    # The first takes a test of its own, for which there is no time when it is late.
    for last_resort in (_host_memory,) if search.is_late else (_tiles_of_positions, _host_memory):
        if found is None and table.keys() & (more := last_resort(situation, table)):  # beside what takes least so far
            least = dict(zip(table, search.lowest() if smallest is None else smallest.choice, strict=True))
            beside = {kind: [option for option in more.get(kind, ()) if option != least[kind]] for kind in table}
            search = search.among({kind: (least[kind], *others) for kind, others in beside.items()})
            found, smallest = _fit_closely(search, room, confirm)
    if found is None:
        raise _infeasible(budget, sizes, recipe, situation, search, smallest)
    return _plan(budget, budget_bytes, recipe, situation, plain, search, found, table)


def _tiles_of_positions(
    situation: Situation, table: Mapping[type[Config], Dimension]
) -> Mapping[type[Config], Dimension]:
    """Return tiles, and regions of blocks: with tiles inside, these take less than planned ones."""
    if situation.tiled.modules or Tiling not in table or not (tiled := situation.find_positions()).modules:
        return {}
    blocks = (option for option in table.get(Checkpointing, ()) if option.config in (None, Checkpointing()))
    return {Tiling: tuple(tiles(tiled, situation.overhead)), Checkpointing: tuple(blocks)}


def _host_memory(situation: Situation, table: Mapping[type[Config], Dimension]) -> Mapping[type[Config], Dimension]:
    """Return what keeps optimizer state and inputs of regions in host memory, where the device has its own."""
    return in_host_memory() if situation.device_type == "cuda" else {}


def _open_dimensions(
    sizes: tuple[int, int], recipe: Recipe, situation: Situation, tier: str
) -> dict[type[Config], Dimension]:
    """Return what a tier may choose from besides what the recipe has fixed."""
    activations = recipe.get(ActivationCompression)
    own = activations if activations is not None and activations.max_gradient_noise is not None else None
    table = dimensions(
        *sizes,
        tier=tier if tier in TIERS else TIERS[0],
        num_samples=situation.num_samples,
        is_cut_exact=situation.is_cut_exact,
        device_type=situation.device_type,
        overhead=situation.overhead,
        num_blocks=situation.num_blocks,
        has_wide_head=situation.has_wide_head,
        tiled=situation.tiled,
        noise_bounds=noise_bounds(own) if situation.can_bound_noise else (),
        own=own,
    )
    taken = {type(t) for t in recipe.techniques if not _is_open(recipe, t)} | set(recipe.switched_off)
    left: dict[type[Config], Dimension] = {kind: dimension for kind, dimension in table.items() if kind not in taken}
    if (parts := recipe.get(Microbatching)) is not None and Microbatching in left:
        left[Microbatching] = tuple(_like(option, parts) for option in left[Microbatching])
    return left


MAX_NOISE = 0.2
"""Bound of a gradient's noise where the user has set none: about that of 4 bits everywhere."""
_LOWER_NOISE = (0.01, 0.05)


def noise_bounds(own: ActivationCompression | None) -> tuple[float, ...]:
    """Return bounds of a gradient's noise to choose codecs for, up to the user's.

    >>> noise_bounds(None), noise_bounds(ActivationCompression(codecs=("int8",), max_gradient_noise=0.02))
    ((0.01, 0.05, 0.2), (0.01, 0.02))
    """
    highest = MAX_NOISE if own is None else own.max_gradient_noise or MAX_NOISE
    return (*(bound for bound in _LOWER_NOISE if bound < highest), highest)


def _is_open(recipe: Recipe, config: Config) -> bool:
    """Return whether a planner may choose this setting.

    A default of a dimension, microbatches whose size is open, or activations whose codecs are.
    """
    if isinstance(config, Microbatching):
        return config.size == "auto"
    if isinstance(config, ActivationCompression) and config.max_gradient_noise is not None:
        return True
    return type(config) in recipe.by_default and technique_of(config).slot is not None


def _like(option: Option, own: Microbatching) -> Option:
    """Return the option with the user's weights and ways of cutting, where it is one of microbatches."""
    if not isinstance(option.config, Microbatching):
        return option
    assert option.config.size != "auto", "the search space holds sizes only"
    return dataclasses.replace(option, config=own.of_size(option.config.size))


class _Confirmed:
    """Predictions with more certainty, each made once.

    `None` where regions cannot meet their budget; the search is told of that.
    """

    def __init__(self, search: Search, confirm: Predict) -> None:
        self._search, self._confirm = search, confirm
        self._known: dict[str, Prediction] = {}

    def __call__(self, choice: Choice) -> Prediction | None:
        if (known := self._known.get(key := describe(choice))) is not None:
            return known
        try:
            return self._known.setdefault(key, self._confirm(self._search.techniques(choice)))
        except BudgetTooSmallError as error:
            if Checkpointing in self._search.fixed_kinds:  # it is the user's
                raise
            self._search.refuse(choice, error)
            return None


def _fit_closely(search: Search, room_bytes: int, confirm: Predict | None) -> tuple[Found | None, Found | None]:
    """Return what `_fit` does; to the byte where it finds nothing that leaves a little."""
    confirmed = None if confirm is None else _Confirmed(search, confirm)
    found, smallest = _fit(search, room_bytes - room_bytes // _MARGIN, confirmed)
    return (found, smallest) if found is not None else _fit(search, room_bytes, confirmed)


def _fit(search: Search, budget_bytes: int, confirmed: _Confirmed | None) -> tuple[Found | None, Found | None]:
    """Return the choice, as confirmed; without one, the smallest that there is."""
    limit, found = budget_bytes, search.cheapest(budget_bytes)
    if confirmed is None:
        return found, None
    for _ in range(_MAX_CONFIRMATIONS):
        if found is None:
            break
        if (real := confirmed(found.choice)) is not None:
            over = needed_bytes(real) - budget_bytes
            if over <= 0:
                return _fastest(search, _as_confirmed(search, found, real), budget_bytes, confirmed), None
            limit = min(limit, needed_bytes(found.prediction)) - over
        found = search.cheapest(limit) if limit > 0 else None
    for _ in range(_MAX_CONFIRMATIONS):
        smallest = search.lowest()
        if (real := confirmed(smallest)) is not None:
            beyond = _beyond(real, search.predict(smallest))
            last = Found(smallest, real, budget_bytes, search.why_ended, beyond)
            return (last, None) if needed_bytes(real) <= budget_bytes else (None, last)
    return None, None


def _as_confirmed(search: Search, found: Found, real: Prediction) -> Found:
    predicted = search.predict(found.choice)
    prediction, beyond = real if predicted is None else _with_flags(real, predicted), _beyond(real, predicted)
    return dataclasses.replace(found, prediction=prediction, beyond_bytes=beyond)


def _fastest(search: Search, found: Found, budget_bytes: int, confirmed: _Confirmed) -> Found:
    """Return the faster one of what was confirmed and its rival, where steps are timed and time is left."""
    if not found.prediction.measured_seconds < _SHORT_SECONDS or search.is_late:
        return found
    rival = search.rival(found.choice, found.limit_bytes)
    real = None if rival is None else confirmed(rival)
    if rival is None or real is None or needed_bytes(real) > budget_bytes:
        return found
    if (1 + SCATTER) * real.measured_seconds >= found.prediction.measured_seconds:
        return found
    return _as_confirmed(search, dataclasses.replace(found, choice=rival), real)


def _beyond(real: Prediction, predicted: Prediction | None) -> int:
    return 0 if predicted is None else needed_bytes(real) - needed_bytes(predicted)


def _with_flags(real: Prediction, predicted: Prediction) -> Prediction:
    return dataclasses.replace(real, flags=(*predicted.flags, *real.flags))


# ---------------------------------------------------------------------------------------------------- a plan
def _plan(
    budget: Budget,
    budget_bytes: int,
    recipe: Recipe,
    situation: Situation,
    plain: Prediction,
    search: Search,
    found: Found,
    table: Mapping[type[Config], Dimension],
) -> Plan:
    prediction, workspace_bytes = found.prediction, found.prediction.workspace_bytes + situation.noted_bytes
    free_bytes = budget_bytes - needed_bytes(prediction) - situation.noted_bytes
    nothing = tuple(dimension[0] for dimension in table.values())  # what was taken last is searched beside the rest
    steps = _steps(search, found, budget_bytes, nothing)
    flags = [flag for flag in dict.fromkeys((situation.why_whole, *plain.flags, *prediction.flags)) if flag]
    if found.why_ended:
        flags.append(f"the search ended {found.why_ended}: there may be a cheaper plan")
    return Plan(
        recipe=recipe.name,
        techniques=_techniques(search, found, recipe, situation, budget_bytes),
        budget=budget.text,
        budget_bytes=budget_bytes,
        meaning=MEANINGS.get(situation.device_type, MEANINGS["other"]),
        baseline_bytes=needed_bytes(plain),
        baseline_by_category=dict(plain.by_category),
        peak_bytes=prediction.peak_bytes,
        by_category=dict(prediction.by_category),
        workspace_bytes=workspace_bytes,
        steps=steps,
        next_step=_next_step(search, found, free_bytes),
        measured_time_factor=_measured_time_factor(plain, prediction),
        source=prediction.source,
        flags=tuple(flags),
        num_predictions=search.num_predictions + 1,
    )


def _measured_time_factor(plain: Prediction, planned: Prediction) -> float | None:
    if not (plain.is_timed and planned.is_timed) or plain.seconds is None or planned.seconds is None:
        return None
    return planned.seconds / plain.seconds


def _steps(search: Search, found: Found, budget_bytes: int, nothing: Choice) -> tuple[PlanStep, ...]:
    steps = []
    for number, option in enumerate(found.choice):
        if option.config is None:
            continue
        without = search.predict((*found.choice[:number], nothing[number], *found.choice[number + 1 :]))
        if without is None:
            reason, saves = "the others need it, or nothing more was predicted", None
        else:
            takes = needed_bytes(without)
            saves = takes + found.beyond_bytes - needed_bytes(found.prediction)  # of predictions of one kind
            fits = "above the budget" if takes > budget_bytes else "too close to the budget"
            fits = fits if takes > found.limit_bytes else "which fits as well"
            reason = f"without it the step would take {format_bytes(takes)}, {fits}"
        steps.append(
            PlanStep(
                technique=technique_of(option.config).stem,
                setting=option.text,
                saves_bytes=saves,
                time_factor=option.time_factor,
                loss_class=option.loss_class,
                reason=reason,
            )
        )
    return tuple(steps)


def _next_step(search: Search, found: Found, free_bytes: int) -> str:
    free = f"the plan leaves {format_bytes(free_bytes)} of its budget free"
    left = [o for o in search.stronger_options(found.choice) if o.config is not None]
    later = [o for o in left if o.level > max(c.level for c in found.choice)] or left
    if not later:
        return f"nothing is left to be taken; {free}"
    for option in sorted(later, key=lambda o: (o.level, o.time_factor)):  # by bounds: a sentence is worth no prediction
        if search.may_lower(found.choice, option):
            return f"{option.text} ({option.loss_class}, time about x{option.time_factor:.2f}) may take less: {free}"
    return f"nothing that is left would take less; {free}"


def _techniques(
    search: Search, found: Found, recipe: Recipe, situation: Situation, budget_bytes: int
) -> tuple[Config, ...]:
    """Return the choice, with microbatches that shrink where a measured step goes beyond the budget.

    That needs recovery: it steps aside where training does not allow it, or where it would cost something.
    """
    techniques = search.techniques(found.choice)
    chosen = next((t for t in techniques if isinstance(t, Microbatching)), None)
    is_fixed = chosen is not None and Microbatching in search.fixed_kinds
    releases = any(isinstance(t, OptimizerState) and t.gradients == "release" for t in techniques)
    if is_fixed or releases or Microbatching in recipe.switched_off:
        return techniques
    own = recipe.get(Microbatching) or Microbatching()
    watched = dataclasses.replace(
        own,
        size="auto",
        start=chosen.size if chosen is not None and chosen.size != "auto" else None,
        max_bytes=max(1, budget_bytes - found.prediction.workspace_bytes - situation.noted_bytes),
        growth_interval=None,
        goal="fit",
        keeps_gradients=False,  # a copy that no prediction has
    )
    others = tuple(t for t in techniques if t is not chosen)
    return in_order((*others, watched)) if _is_free(watched, others, situation.ways) else techniques


def _is_free(config: Config, others: Sequence[Config], ways: Sequence[str]) -> bool:
    rows = [*Recipe("planned", (config, *others)).rows(), *ways]
    try:
        check_compatibility(rows)
    except ValueError:
        return False
    return not costs_of(rows)


# ---------------------------------------------------------------------------------------------------- no plan
_MOST_OFFERED = 16
"""Predictions that tell what another recipe would come to; most of what there is to gain is in the first few."""


def _infeasible(
    budget: Budget,
    sizes: tuple[int, int],
    recipe: Recipe,
    situation: Situation,
    search: Search,
    smallest: Found | None,
) -> ValueError:
    """Return the error that names the smallest peak, what dominates it, and what the later recipes come to.

    The last of them first: where that is too much, so are those before it, and they are not searched.
    """
    choice = smallest.choice if smallest is not None else search.lowest()
    prediction = smallest.prediction if smallest is not None else search.predict(choice)
    if prediction is None:
        why = search.refusals.get(describe(choice), "Set techniques by hand.")
        return setting_error("budget", "cannot be planned: no setting can be predicted", budget.text, why)
    lowest = needed_bytes(prediction) + situation.noted_bytes
    category = max(prediction.by_category, key=lambda name: prediction.by_category[name], default="activations")
    share = prediction.by_category.get(category, 0) / max(1, lowest)
    beyond = _BEYOND[category]
    if category == "temporary" and 2 * prediction.by_category.get("weights", 0) > prediction.by_category[category]:
        beyond += ", or an optimizer with `foreach=False`"  # whose temporaries are as large as the weights
    offers: list[str] = []
    later = TIERS[TIERS.index(recipe.name) + 1 if recipe.name in TIERS else 1 :]
    is_late = False
    for tier in reversed(later):
        if is_late := search.is_late:
            break
        other = search.among(_open_dimensions(sizes, recipe, situation, tier), _MOST_OFFERED)
        peak = other.peak(other.lowest(sizes[0] - situation.noted_bytes)) + situation.noted_bytes
        if peak < lowest:
            size = format_bytes(int(peak))
            tried = f" as far as {_MOST_OFFERED} predictions tell" if other.is_exhausted else ""
            words = f"fits, with {size} or less" if peak <= sizes[0] else f"reaches {size}, too much as well{tried}"
            offers.insert(0, f'"{tier}" {words}')
        if peak > sizes[0]:
            break
    others = f"Of the other recipes {'; '.join(offers)}." if offers else "" if is_late else "No recipe reaches less."
    if is_late:
        others += " Not every recipe was tried: planning has taken its time (`planning_seconds`)."
    if search.is_exhausted:
        others += f" The search ended {search.why_ended}: there may be a smaller one."
    kernels = f" ({format_bytes(prediction.workspace_bytes)} of it in kernels)" if prediction.workspace_bytes else ""
    return setting_error(
        "budget",
        f'must be at least {format_bytes(lowest)} ({lowest} bytes) for this step under "{recipe.name}", which '
        + (f"{text} would come to" if (text := describe(choice)) != "nothing" else "it takes without any technique")
        + kernels,
        budget.text,
        f"It stands for {format_bytes(sizes[0])}. What is left is {category} for {share:.0%}: {beyond} would lower it. "
        f"{others.lstrip()} {situation.why_whole}".rstrip(),
    )
