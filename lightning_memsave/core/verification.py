"""What a training step with memory saving differs in from one without."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_memsave.core.report import LossClass, MemoryReport


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What a step with a setting differs in from a step without it."""

    plain: MemoryReport
    """Measured without."""
    report: MemoryReport
    """Measured with it; `loss_class` and `applied` say what it claims to have done."""
    loss_difference: float
    """Relative."""
    gradient_differences: dict[str, float] = field(default_factory=dict)
    """Norm of the difference over the norm of the plain gradients, for each module with parameters."""
    buffer_differences: dict[str, float] = field(default_factory=dict)
    """The same for each module with floating-point buffers."""
    tolerance: float

    @property
    def loss_class(self) -> LossClass:
        """What the setting claims."""
        return self.report.loss_class

    @property
    def largest_difference(self) -> float:
        """The largest of all."""
        found = [self.loss_difference, *self.gradient_differences.values(), *self.buffer_differences.values()]
        return math.nan if any(map(math.isnan, found)) else max(found)

    @property
    def holds(self) -> bool:
        """Whether the step is what its loss class says: `exact` within rounding; for the others, finite."""
        if self.loss_class == "exact":
            return self.largest_difference <= self.tolerance
        return math.isfinite(self.largest_difference)
