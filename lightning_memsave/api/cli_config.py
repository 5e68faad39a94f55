"""A config file of LightningCLI, read for a prediction: the model, a batch, `MemSave`, and what steps depend on.

Nothing is trained, and no logger, device or checkpoint of the file is touched: of several processes only the number
and the strategy count. The model is made for real.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from torch.utils._pytree import tree_map

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import NAMESPACES, Batch
from lightning_memsave.prediction.run_predictions import STEPS_DEPEND_ON

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

    module: L.LightningModule
    batch: Batch
    """The first one of its data; `None` where the file has none."""
    data_module: Any
    trainer: dict[str, Any]
    """Arguments of `Trainer` that steps depend on."""
    memsave: MemSave | None


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
    if model_class is not None and not isinstance(model_class, type):
        raise setting_error("MODULE:CLASS", "must be a class beside a config file", model_class, "Or leave it out.")
    config = _settings(path)
    trainer = config.get("trainer") or {}
    if not isinstance(trainer, Mapping):
        raise setting_error("--config", "must hold settings of the trainer by name", trainer, "See `--print_config`.")
    callbacks = trainer.get("callbacks") or []
    ours = [each for each in (callbacks if isinstance(callbacks, list) else [callbacks]) if _is_memsave(each)]
    args = {name: config[name] for name in _READ if config.get(name) is not None and (with_data or name != "data")}
    args["trainer"] = {**_NOTHING_ELSE, "callbacks": ours}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")  # that there is a command line too
        warnings.filterwarnings("ignore", message=".*will be overridden by `LightningCLI")  # as in the run
        cli = import_module(f"{_namespace(model_class, config)}.cli").LightningCLI(
            model_class, run=False, save_config_callback=None, seed_everything_default=False, args=args
        )
    return Configured(
        module=cli.model,
        batch=first_batch(cli.datamodule) if with_data and cli.datamodule is not None else None,
        data_module=cli.datamodule,
        trainer={name: trainer[name] for name in STEPS_DEPEND_ON if trainer.get(name) is not None}
        | _processes(trainer),
        memsave=next((callback for callback in cli.trainer.callbacks if isinstance(callback, MemSave)), None),
    )


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise setting_error("--config", "must be a readable YAML file", str(path), str(error)) from error
    if not isinstance(config, Mapping):
        raise setting_error("--config", "must hold settings by name", str(path), "See LightningCLI's `--print_config`.")
    fit = config.get("fit")
    return fit if isinstance(fit, Mapping) else config


def _processes(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the strategy and the numbers of devices and nodes; what is left to the machine is one device."""
    found = {name: trainer[name] for name in ("strategy", "devices", "num_nodes") if trainer.get(name) is not None}
    if isinstance(strategy := found.get("strategy"), Mapping):
        module, _, last = str(strategy.get("class_path")).rpartition(".")
        try:
            found["strategy"] = getattr(import_module(module or "lightning.pytorch.strategies"), last)(
                **(strategy.get("init_args") or {})
            )
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise setting_error("strategy", "must be a class that can be made", strategy, str(error)) from error
    devices = found.get("devices", 1)
    if isinstance(found.get("num_nodes"), str):
        found["num_nodes"] = int(found["num_nodes"])
    if isinstance(devices, list) and devices != [-1]:
        found["devices"] = len(devices)
    elif devices in ("auto", "-1", -1, [-1]):
        del found["devices"]
    elif isinstance(devices, str):
        found["devices"] = int(devices) if devices.isdigit() else sum(bool(part.strip()) for part in devices.split(","))
    return found


def _is_memsave(callback: object) -> bool:
    name = str(callback.get("class_path") if isinstance(callback, Mapping) else callback)
    module, _, last = name.rpartition(".")
    if not module:
        return last in ("MemSave", *(cls.__name__ for cls in MemSave.__subclasses__()))
    try:
        found = getattr(import_module(module), last, None)
    except ImportError:  # somebody else's, which a prediction does not need
        return False
    return isinstance(found, type) and issubclass(found, MemSave)


def _namespace(model_class: Any, config: Mapping[str, Any]) -> str:
    """Return the namespace of the Lightning that the model is made for."""
    if model_class is None and isinstance(config.get("model"), Mapping):
        module, _, last = str(config["model"].get("class_path", "")).rpartition(".")
        with contextlib.suppress(ImportError):  # LightningCLI will say so, with the setting's name
            model_class = getattr(import_module(module), last, None) if module else None
    known = [name for name in NAMESPACES if find_spec(name.partition(".")[0]) is not None]
    bases = [cls.__module__ for cls in getattr(model_class, "__mro__", ())]
    return next((name for name in known if any(base.startswith(f"{name}.") for base in bases)), known[0])


def first_batch(data: Any) -> Any:
    """Return the first training batch of a LightningDataModule, of each loader where there are several."""
    data.prepare_data()
    data.setup("fit")
    return tree_map(lambda loader: next(iter(loader)), data.train_dataloader())
