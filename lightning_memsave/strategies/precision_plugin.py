"""Low precision under Lightning: 16-bit weights before optimizers exist, and the forward pass under autocast.

Autocast is Lightning's own `bf16-mixed` plugin, or `16-mixed` with loss scaling of ours. Unlike `bf16-true` it leaves
inputs, targets and buffers as they are, and lets float32 norms stand between 16-bit layers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.lightning_compat import callbacks_named, counterpart, namespace_of
from lightning_memsave.techniques.low_precision import LowPrecision, Weights


def lower_precision(trainer: L.Trainer, config: LowPrecision) -> tuple[Weights, Applied]:
    """Lower the weights of the module, and let the strategy run it under autocast.

    Raises:
        ValueError: `Trainer(precision=...)` asks for something else, or the settings do not suit the module.
    """
    strategy, before = trainer.strategy, trainer.strategy.precision_plugin
    plugins = import_module(f"{namespace_of(strategy)}.plugins.precision")
    _check_precision(plugins, before, config)
    _check_callbacks(trainer, config)
    weights = config.lower(trainer.lightning_module)
    device = strategy.root_device.type
    if weights.scaling is not None:
        strategy.precision_plugin = counterpart(ScaledPrecision, namespace_of(strategy))(
            "16-mixed", device, weights.scaling
        )
    elif type(before) is plugins.Precision and weights.format.dtype == torch.bfloat16:
        strategy.precision_plugin = plugins.MixedPrecision("bf16-mixed", device)

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


def _check_callbacks(trainer: L.Trainer, config: LowPrecision) -> None:
    """Refuse a callback of Lightning's that does not know corrections kept as buffers, codes, or 16-bit weights."""
    averaging, has_corrections = callbacks_named(trainer, "WeightAveraging"), config.format in ("bf16+8", "bf16-kahan")
    unaware = [*averaging, *callbacks_named(trainer, "ModelPruning")]
    if config.format == "int8-sr" and (unaware := [*unaware, *callbacks_named(trainer, "StochasticWeightAveraging")]):
        raise setting_error(
            "precision",
            f"keeps weights as codes, which {type(unaware[0]).__name__} cannot compute with",
            config.format,
            'Use `precision="bf16-sr"`.',
        )
    if unaware and has_corrections:
        raise setting_error(
            "precision",
            f"keeps corrections as buffers, which {type(unaware[0]).__name__} does not know",
            config.format,
            f'Use `precision="bf16-sr"`{", or `StochasticWeightAveraging`" if averaging else ""}.',
        )
    # torch's own way of averaging groups tensors of two dtypes, or calls kernels that take one.
    by_itself = [c for c in averaging if not {"avg_fn", "multi_avg_fn"} & getattr(c, "_kwargs", {}).keys()]
    has_kernels = config.format == "bf16-sr" and trainer.strategy.root_device.type == "cpu"
    if by_itself and config.format != "bf16-gradients" and not has_kernels:
        raise setting_error(
            "precision",
            f"has 16-bit weights, which {type(by_itself[0]).__name__} cannot add to its own of 32 bits by itself",
            config.format,
            "Use `EMAWeightAveraging`, or `WeightAveraging(avg_fn=torch.optim.swa_utils.get_swa_avg_fn())`.",
        )


def _check_precision(plugins: Any, plugin: Any, config: LowPrecision) -> None:
    is_mixed = isinstance(plugin, plugins.MixedPrecision) and plugin.precision == "bf16-mixed"
    if type(plugin) is plugins.Precision or (is_mixed and config.format != "fp16-scaled"):
        return
    allowed = '"32-true"' if config.format == "fp16-scaled" else '"32-true" or "bf16-mixed"'
    raise setting_error(
        "precision",
        "takes over from Lightning's own and cannot be combined with it",
        f"Trainer(precision={plugin.precision!r})",
        f"Leave `Trainer(precision=...)` at {allowed}, or use `MemSave(precision=False)`.",
    )


class ScaledPrecision(MixedPrecision):
    """Lightning's mixed precision, for gradients that are float16 themselves, which its scaler refuses.

    They stay scaled until they are float32 copies in the optimizer's step, which also looks for overflow.
    """

    scaler: Any

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as without a scaler."""
        return Precision.optimizer_step(self, *args, **kwargs)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clip as without a scaler."""
        Precision.clip_gradients(self, *args, **kwargs)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip values of gradients that are scaled."""
        self.scaler.clip_by_value(self.main_params(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip the norm of gradients that are scaled."""
        self.scaler.clip_by_norm(self.main_params(optimizer), clip_val)


ScaledPrecision.__qualname__ = "MixedPrecision"  # under which its scale is saved, as Lightning's own
