"""The command line's arguments, outside of the package: importing that imports torch, which no help text needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `lightning-memsave`; returns the exit status."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    if options.pop("version"):
        print(f"lightning-memsave {version('lightning-memsave')}")
        return 0
    if command is None:
        parser.print_help()
        return 0
    if missing := [module for module in _imported(command, options) if find_spec(module) is None]:
        remedy = f"pip install 'lightning-memsave[{command}]'"
        print(f"error: `{command}` needs {', '.join(missing)}, not installed here: {remedy}", file=sys.stderr)
        return 2
    from lightning_memsave import cli  # here: it imports torch, which help does not need

    return cli.run(command, options)


def _imported(command: str, options: dict[str, Any]) -> Iterator[str]:
    """Yield what a command will import that only the extra of its name installs."""
    if command == "demo":
        yield "matplotlib"
        if options["data_dir"] is None:
            yield "sklearn"
    if command == "demo" or (command == "compare" and options["out"]) or (command == "plan" and options["figure"]):
        yield "plotly"
    if command == "dashboard" or (command == "demo" and options["wandb"]):
        yield "wandb_workspaces"
    if command == "plan" and options["config"]:
        yield "jsonargparse"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-memsave",
        description="Train in a fraction of the memory.",
        epilog="`lightning-memsave COMMAND --help` says what a command takes, with an example.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_demo(commands)
    _add_compare(commands)
    _add_dashboard(commands)
    _add_verify(commands)
    _add_plan(commands)
    return parser


def _added(commands: Any, name: str, what: str, example: str) -> argparse.ArgumentParser:
    """Add a command: what it does as a sentence, and an example below its options."""
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what[0].lower() + what[1:].removesuffix("."),
        description=what,
        epilog=f"example:\n  lightning-memsave {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return added


def _add_demo(commands: Any) -> None:
    demo = _added(
        commands,
        "demo",
        "Train WideResNet-28-2 with and without memory saving, and compare.",
        "--epochs 1 --out memsave-demo",
    )
    demo.add_argument(
        "--out", type=Path, default=Path("memsave-demo"), help="the folder for the results (default: %(default)s)"
    )
    demo.add_argument(
        "--data-dir",
        type=Path,
        help="a folder with CIFAR-10's binary version (default: the digits that come with scikit-learn)",
    )
    demo.add_argument("--epochs", type=int, default=2, help="how often each run sees the data (default: %(default)s)")
    demo.add_argument("--batch-size", type=int, default=100, help="samples in a step (default: %(default)s)")
    demo.add_argument(
        "--batchnorm-momentum", type=float, default=0.3, help="of the running statistics (default: %(default)s)"
    )
    demo.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the seed of the weights, of the split and of the order of the data (default: %(default)s)",
    )
    demo.add_argument("--no-wandb", dest="wandb", action="store_false", help="do not write offline W&B runs")


def _add_compare(commands: Any) -> None:
    compare = _added(
        commands,
        "compare",
        "Hold the memory and the quality of runs against each other.",
        "memsave-demo/wandb lightning_logs/version_0 --out page.html",
    )
    compare.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a W&B run folder, a folder of Lightning's CSVLogger, or a saved JSON file; NAME=PATH names it; the first "
        "that changes nothing is the baseline, or else the first",
    )
    compare.add_argument("--out", type=Path, metavar="FILE", help="also write one HTML page, which needs no network")
    compare.add_argument(
        "--metric", help="the metric that is quality (default: an accuracy or a loss that the runs have logged)"
    )
    compare.add_argument(
        "--better",
        choices=("higher", "lower"),
        help="which values of the metric are better (default: as its name says)",
    )
    compare.add_argument("--json", action="store_true", help="print JSON instead of the table")


def _add_dashboard(commands: Any) -> None:
    dashboard = _added(
        commands, "dashboard", "Save a W&B workspace for the runs of a project.", "my-team/my-project --metric val/acc"
    )
    dashboard.add_argument("target", metavar="ENTITY/PROJECT", help="the project at W&B, with whose it is")
    dashboard.add_argument(
        "--metric", help="the metric that is quality, as the runs have logged it (default: none, only memory and time)"
    )
    dashboard.add_argument(
        "--json", type=Path, metavar="FILE", help="write the workspace to a file instead, which needs no network"
    )


_MODULE = "a LightningModule: its class, or a function that makes it without arguments"
_BATCH = (
    "what a training step takes: a batch, a loader or a LightningDataModule, of which the first batch is taken, or a "
    "function or class that makes one of them"
)


def _add_verify(commands: Any) -> None:
    check = _added(
        commands,
        "verify",
        "Compare a training step of your module with and without memory saving.",
        "my_module:Model --batch my_module:DataModule --activations int4",
    )
    check.add_argument("module", metavar="MODULE:CLASS", help=_MODULE)
    check.add_argument("--batch", required=True, metavar="MODULE:NAME", help=_BATCH)
    check.add_argument("--recipe", default="lossless", help="the recipe, as in MemSave(recipe) (default: %(default)s)")
    _add_slots(check)
    check.add_argument(
        "--seed", type=int, default=0, help="the seed of the random numbers of both steps (default: %(default)s)"
    )


def _add_plan(commands: Any) -> None:
    plan = _added(
        commands,
        "plan",
        "Predict the memory of a training step of your module, before it runs.",
        "my_module:Model --batch my_module:DataModule --target cuda --device-memory 8GiB --largest batch",
    )
    plan.add_argument("module", nargs="?", metavar="MODULE:CLASS", help=_MODULE)
    plan.add_argument("--batch", metavar="MODULE:NAME", help=_BATCH)
    plan.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a config file of LightningCLI, from which the model, the data, the precision and MemSave are read",
    )
    plan.add_argument("--recipe", help="the recipe, as in MemSave(recipe) (default: lossless)")
    plan.add_argument(
        "--budget",
        metavar="SIZE",
        help="what a step may take, as in MemSave(budget=...): make a plan, and predict a step under it",
    )
    _add_slots(plan)
    plan.add_argument("--trainer-precision", help="as in Trainer(precision=...), for example bf16-mixed")
    plan.add_argument("--strategy", help="as in Trainer(strategy=...), for example ddp")
    plan.add_argument(
        "--devices", type=int, help="how many devices the run has; one process of it is predicted (default: 1)"
    )
    plan.add_argument("--num-nodes", type=int, help="how many machines the run has (default: 1)")
    plan.add_argument(
        "--target",
        choices=("cpu", "cuda"),
        default="cpu",
        help="the kind of device whose memory is predicted (default: %(default)s)",
    )
    plan.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="the memory that the step must fit in, for example 8GiB; the exit status is 1 if it does not",
    )
    plan.add_argument(
        "--largest",
        metavar="NAME",
        help="find the largest batch that fits in --device-memory (`batch`), or the largest value of an argument of "
        "what makes the batch or the model, such as a length or a depth",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--figure", type=Path, metavar="FILE", help="also write the step's timeline as an HTML page")


_SLOTS = {
    "sparsity": "0.9",
    "low_rank": "16",
    "sparse_update": "256KiB",
    "precision": "bf16-sr",
    "microbatch": "8",
    "activations": "exact,int4",
    "max_gradient_noise": "0.05",
    "checkpointing": "sqrt",
    "optimizer_state": "8bit",
}
"""Examples of the settings that `MemSave` takes."""


def _add_slots(command: argparse.ArgumentParser) -> None:
    for slot, example in _SLOTS.items():
        option, what = f"--{slot.replace('_', '-')}", f"as in MemSave({slot}=...), for example {example}"
        command.add_argument(option, metavar="SETTING", help=what)


if __name__ == "__main__":
    sys.exit(main())
