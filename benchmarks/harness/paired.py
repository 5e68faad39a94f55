"""Is a run that saves memory worse than the baseline, and by how much at most? Paired runs, one pair per seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_ACCURACY, _BLEU, _NATS = (0.4, 0.2), (0.15, 0.1), (0.008, 0.004)
MARGINS = {
    "wrn_quality": _ACCURACY,
    "vit_quality": _ACCURACY,
    "gpt_quality": _NATS,
    "dynamicconv_quality": _BLEU,
    "dynamicconv_iwslt14_quality": _BLEU,
}
"""By study: the loss of quality that is to be excluded, and the widest half of an interval that shows anything."""


@dataclass(frozen=True)
class Comparison:
    """Differences of paired runs, in the unit of what was measured (higher is better)."""

    num_pairs: int
    mean: float
    half_width: float
    """Of the one-sided 95 % interval; infinite for a single pair."""

    @property
    def lower_bound(self) -> float:
        """What the true mean difference lies above, with 95 % confidence."""
        return self.mean - self.half_width

    def verdict(self, margin: float, most_half_width: float) -> str:
        """Whether a loss of more than `margin` is excluded; a wide interval shows no loss.

        >>> Comparison(9, -0.1, 0.15).verdict(margin=0.4, most_half_width=0.2)
        'not worse by more than 0.4'
        >>> Comparison(5, +1.2, 0.3).verdict(margin=0.4, most_half_width=0.2)
        'not worse by more than 0.4 (half-width above 0.2)'
        >>> Comparison(2, +1.0, 3.0).verdict(margin=0.4, most_half_width=0.2)
        'not shown'
        >>> Comparison(9, -0.5, 0.15).verdict(margin=0.4, most_half_width=0.2)
        'worse by more than 0.4 is not excluded'
        """
        is_wide, is_excluded = self.half_width > most_half_width, self.lower_bound >= -margin
        if is_excluded:
            about = f" (half-width above {most_half_width:g})" if is_wide else ""
            return f"not worse by more than {margin:g}{about}"
        return "not shown" if is_wide else f"worse by more than {margin:g} is not excluded"


def compare_pairs(values: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Student's one-sided 95 % interval of the mean of `values - baseline`, pair by pair.

    Raises:
        ValueError: no pair, or sequences of unequal length.
    """
    if not values or len(values) != len(baseline):
        raise ValueError(f"values and baseline must be pairs, got {len(values)} and {len(baseline)}")
    from scipy.stats import t

    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    n = len(differences)
    half = math.inf if n == 1 else float(t.ppf(0.95, n - 1)) * statistics.stdev(differences) / n**0.5
    return Comparison(n, statistics.mean(differences), half)
