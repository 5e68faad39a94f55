"""What a training step with memory saving differs in from one without."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_memsave.core.report import LossClass, MemoryReport

_BY_CHANCE = 1e-4
"""How rarely noise that averages to zero may be taken for more than that."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How the gradient differs in several draws of a setting's noise; sizes are relative to the plain gradient's."""

    codecs: tuple[str, ...]
    """What makes the noise."""
    num_draws: int
    size: float
    """The root mean square of the draws' differences."""
    mean_size: float
    """The size of the mean of the differences: `size` over the root of `num_draws` where noise averages to zero."""
    chance: float
    """How often noise that averages to zero leaves a mean as large as this."""

    @property
    def bias(self) -> float:
        """Size of what more draws would not average away, as estimated from these."""
        return math.sqrt(max(0.0, (self.num_draws * self.mean_size**2 - self.size**2) / (self.num_draws - 1)))

    def averages_to_zero(self, tolerance: float) -> bool:
        """Return whether what the mean leaves is chance, or no more than rounding."""
        return math.isfinite(self.size) and (self.chance >= _BY_CHANCE or self.bias <= tolerance)


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
    """What rounding alone may make."""
    noise: Noise | None = None
    """Differences over several draws, where activations are kept with noise and nothing else changes the result."""

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
        """Whether the step is what its loss class says.

        `exact`: equal within rounding. `unbiased`: an equal loss, and noise that averages to zero. Others: finite.
        """
        if self.loss_class == "exact":
            return self.largest_difference <= self.tolerance
        noise = self.noise if self.loss_class == "unbiased" else None
        if self.loss_class == "unbiased" and not self.loss_difference <= self.tolerance:  # noise is in backward alone
            return False
        return math.isfinite(self.largest_difference) and (noise is None or noise.averages_to_zero(self.tolerance))
