"""Settings of runs, as their loggers have them: which of them were set, where they differ, what a run is called."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_memsave.measuring.meter import Meter
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.techniques.registry import TECHNIQUES

_PLAN = "memsave.plan"  # as JSON, of all that stands in the other settings


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield each setting with its value in words; those that are `None` are left out.

    >>> dict(flat({"memsave": {"microbatching": {"size": 10, "start": None}}, "betas": (0.9, 0.99)}))
    {'memsave.microbatching.size': '10', 'betas': '[0.9, 0.99]'}
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, default=str)


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return settings that are not the same in all runs; of techniques, those that somebody has set."""
    given = [dict(flat(config)) for config in configs]
    names = dict.fromkeys(name for settings in given for name in settings if name != _PLAN)
    found = {name: tuple(settings.get(name, "") for settings in given) for name in names}
    return {
        name: values
        for name, values in found.items()
        if len(set(values)) > 1 and not {*values} <= {"", _defaults().get(name, "")}
    }


def without_seeds(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what repetitions of a run have in common."""
    return tuple(sorted(each for each in flat(config) if "seed" not in re.split("[._/-]", each[0])))


def changes_nothing(config: Mapping[str, Any]) -> bool:
    """Return whether a run was measured without any technique: `MemSave("measure")`, `MemoryMonitor`.

    >>> changes_nothing({"memsave": {"recipe": "measure", "every": 200}}), changes_nothing({"lr": 0.1})
    (True, False)
    """
    memsave = config.get("memsave")
    return isinstance(memsave, Mapping) and not any(isinstance(each, Mapping) for each in memsave.values())


def name_of(config: Mapping[str, Any], is_measured: bool) -> str | None:
    """Return what a run without a name is called: what was set; `None` where that is not known.

    >>> name_of({"memsave": {"recipe": "lossless, microbatch=10", "microbatching": {"size": 10}}}, is_measured=True)
    'microbatch=10'
    >>> name_of({}, is_measured=False), name_of({}, is_measured=True)
    ('plain', None)
    """
    if changes_nothing(config):
        return "plain"
    memsave = config.get("memsave")
    if isinstance(memsave, Mapping) and memsave.get("recipe"):
        return str(memsave["recipe"]).removeprefix("lossless, ")
    return None if is_measured else "plain"


@functools.cache
def _defaults() -> dict[str, str]:
    found = {"every": inspect.signature(Meter).parameters["every"].default}
    found |= {t.stem: Recipe("", (t.config(),)).as_dict()[t.stem] for t in TECHNIQUES}
    return dict(flat({"memsave": found}))
