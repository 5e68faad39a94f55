"""DynamicConv at the paper's shapes in fewer and fewer bytes: a batch of 4,000 tokens on each side, Adam.

The network of Wu et al., 2019 (https://arxiv.org/abs/1901.10430) for IWSLT'14 German-English, on which Sohoni et al.,
2019 (https://arxiv.org/abs/1904.10631) report 8.7x by their own count. Its byte budget: docs/results.md. BLEU of the
rows that matter, on a generated task: `quality_dynamicconv.py`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.ladder import Ladder
from benchmarks.models.translation import LADDER as COMBINED
from benchmarks.models.translation import dynamicconv, microbatch, random_batch
from benchmarks.models.wrn import measure

NUM_SENTENCES, LENGTH = 160, 25


def measured(arguments: dict[str, Any], microbatch_size: int) -> dict[str, Any]:
    config = dynamicconv.DynamicConvConfig()
    tokens = config.num_source_tokens, config.num_target_tokens
    whole, two = (random_batch(n, LENGTH, *tokens) for n in (NUM_SENTENCES, min(2 * microbatch_size, NUM_SENTENCES)))
    return measure(lambda: dynamicconv.Translator(config), whole, two, arguments)


LADDER = Ladder(
    name="dynamicconv",
    model=f"DynamicConv, IWSLT'14 shapes, {NUM_SENTENCES} x {LENGTH} tokens, Adam",
    num_samples=NUM_SENTENCES,
    sizes=(16, 8, 4),
    combined=COMBINED,
    microbatch=microbatch,
    measure=measured,
)

if __name__ == "__main__":
    LADDER.main()
