"""WideResNet-28-2 in fewer and fewer bytes: each technique alone, and all of them together by size of microbatch.

The network and batch of Sohoni et al., "Low-Memory Neural Network Training", 2019 (https://arxiv.org/abs/1904.10631),
who reach 60.7x by their own count. Accuracy of the rows that matter: `quality_wrn.py`.
"""

from __future__ import annotations

from benchmarks.harness.ladder import Ladder
from benchmarks.models.wrn import ALONE, BATCH_SIZE, COMBINED, MODEL, SIZES, measure_wrn

LADDER = Ladder(
    name="wrn",
    model=MODEL,
    num_samples=BATCH_SIZE,
    sizes=SIZES,
    combined=COMBINED,
    alone=ALONE,
    measure=measure_wrn,
)

if __name__ == "__main__":
    LADDER.main()
