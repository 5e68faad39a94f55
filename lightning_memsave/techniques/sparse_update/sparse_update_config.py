"""The settings of sparse update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_memsave.core.errors import check_unused, setting_error
from lightning_memsave.core.units import parse_bytes

Share = float | tuple[int, ...]
"""The fraction of a layer's input channels that are trained, or the channels themselves."""


@dataclass(frozen=True, kw_only=True)
class SparseUpdate:
    """Settings of sparse update: which part of a network is trained.

    Raises:
        ValueError: a setting out of its range; at the start of training, a pattern that matches no layer, or a budget
            in which nothing can be trained.
    """

    budget: int | float | str = 0.2
    """What training may take besides the network: kept activations, gradients and optimizer state, in bytes
    (`"256KiB"`), or as a fraction (a float below 1) of what training all of it takes. Layers and channels are chosen
    for it, by gain per byte in the first batches."""
    layers: Mapping[str, Share] | None = None
    """Instead of a budget: patterns (`*`, `?`) for names or classes of layers, and the fraction of input channels that
    are trained, those with the largest weights, or the channels as integers. The first pattern that matches counts;
    with 1.0 every parameter of a module is trained, also of one that is no layer."""
    biases: bool | tuple[str, ...] = True
    """Whether biases are trained, from the earliest trained layer on; with `layers`, also patterns for modules."""

    def __post_init__(self) -> None:
        if self.layers is None:
            self._check_budget()
        else:
            check_unused(self, "budget", "`layers=None`")
            if not isinstance(self.layers, Mapping) or not self.layers:
                remedy = 'For example `layers={"blocks.3.*": 0.25, "head": 1.0}`.'
                raise setting_error("SparseUpdate.layers", "must map patterns to fractions", self.layers, remedy)
            shares = {pattern: _checked(pattern, share) for pattern, share in self.layers.items()}
            object.__setattr__(self, "layers", shares)
        if not isinstance(self.biases, bool):
            is_several = isinstance(self.biases, (tuple, list)) and all(isinstance(each, str) for each in self.biases)
            if not is_several:
                rule = "must be `True`, `False` or patterns for modules"
                raise setting_error("SparseUpdate.biases", rule, self.biases, 'For example ("blocks.3.*", "head").')
            object.__setattr__(self, "biases", tuple(self.biases))
            if self.layers is None:
                rule = "cannot be patterns beside a budget, which is made for the biases from the earliest layer on"
                raise setting_error("SparseUpdate.biases", rule, self.biases, "Give `layers`, or `True` or `False`.")

    def _check_budget(self) -> None:
        if isinstance(self.budget, float):
            if not 0 < self.budget < 1:
                remedy = 'Use 0.2 for a fifth, or bytes: "256KiB".'
                raise setting_error("sparse_update", "must be a fraction between 0 and 1", self.budget, remedy)
        else:
            parse_bytes("sparse_update", self.budget)

    @classmethod
    def from_shorthand(cls, value: object) -> SparseUpdate:
        """`sparse_update="256KiB"` is `SparseUpdate(budget="256KiB")`; `0.2` likewise."""
        return cls(budget=value)  # type: ignore[arg-type]  # checked in __post_init__

    @property
    def needs_a_plan(self) -> bool:
        """Whether layers and channels are still to be chosen."""
        return self.layers is None

    def budget_bytes(self, whole_bytes: int) -> int:
        """Return the budget in bytes, where training everything takes `whole_bytes`.

        >>> SparseUpdate(budget=0.25).budget_bytes(1000), SparseUpdate(budget="1KiB").budget_bytes(1000)
        (250, 1024)
        """
        if isinstance(self.budget, float):
            return int(self.budget * whole_bytes)
        return parse_bytes("sparse_update", self.budget)


def _checked(pattern: Any, share: Any) -> Share:
    rule = "must be a fraction up to 1.0, or integers: the channels"
    remedy = 'For example `layers={"blocks.3.*": 0.25, "head": 1.0}`.'
    if isinstance(pattern, str):
        if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1:
            return float(share)
        if isinstance(share, (tuple, list)) and share and all(type(c) is int and c >= 0 for c in share):
            return tuple(sorted(set(share)))
    raise setting_error(f"SparseUpdate.layers[{pattern!r}]", rule, share, remedy)
