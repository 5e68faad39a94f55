"""What each technique promises: one `SPEC` in its test file, to which the contracts hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Spec:
    config: Any
    """Settings under which the toy module of the contracts is changed."""
    loss_class: Literal["exact", "unbiased", "approximate", "changed"]
    bit_equal: bool = False
    """Whether results are the same bits; otherwise, for `exact`, 1e-12 in float64."""
    tips_by: float = 1e-3
    """How far, relative to a parameter, another order of summation may move its roundings."""
    trainer_precision: str = "64-true"
    """`Trainer(precision=...)` where results are compared."""
    shrinks: str
    """The category whose bytes at the peak fall."""
