"""Recipes: named, ordered lists of technique settings, and how slots change them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from lightning_memsave.core.compatibility import check_compatibility, costs_of
from lightning_memsave.core.errors import setting_error
from lightning_memsave.saved_tensors.codec_names import HEAD
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.optimizer_state.state_config import SHORTHANDS
from lightning_memsave.techniques.registry import TECHNIQUES, Config, technique_of
from lightning_memsave.techniques.sparsity import Sparsity

C = TypeVar("C", bound=Config)
_LONGEST_VALUE = 40  # characters of a setting in the name of a recipe


@dataclass(frozen=True)
class Recipe:
    """An ordered list of technique settings.

    Raises:
        ValueError: a technique appears twice, or two of them cannot be combined.
    """

    name: str
    techniques: tuple[Config, ...] = ()
    switched_off: tuple[type[Config], ...] = ()
    """What the user does not want, so that recovery does not take it up."""
    by_default: tuple[type[Config], ...] = ()
    """What nobody has asked for by name: it steps aside where it cannot work, instead of an error."""

    def __post_init__(self) -> None:
        stems = [technique_of(config).stem for config in self.techniques]
        if len(set(stems)) < len(stems):
            raise setting_error("recipe", "must name each technique once", stems, "Remove one of the two.")
        check_compatibility(self.rows())

    def get(self, kind: type[C]) -> C | None:
        """Return the settings of one technique, or `None` when it is off."""
        return next((config for config in self.techniques if isinstance(config, kind)), None)

    def leaves_open(self, kind: type[Config]) -> bool:
        """Return whether a technique is neither on nor switched off."""
        return self.get(kind) is None and kind not in self.switched_off

    def stepping_aside(self, ways: Sequence[str]) -> tuple[Recipe, list[str]]:
        """Return the recipe without the defaults that do not work in these ways of training, and why each is left out.

        Planned microbatches keep their size; only their recovery is left out.
        """
        kept: list[Config] = []
        reasons: list[str] = []
        for config in self.techniques:
            if type(config) in self.by_default and (why_not := _why_not(config, ways)):
                reasons.append(why_not)
                if isinstance(config, Microbatching) and config.start is not None:
                    kept.append(config.of_size(config.start))
            else:
                kept.append(config)
        return replace(self, techniques=tuple(kept)), reasons

    def without(self, kind: type[object]) -> Recipe:
        """Return the recipe without one technique."""
        return replace(self, techniques=tuple(t for t in self.techniques if type(t) is not kind))

    def with_settings(self, config: Config) -> Recipe:
        """Return the recipe with other settings of a technique that is on."""
        return replace(self, techniques=tuple(config if type(t) is type(config) else t for t in self.techniques))

    def stems(self) -> tuple[str, ...]:
        """Return the names of what is on."""
        return tuple(technique_of(config).stem for config in self.techniques)

    def rows(self) -> tuple[str, ...]:
        """Return what the compatibility table knows of it.

        The names of what is on, and settings with rows of their own.
        """
        return tuple(row for config in self.techniques for row in _rows(config))

    def fixed_rows(self) -> tuple[str, ...]:
        """Return those of `rows` that do not step aside for anything."""
        return tuple(row for config in self.techniques if type(config) not in self.by_default for row in _rows(config))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for loggers and checkpoints; functions and classes by name.

        `recipe` has what was set besides the recipe's own choice, as arguments of `MemSave`.

        >>> resolve("lossless", {"checkpointing": "blocks", "microbatch": False}).as_dict()["recipe"]
        'lossless, microbatch=False, checkpointing=blocks'
        >>> Recipe("mine", (EarlyZeroGrad(),)).as_dict()
        {'recipe': 'mine', 'early_zero_grad': {}}
        """
        given = [self.name]
        for technique in TECHNIQUES:
            config = self.get(technique.config)
            if technique.slot and technique.config in self.switched_off:
                given.append(f"{technique.slot}=False")
            elif technique.slot and config is not None and technique.config not in self.by_default:
                given.append(f"{technique.slot}={_as_written(config)}")
        settings = {technique_of(config).stem: _plain(asdict(config)) for config in self.techniques}
        return {"recipe": ", ".join(given), **settings}


def _rows(config: Config) -> tuple[str, ...]:
    return technique_of(config).stem, *getattr(config, "rows", ())


def _why_not(config: Config, ways: Sequence[str]) -> str | None:
    """Return why a default is left out in these ways of training, or beside these settings."""
    names = [*_rows(config), *ways]
    try:
        check_compatibility(names)
    except ValueError as error:
        return str(error)
    return next(iter(costs_of(names)), None)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return getattr(value, "__qualname__", repr(value))


def _as_written(config: Config) -> str:
    """Return the shorthand of settings where they have one, else what differs from their defaults.

    >>> _as_written(Microbatching(size=10)), _as_written(Microbatching(size=10, strict=True))
    ('10', 'Microbatching(size=10, strict=True)')
    >>> _as_written(ActivationCompression(codecs=("exact", "int4"))), _as_written(OptimizerState(first_moment="4bit"))
    ('[exact, int4]', '4bit')
    """
    shorthand, plain = technique_of(config).shorthand, vars(type(config)())
    for value in (*vars(config).values(), *SHORTHANDS):
        with suppress(ValueError, TypeError):  # not every value is one
            if shorthand is not None and not isinstance(value, bool) and shorthand(value) == config:
                return _in_words(value)
    given = {name: value for name, value in vars(config).items() if value is not None and value != plain[name]}
    return f"{type(config).__name__}({', '.join(f'{name}={_in_words(value)}' for name, value in given.items())})"


def _in_words(value: Any) -> str:
    words = [value] if not isinstance(value, (tuple, list)) else value
    text = ", ".join(str(_plain(each)) for each in words)
    text = text if len(words) == 1 else f"[{text}]"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _of_defaults(name: str, *techniques: Config) -> Recipe:
    return Recipe(name, techniques, by_default=tuple(map(type, techniques)))


RECIPES = {
    # Change nothing: the baseline run.
    "measure": Recipe("measure"),
    # Equal to plain Lightning up to rounding, and nearly free of cost until memory runs out.
    "lossless": _of_defaults("lossless", EarlyZeroGrad(), Microbatching()),
    # Equal to plain Lightning up to rounding: blocks are run again in backward, which takes time at once.
    "exact": _of_defaults(
        "exact",
        EarlyZeroGrad(),
        Microbatching(),
        ActivationCompression(codecs=(HEAD,)),
        Checkpointing(method="blocks"),
    ),
    # Small noise everywhere: activations in 4 bits, weights of 24 bits under autocast, moments of 8 bits.
    "balanced": _of_defaults(
        "balanced",
        EarlyZeroGrad(),
        LowPrecision(format="bf16+8"),
        Microbatching(),
        ActivationCompression(codecs=("exact", HEAD, "int4-chain")),
        OptimizerState(first_moment="8bit"),
    ),
    # The smallest peak: nine weights of ten are zero, the others in bfloat16, and microbatches as small as helps.
    "extreme": _of_defaults(
        "extreme",
        EarlyZeroGrad(),
        Sparsity(sparsity=0.9),
        LowPrecision(format="bf16-sr"),
        Microbatching(goal="smallest"),
        ActivationCompression(codecs=("exact", HEAD, "int4-chain")),
        OptimizerState(first_moment="4bit"),
    ),
}


def resolve(recipe: str | Recipe, slots: Mapping[str, object]) -> Recipe:
    """Return a recipe with the slots of `MemSave` applied.

    `None` keeps the recipe's choice, `False` removes a technique, a shorthand or a Config adds or replaces it.

    Raises:
        ValueError: an unknown recipe, or whatever a technique refuses.

    >>> resolve("lossless", {"microbatch": 10}).stems()
    ('early_zero_grad', 'microbatching')
    """
    if not isinstance(recipe, Recipe):
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise setting_error(
                "recipe",
                f"must be one of {', '.join(map(repr, RECIPES))} or a `Recipe`",
                recipe,
                'The default is "lossless".',
            )
        recipe = RECIPES[recipe]
    chosen: list[Config] = []
    left_out = [t.config for t in TECHNIQUES if t.slot and slots.get(t.slot) is False]
    for technique in TECHNIQUES:
        value = slots.get(technique.slot) if technique.slot else None
        if value is None:
            chosen.extend(config for config in recipe.techniques if isinstance(config, technique.config))
        elif isinstance(value, technique.config):
            chosen.append(value)
        elif value is not False:
            assert technique.shorthand is not None, "what has a slot has a shorthand"
            chosen.append(technique.shorthand(value))
    asked_for = {t.config for t in TECHNIQUES if t.slot and slots.get(t.slot) is not None}
    switched_off = (*left_out, *(config for config in recipe.switched_off if config not in asked_for))
    by_default = tuple(config for config in recipe.by_default if config not in asked_for)
    others = tuple(row for config in chosen if type(config) not in by_default for row in _rows(config))
    kept = [config for config in chosen if type(config) not in by_default or _why_not(config, others) is None]
    return Recipe(recipe.name, tuple(kept), switched_off, by_default)
