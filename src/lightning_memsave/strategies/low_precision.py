"""Low precision under Lightning: bfloat16 weights before optimizers exist, and the forward pass under autocast.

Autocast is Lightning's own `bf16-mixed` plugin. Unlike `bf16-true` it leaves inputs, targets and buffers as they are,
and lets float32 norms stand between bfloat16 layers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.strategies.namespaces import namespace_of
from lightning_memsave.techniques.low_precision import LowPrecision, Weights


def lower_precision(trainer: Any, config: LowPrecision) -> tuple[Weights, Applied]:
    """Lower the weights of the module, and let the strategy run it under autocast.

    Raises:
        ValueError: `Trainer(precision=...)` asks for something else, or the settings do not suit the module.
    """
    strategy, before = trainer.strategy, trainer.strategy.precision_plugin
    plugin = _autocast(strategy, before)
    _check_averaging(trainer, config)
    weights = Weights(trainer.lightning_module, config.format, config.keep_32bit, config.seed)
    strategy.precision_plugin = plugin

    def restore() -> None:
        strategy.precision_plugin = before
        weights.restore()

    return weights, Applied(
        technique="low_precision",
        summary=weights.summary,
        loss_class="changed",
        reasons=(weights.reason,),
        restore=restore,
    )


def _check_averaging(trainer: Any, config: LowPrecision) -> None:
    """Refuse Lightning's callback that pairs buffers by position with those of a copy that it made before."""
    averaging = [c for c in trainer.callbacks if "WeightAveraging" in {cls.__name__ for cls in type(c).__mro__}]
    if averaging and config.format != "bf16-sr":
        raise setting_error(
            "precision",
            f"keeps corrections as buffers, which {type(averaging[0]).__name__} cannot average",
            config.format,
            'Use `precision="bf16-sr"`, or `StochasticWeightAveraging`.',
        )


def _autocast(strategy: Any, plugin: Any) -> Any:
    plugins = import_module(f"{namespace_of(strategy)}.plugins.precision")
    if isinstance(plugin, plugins.MixedPrecision) and plugin.precision == "bf16-mixed":
        return plugin
    if type(plugin) is plugins.Precision:
        return plugins.MixedPrecision("bf16-mixed", strategy.root_device.type)
    raise setting_error(
        "precision",
        "takes over from Lightning's own and cannot be combined with it",
        f"Trainer(precision={plugin.precision!r})",
        'Leave `Trainer(precision=...)` at "32-true" or "bf16-mixed", or use `MemSave(precision=False)`.',
    )
