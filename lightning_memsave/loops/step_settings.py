"""Numbers that a step may change besides attributes of users' modules: of torch's layers, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_memsave.saved_tensors.module_state import LayerSettings
from lightning_memsave.saved_tensors.object_state import is_immutable


class StepSettings:
    """What layers, optimizers and schedulers of a run are set to, as it is now.

    Args:
        module: the LightningModule; without a trainer, of layers alone.
        owners: its modules, by name.
    """

    def __init__(self, module: L.LightningModule, owners: Sequence[tuple[str, nn.Module]]) -> None:
        self._layers = LayerSettings(owners)
        strategy = getattr(getattr(module, "_trainer", None), "strategy", None)
        groups = [group for each in getattr(strategy, "optimizers", ()) for group in each.param_groups]
        schedulers = [config.scheduler for config in getattr(strategy, "lr_scheduler_configs", ())]
        # A scheduler may hold others (`SequentialLR`).
        schedulers += [each for scheduler in schedulers for each in getattr(scheduler, "_schedulers", ())]
        self._before = [
            *(("an optimizer's", group, _settings_in(group)) for group in groups),
            *(("a scheduler's", vars(scheduler), _settings_in(vars(scheduler))) for scheduler in schedulers),
        ]

    def _differing(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        for whose, now, before in self._before:
            for key, value in before.items():
                if not _is_same(now.get(key), value):
                    yield whose, now, key, value

    def differences(self) -> list[str]:
        """Return what is another now, in words."""
        named = [f"`{name}`" for name in self._layers.differences()]
        return list(dict.fromkeys([*named, *(f"{whose} `{key}`" for whose, _, key, _ in self._differing())]))

    def restore(self) -> None:
        """Put everything back."""
        self._layers.restore()
        for _, now, key, value in self._differing():
            if isinstance(value, Tensor):
                now[key].copy_(value)
            else:
                now[key] = list(value) if isinstance(value, list) else value


def _settings_in(values: dict[str, Any]) -> dict[str, Any]:
    """Return numbers, texts, lists of numbers and copies of single numbers in tensors."""
    found = {key: value for key, value in values.items() if is_immutable(value)}
    found |= {
        key: list(value) for key, value in values.items() if type(value) is list and all(map(is_immutable, value))
    }
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor) and value.dim() == 0}
    return found | {key: value.detach().clone() for key, value in tensors.items()}


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(before, Tensor):
        return not isinstance(now, Tensor) or now is before or bool(now == before)
    return now is before or bool(type(now) is type(before) and now == before)
