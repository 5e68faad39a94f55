"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_memsave.core.errors import setting_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `lightning-memsave`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lightning-memsave", description="Train in a fraction of the memory.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train WideResNet-28-2 with and without memory saving, and compare")
    demo.add_argument("--out", type=Path, default=Path("memsave-demo"), help="where results go (default: %(default)s)")
    demo.add_argument("--data-dir", type=Path, help="CIFAR-10's binary version (default: scikit-learn's digits)")
    demo.add_argument("--epochs", type=int, default=3, help="passes over the data (default: %(default)s)")
    demo.add_argument("--batch-size", type=int, default=100, help="samples per step (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of weights, split and order (default: %(default)s)")
    demo.add_argument("--no-wandb", dest="wandb", action="store_false", help="do not write offline W&B runs")
    demo.set_defaults(run=_demo)
    compare = commands.add_parser("compare", help="hold the memory and the quality of runs against each other")
    compare.add_argument(
        "runs", nargs="+", type=Path, help="W&B run folders, Lightning CSV folders, JSON; first: baseline"
    )
    compare.add_argument("--out", type=Path, help="write one HTML page that needs no network")
    compare.add_argument("--metric", help="what quality is (default: an accuracy or a loss that was logged)")
    compare.add_argument("--better", choices=("higher", "lower"), help="which way (default: as its name says)")
    compare.add_argument("--json", action="store_true", help="print JSON instead of the table")
    compare.set_defaults(run=_compare)
    dashboard = commands.add_parser("dashboard", help="save a W&B workspace for the runs of a project")
    dashboard.add_argument("target", metavar="ENTITY/PROJECT")
    dashboard.add_argument("--metric", default="test/accuracy", help="what quality is (default: %(default)s)")
    dashboard.add_argument("--json", type=Path, metavar="FILE", help="write the specification; needs no network")
    dashboard.set_defaults(run=_dashboard)
    check = commands.add_parser("verify", help="compare a training step of your module with and without memory saving")
    check.add_argument("module", metavar="MODULE:CLASS", help="a LightningModule, or what makes it")
    check.add_argument("--batch", required=True, metavar="MODULE:NAME", help="a batch, a loader, or a function of one")
    check.add_argument("--recipe", default="lossless", help="as `MemSave(recipe)` (default: %(default)s)")
    _add_slots(check)
    check.add_argument("--seed", type=int, default=0, help="of both steps (default: %(default)s)")
    check.set_defaults(run=_verify)
    plan = commands.add_parser("plan", help="predict the memory of a training step of your module")
    plan.add_argument(
        "module", nargs="?", metavar="MODULE:CLASS", help="a LightningModule, or what makes it without arguments"
    )
    plan.add_argument("--batch", metavar="MODULE:NAME", help="a batch, a loader, or a function of one")
    plan.add_argument("--config", type=Path, metavar="FILE", help="of LightningCLI: model, data, precision, MemSave")
    plan.add_argument("--recipe", help="as `MemSave(recipe)` (default: lossless)")
    plan.add_argument("--budget", metavar="SIZE", help="as `MemSave(budget)`: plan, and predict a step under the plan")
    _add_slots(plan)
    plan.add_argument("--trainer-precision", help="as `Trainer(precision=...)`, for example bf16-mixed")
    plan.add_argument("--strategy", help="as `Trainer(strategy=...)`, for example ddp")
    plan.add_argument("--devices", type=int, help="of the run, of which one process is predicted (default: 1)")
    plan.add_argument("--num-nodes", type=int, help="of the run (default: 1)")
    plan.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="of which device (default: %(default)s)")
    plan.add_argument(
        "--device-memory", metavar="SIZE", help="what it must fit in, for example 8GiB; exit status 1 if not"
    )
    plan.add_argument(
        "--largest",
        metavar="NAME",
        help="find the largest batch that fits in --device-memory (`batch`), or the largest value of an argument of "
        "the function that makes the batch or the model, such as a length or a depth",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--figure", type=Path, metavar="FILE", help="write the timeline as an HTML page")
    plan.set_defaults(run=_plan)
    options = vars(parser.parse_args(arguments))
    command, run = options.pop("command"), options.pop("run")
    try:
        with _current_folder():  # whatever is called there may import from it
            return run(**options) or 0
    except ModuleNotFoundError as error:
        # Lightning gives its own such errors no name. Others may be about a module of the user's.
        extra = _EXTRAS.get(command)
        is_extra = extra is not None and (error.name is None or error.name.partition(".")[0] in extra)
        remedy = f" `{command}` needs its extra: pip install 'lightning-memsave[{command}]'" if is_extra else ""
        print(f"error: {error}.{remedy}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


_EXTRAS = {
    "compare": ("plotly",),
    "dashboard": ("wandb_workspaces",),
    "demo": ("sklearn", "matplotlib", "plotly", "wandb_workspaces"),
    "plan": ("jsonargparse", "plotly"),
}
"""What each command imports that only its extra installs."""


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


def _dashboard(target: str, metric: str, json: Path | None) -> None:
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

    result = verify(_made(_named(module)), _made(_named(batch)), MemSave(recipe, **slots), seed=seed)
    print_verification(result, Console())
    return 0 if result.holds else 1


def _add_slots(command: argparse.ArgumentParser) -> None:
    for slot in ("sparsity", "precision", "microbatch", "activations", "checkpointing", "optimizer-state"):
        command.add_argument(f"--{slot}", type=_value, help=f"as `MemSave({slot.replace('-', '_')}=...)`")


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
    from lightning_memsave.prediction.predictor import Predictor, largest_batch, largest_value
    from lightning_memsave.reporting.prediction_page import print_prediction, write_figure

    device_bytes = None if device_memory is None else parse_bytes("--device-memory", device_memory)
    if largest is not None and device_bytes is None:
        raise setting_error("--largest", "needs --device-memory", largest, "For example `--device-memory 8GiB`.")
    given = {"precision": trainer_precision, "strategy": strategy, "devices": devices, "num_nodes": num_nodes}
    given = {"target": target, **{name: value for name, value in given.items() if value is not None}}
    model, samples, settings, techniques = _subject(module, batch, config, recipe, {"budget": budget, **slots}, given)
    predictor = Predictor(model, _made(samples), **settings)
    prediction = predictor(techniques)
    fits = None if device_bytes is None else prediction.fits(device_bytes)
    data = {**prediction.as_dict(), "device_bytes": device_bytes, "fits": fits}
    if largest is not None and device_bytes is not None:
        data[f"largest_{largest}"] = (
            largest_batch(predictor, device_bytes, techniques)
            if largest == "batch"
            else largest_value(largest, model, _maker(samples), device_bytes, techniques, **settings)
        )
    if json:
        print(json_module.dumps(data))
    else:
        print_prediction(prediction, Console(), device_bytes)
        if largest is not None:
            unit = " samples" if largest == "batch" else ""
            print(f"largest {largest} that fits: {data[f'largest_{largest}']}{unit}")
    if figure is not None:
        print(f"Figure: {write_figure(prediction, figure).resolve()}", file=sys.stderr)
    return 1 if device_bytes is not None and fits is not True else 0


def _subject(
    module: str | None,
    batch: str | None,
    config: Path | None,
    recipe: str | None,
    slots: dict[str, Any],
    given: dict[str, Any],
) -> tuple[Any, Any, dict[str, Any], Any]:
    """Return the model or what makes it, the same of the batch, arguments of `Trainer`, and what is switched on."""
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
    memsave = MemSave(recipe or "lossless", **slots) if memsave is None or recipe else _besides(memsave, slots)
    if memsave.budgeted is None:
        return model, samples, settings, memsave.recipe
    for name, plain in _PLANNED_FOR.items():
        if (value := settings.get(name)) is not None and value not in plain:
            rule = f"is planned here for a CPU in the module's own precision, not with another {name}"
            remedy = "Start the run with `MemSave(budget=...)`, which plans for itself, or leave this out."
            raise setting_error("budget", rule, f"{name}={value!r}", remedy)
    if (num := num_processes_of(settings)) > 1:
        remedy = "The run plans for all of them itself: start it, or name techniques instead of a budget."
        raise setting_error("devices", "must be 1 where a budget is to be planned before the run", num, remedy)
    plan = plan_training(_made(model), _made(samples), memsave)
    print(plan, file=sys.stderr)
    return model, samples, settings, plan.as_recipe()


def _besides(memsave: Any, slots: dict[str, Any]) -> Any:
    """Return what a file has set, and what is set besides."""
    if all(value is None for value in slots.values()):
        return memsave
    own = None if memsave.budgeted is None else memsave.budgeted.budget_text
    return type(memsave)(memsave.recipe, **{**slots, "budget": slots["budget"] or own})


def _made(found: Any) -> Any:
    """Return the value, called if it can be; of a loader, its first batch."""
    from torch import nn
    from torch.utils.data import DataLoader

    if callable(found) and not isinstance(found, nn.Module):
        found = found()
    return next(iter(found)) if isinstance(found, DataLoader) else found


def _maker(found: Any) -> Any:
    """Return what makes a batch, with the arguments of `found`; the batch itself where nothing makes it."""
    from torch import nn

    if not callable(found) or isinstance(found, nn.Module):
        return _made(found)

    @functools.wraps(found)
    def make(*args: Any, **kwargs: Any) -> Any:
        return _made(found(*args, **kwargs))

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
    """Modules of the current folder can be imported, as `python -m` finds them."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


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


if __name__ == "__main__":
    sys.exit(main())
