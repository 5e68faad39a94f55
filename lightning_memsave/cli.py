"""The commands: call, print. Their arguments are read in `lightning_memsave_cli`, which imports nothing heavy."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_memsave.core.errors import setting_error


def run(command: str, options: dict[str, Any]) -> int:
    """Run a command, with what `lightning_memsave_cli` has read for it; returns the exit status."""
    commands: dict[str, Callable[..., int | None]] = {
        "demo": _demo,
        "compare": _compare,
        "dashboard": _dashboard,
        "verify": _verify,
        "plan": _plan,
    }
    try:
        with _current_folder():  # whatever is called there may import from it
            return commands[command](**options) or 0
    except (ModuleNotFoundError, ValueError) as error:  # the first is of a module of the user's
        print(f"error: {error}", file=sys.stderr)
        return 2


def _demo(**options: Any) -> None:
    from lightning_memsave.demo.run import DemoConfig, run_demo  # slow: torch and Lightning

    run_demo(DemoConfig(**options))


def _compare(runs: Sequence[Path], out: Path | None, metric: str | None, better: str | None, json: bool) -> None:
    from rich.console import Console

    from lightning_memsave.reporting.comparison import compare
    from lightning_memsave.reporting.console import print_comparison, print_settings
    from lightning_memsave.reporting.page import write_page
    from lightning_memsave.reporting.runs import read_runs

    comparison = compare(read_runs(runs), metric, better)
    if json:
        print(comparison.to_json())
    else:
        print_comparison(comparison, Console())
        print_settings(comparison, Console())
    if out is not None:
        write_page(comparison, out, "Memory and quality of runs")
        print(f"Page: {out.resolve()}", file=sys.stderr)


def _dashboard(target: str, metric: str | None, json: Path | None) -> None:
    from lightning_memsave.reporting.dashboard import build_workspace, save_workspace, write_workspace

    workspace = build_workspace(target, metric)
    if json is not None:
        print(f"Workspace: {write_workspace(workspace, json).resolve()}")
    else:
        print(f"Workspace: {save_workspace(workspace)}")


def _verify(module: str, batch: str, seed: int, recipe: str, **slots: Any) -> int:
    from rich.console import Console

    from lightning_memsave.api import verify
    from lightning_memsave.callbacks import MemSave
    from lightning_memsave.reporting.console import print_verification

    first, data_module = _first_batch(_named(batch))
    memsave = MemSave(recipe, **_values(slots))
    result = verify(_made(_named(module)), first, memsave, seed=seed, data_module=data_module)
    print_verification(result, Console())
    return 0 if result.holds else 1


_PLANNED_FOR: dict[str, tuple[Any, ...]] = {
    "target": ("cpu",),
    "precision": (32, "32", "32-true"),
    "accumulate_grad_batches": (1,),
    "gradient_clip_val": (0,),
}
"""What a plan without a run is for: arguments of `Trainer`, and where it would run."""


def _plan(
    module: str | None,
    batch: str | None,
    config: Path | None,
    recipe: str | None,
    budget: str | None,
    trainer_precision: str | None,
    strategy: str | None,
    devices: int | None,
    num_nodes: int | None,
    target: Any,
    device_memory: str | None,
    largest: str | None,
    json: bool,
    figure: Path | None,
    **slots: Any,
) -> int:
    import json as json_module

    from rich.console import Console

    from lightning_memsave.core.units import parse_bytes
    from lightning_memsave.planner.recipes import RECIPES
    from lightning_memsave.prediction.predictor import Predictor, largest_batch, largest_value
    from lightning_memsave.reporting.prediction_page import print_prediction, write_figure

    device_bytes = None if device_memory is None else parse_bytes("--device-memory", device_memory)
    if largest is not None and device_bytes is None:
        raise setting_error("--largest", "needs --device-memory", largest, "For example `--device-memory 8GiB`.")
    given = {"precision": trainer_precision, "strategy": strategy, "devices": devices, "num_nodes": num_nodes}
    given = {"target": target, **{name: value for name, value in given.items() if value is not None}}
    slots = {"budget": budget, **_values(slots)}
    model, samples, first, settings, techniques, budget_bytes = _subject(module, batch, config, recipe, slots, given)
    predictor = Predictor(model, first, **settings)
    prediction = predictor(techniques)
    plain = None if techniques.techniques in ((), RECIPES["lossless"].techniques) else predictor()
    fits = None if device_bytes is None else prediction.fits(device_bytes)
    data = {**prediction.as_dict(), "device_bytes": device_bytes, "fits": fits}
    if plain is not None:
        data["plain"] = plain.as_dict()
    if largest is not None and device_bytes is not None:
        data[f"largest_{largest}"] = (
            largest_batch(predictor, device_bytes, techniques)
            if largest == "batch"
            else largest_value(largest, model, _maker(samples), device_bytes, techniques, **settings)
        )
    if json:
        print(json_module.dumps(data))
    else:
        if largest is not None:
            unit = " samples" if largest == "batch" else ""
            print(f"largest {largest} that fits: {data[f'largest_{largest}']}{unit}")
        print_prediction(prediction, Console(), device_bytes, plain=plain, budget_bytes=budget_bytes)
    if figure is not None:
        written = write_figure(prediction, figure, plain=plain, budget_bytes=budget_bytes)
        print(f"Figure: {written.resolve()}", file=sys.stderr)
    return 1 if device_bytes is not None and fits is not True else 0


def _subject(
    module: str | None,
    batch: str | None,
    config: Path | None,
    recipe: str | None,
    slots: dict[str, Any],
    given: dict[str, Any],
) -> tuple[Any, Any, Any, dict[str, Any], Any, int | None]:
    """Return the model or what makes it, the same of the batch, a batch, settings, what is switched on, and a budget.

    The settings are those of the predictor: arguments of `Trainer`, and the data module.
    """
    from lightning_memsave.api import plan_training
    from lightning_memsave.callbacks import MemSave
    from lightning_memsave.prediction.simulated_process_group import num_processes_of

    model, samples = (None if name is None else _named(name) for name in (module, batch))
    settings: dict[str, Any] = {}
    memsave = None
    if config is not None:
        from lightning_memsave.api.cli_config import read_config

        configured = read_config(config, model, with_data=samples is None)
        model, settings, memsave = configured.module, configured.trainer, configured.memsave
        if samples is None:
            samples, settings["data_module"] = configured.batch, configured.data_module
    for name, found in (("MODULE:CLASS", model), ("--batch", samples)):
        if found is None:
            raise setting_error(name, "must be given", None, "Name one, or a `--config` that has it.")
    settings |= given
    first, data_module = _first_batch(samples)
    settings.setdefault("data_module", data_module)
    memsave = MemSave(recipe or "lossless", **slots) if memsave is None or recipe else _besides(memsave, slots)
    if memsave.noise_bounded is not None:
        return model, samples, first, settings, memsave.noise_bounded.recipe_for(_made(model), first), None
    if memsave.budgeted is None:
        return model, samples, first, settings, memsave.recipe, None
    for name, plain in _PLANNED_FOR.items():
        if (value := settings.get(name)) is not None and value not in plain:
            rule = f"is planned here for a CPU in the module's own precision, not with another {name}"
            remedy = "Start the run with `MemSave(budget=...)`, which plans for itself, or leave this out."
            raise setting_error("budget", rule, f"{name}={value!r}", remedy)
    if (num := num_processes_of(settings)) > 1:
        remedy = "The run plans for all of them itself: start it, or name techniques instead of a budget."
        raise setting_error("devices", "must be 1 where a budget is to be planned before the run", num, remedy)
    plan = plan_training(_made(model), first, memsave)
    print(plan, file=sys.stderr)
    return model, samples, first, settings, plan.as_recipe(), plan.budget_bytes


def _besides(memsave: Any, slots: dict[str, Any]) -> Any:
    """Return what a file has set, and what is set besides."""
    if all(value is None for value in slots.values()):
        return memsave
    if (own := memsave.budgeted) is not None:
        slots = {**slots, "budget": slots["budget"] or own.budget_text, "planning_seconds": own.seconds}
    return type(memsave)(memsave.recipe, **slots)


def _made(found: Any) -> Any:
    """Return the value, called if it can be."""
    from torch import nn

    return found() if callable(found) and not isinstance(found, nn.Module) else found


def _first_batch(found: Any) -> tuple[Any, Any]:
    """Return a batch: the value, or the first of a loader or of a LightningDataModule, which comes second."""
    from torch import nn
    from torch.utils.data import DataLoader

    from lightning_memsave.api.cli_config import first_batch

    made = _made(found)
    if hasattr(made, "train_dataloader") and not isinstance(made, nn.Module):  # of either Lightning
        return first_batch(made), made
    return next(iter(made)) if isinstance(made, DataLoader) else made, None


def _maker(found: Any) -> Any:
    """Return what makes a batch, with the arguments of `found`; the batch itself where nothing makes it."""
    if not callable(found):
        return _first_batch(found)[0]

    @functools.wraps(found)
    def make(*args: Any, **kwargs: Any) -> Any:
        return _first_batch(found(*args, **kwargs))[0]

    return make


def _named(name: str) -> Any:
    """Return what `package.module:name` names."""
    where, _, attribute = name.partition(":")
    try:
        return getattr(import_module(where), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise setting_error(
            "MODULE:NAME", "must name what can be imported, as `package.module:name`", name, str(error)
        ) from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules of the current folder be imported, as `python -m` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _values(slots: dict[str, str | None]) -> dict[str, Any]:
    return {name: None if text is None else _value(text) for name, text in slots.items()}


def _value(text: str) -> Any:
    """Return a number, a name, names with commas, true or false, as a slot of `MemSave` takes it.

    >>> _value("8"), _value("0.9"), _value("int4"), _value("exact,int4"), _value("false")
    (8, 0.9, 'int4', ['exact', 'int4'], False)
    """
    if "," in text:
        return [name.strip() for name in text.split(",")]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
