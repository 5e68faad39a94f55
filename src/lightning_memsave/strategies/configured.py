"""A config file of LightningCLI, read for a prediction: the model, a batch, and what steps depend on.

Nothing is trained, and no logger, device or checkpoint of the file is touched.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lightning_memsave.core.errors import setting_error
from lightning_memsave.strategies.budgeting import STEPS_DEPEND_ON
from lightning_memsave.strategies.namespaces import NAMESPACES

_READ = ("seed_everything", "model", "data", "optimizer", "lr_scheduler")
_NOTHING_ELSE = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True, kw_only=True)
class Configured:
    """What a config file says."""

    module: Any
    batch: Any
    """The first one of its data; `None` where the file has none."""
    trainer: dict[str, Any]
    """Arguments of `Trainer` that steps depend on."""
    callbacks: list[Any]
    """Those of this package."""


def read_config(path: Path, model_class: Any = None, *, with_data: bool = True) -> Configured:
    """Make what a config file names.

    Args:
        path: YAML, as `python cli.py fit --print_config` writes it.
        model_class: of the model, where the file has only its arguments.
        with_data: whether a batch is needed.

    Raises:
        ValueError: the file cannot be read as settings.
        ModuleNotFoundError: LightningCLI needs `jsonargparse`.
        SystemExit: the file has what LightningCLI does not know; it has said so.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise setting_error("--config", "must be a readable YAML file", str(path), str(error)) from error
    if not isinstance(config, dict):
        raise setting_error("--config", "must hold settings by name", str(path), "See LightningCLI's `--print_config`.")
    trainer = config.get("trainer") or {}
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    ours = [c for c in callbacks if str(c.get("class_path", "")).partition(".")[0] == "lightning_memsave"]
    namespace = next(name for name in NAMESPACES if find_spec(name.partition(".")[0]) is not None)
    args = {name: config[name] for name in _READ if config.get(name) is not None}
    args["trainer"] = {**_NOTHING_ELSE, "callbacks": ours}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # that there is a command line too
        warnings.filterwarnings("ignore", message=".*will be overridden by `LightningCLI")  # as in the run
        cli = import_module(f"{namespace}.cli").LightningCLI(
            model_class, run=False, save_config_callback=None, args=args
        )
    return Configured(
        module=cli.model,
        batch=_first_of(cli.datamodule) if with_data and cli.datamodule is not None else None,
        trainer={name: trainer[name] for name in STEPS_DEPEND_ON if trainer.get(name) is not None},
        callbacks=cli.trainer.callbacks,
    )


def _first_of(data: Any) -> Any:
    data.prepare_data()
    data.setup("fit")
    return next(iter(data.train_dataloader()))
