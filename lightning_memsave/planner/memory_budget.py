"""A budget: how much memory a training step may take, in bytes, of the device, or of the plain step."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.units import format_bytes, parse_bytes
from lightning_memsave.simulation.predicted_step import Prediction

MEANINGS = {
    "cpu": "on CPU: live tensors and what kernels take inside of operations",
    "other": "on an accelerator: what its allocator reserves",
}


@dataclass(frozen=True)
class Budget:
    """A budget as the user wrote it.

    Raises:
        ValueError: it is no size, no percentage up to 100 and no factor below 1.

    >>> Budget("8GiB").needs_baseline, Budget("0.25x").needs_baseline
    (False, True)
    """

    text: int | str

    def __post_init__(self) -> None:
        if self._ratio is None:
            try:
                parse_bytes("budget", self.text)
            except ValueError:
                raise setting_error(
                    "budget",
                    "must be a positive size, a percentage of the device's memory or a factor of the plain step",
                    self.text,
                    'For example "8GiB", "50%" or "0.5x".',
                ) from None
        elif not 0 < self._ratio <= 1:
            raise setting_error(
                "budget",
                "must be above 0, and at most the device's memory or the plain step's peak",
                self.text,
                'For example "60%" of the device, or "0.25x" of the plain step.',
            )

    @property
    def _match(self) -> re.Match[str] | None:
        return re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([%x])\s*", self.text) if isinstance(self.text, str) else None

    @property
    def _ratio(self) -> float | None:
        found = self._match
        return None if found is None else float(found[1]) / (100 if found[2] == "%" else 1)

    @property
    def needs_baseline(self) -> bool:
        """Whether it is a factor of what the plain step takes."""
        return (found := self._match) is not None and found[2] == "x"

    def in_bytes(self, baseline_bytes: int, device_bytes: int | None) -> int:
        """Return the budget in bytes.

        Args:
            baseline_bytes: what the plain step takes.
            device_bytes: the memory of the device; `None` where it is not told.

        Raises:
            ValueError: a percentage of a device that does not tell its memory.

        >>> Budget("60%").in_bytes(0, 1000), Budget("0.25x").in_bytes(1000, None), Budget(7).in_bytes(0, None)
        (600, 250, 7)
        """
        if self._ratio is None:
            return parse_bytes("budget", self.text)
        if self.needs_baseline:
            return int(self._ratio * baseline_bytes)
        if device_bytes is None:
            raise setting_error(
                "budget",
                "cannot be a percentage of a device that does not tell its memory",
                self.text,
                f'Give bytes, for example "8GiB", or a factor of the plain step ({format_bytes(baseline_bytes)}).',
            )
        return int(self._ratio * device_bytes)


def machine_bytes() -> int | None:
    """Return the memory of this machine, or `None` where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def needed_bytes(prediction: Prediction) -> int:
    """Return the bytes that a step needs of a budget.

    On CUDA these are what the allocator reserves; elsewhere tracked tensors and what kernels take.
    """
    if prediction.cuda is not None:
        return prediction.cuda.reserved_bytes
    return prediction.peak_bytes + prediction.workspace_bytes
