"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


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
    options = vars(parser.parse_args(arguments))
    options.pop("command")
    try:
        from lightning_memsave.demo.run import DemoConfig, run_demo  # slow: torch and Lightning

        run_demo(DemoConfig(**options))
    except ModuleNotFoundError as error:
        print(f"error: {error}. The demo needs its extra: pip install 'lightning-memsave[demo]'", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
