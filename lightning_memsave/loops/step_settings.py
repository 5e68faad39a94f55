"""Numbers that a step may change besides attributes of users' modules: of torch's layers, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
        optimizers = list(getattr(strategy, "optimizers", ()))
        schedulers = [config.scheduler for config in getattr(strategy, "lr_scheduler_configs", ())]
        for scheduler in schedulers:  # one may hold others (`SequentialLR`), at any depth
            schedulers += [each for each in getattr(scheduler, "_schedulers", ()) if each not in schedulers]
        self._groups = [(each.param_groups, list(each.param_groups)) for each in optimizers]
        self._before = [
            *(("an optimizer's", group, _settings_in(group)) for _, groups in self._groups for group in groups),
            *(("a scheduler's", vars(scheduler), _settings_in(vars(scheduler))) for scheduler in schedulers),
        ]

    def _differing(self) -> Iterator[tuple[str, dict[str, Any], str, _Setting]]:
        for whose, now, before in self._before:
            for key, setting in before.items():
                if not setting.is_same(now.get(key)):
                    yield whose, now, key, setting

    def differences(self) -> list[str]:
        """Return what is another now, in words."""
        named = [f"`{name}`" for name in self._layers.differences()]
        return list(dict.fromkeys([*named, *(f"{whose} `{key}`" for whose, _, key, _ in self._differing())]))

    def restore(self) -> None:
        """Put everything back."""
        self._layers.restore()
        for groups, before in self._groups:
            if len(groups) != len(before):
                groups[:] = before
        for _, now, key, setting in self._differing():
            now[key] = setting.restored()


class _Setting(NamedTuple):
    """A number, a text, a list of numbers, or a single number in a tensor."""

    held: Any
    values: Any
    """A copy where `held` can change."""

    def is_same(self, now: Any) -> bool:
        """Return whether what is there now says the same."""
        if isinstance(self.held, Tensor):
            return now is self.held and bool(now == self.values)
        return type(now) is type(self.held) and bool(now == self.values)

    def restored(self) -> Any:
        """Return what was there, with the values that it had."""
        if isinstance(self.held, Tensor):
            self.held.copy_(self.values)
        elif isinstance(self.held, list):
            self.held[:] = self.values
        return self.held


def _settings_in(values: dict[str, Any]) -> dict[str, _Setting]:
    found = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() == 1:
                found[key] = _Setting(value, value.detach().clone())
        elif type(value) is list and all(map(is_immutable, value)):
            found[key] = _Setting(value, list(value))
        elif is_immutable(value):
            found[key] = _Setting(value, value)
    return found
