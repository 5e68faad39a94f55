"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    options = vars(parser.parse_args(arguments))
    command, run = options.pop("command"), options.pop("run")
    try:
        run(**options)
    except ModuleNotFoundError as error:
        remedy = f"pip install 'lightning-memsave[{command}]'"
        print(f"error: {error}. `{command}` needs its extra: {remedy}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
