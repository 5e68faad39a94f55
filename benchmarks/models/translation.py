"""DynamicConv in few bytes: what `bench_dynamicconv.py` and `quality_dynamicconv.py` have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.models.generated import german_numbers
from benchmarks.models.papers import dynamicconv
from benchmarks.models.papers.dynamicconv import END, IGNORE, PAD, Batch
from lightning_memsave import LabelCount, Microbatching, OptimizerState

__all__ = ["LADDER", "Subwords", "dynamicconv", "german_numbers", "microbatch", "random_batch", "token_batches"]

SPECIAL = ("<pad>", "<s>", "</s>")


def microbatch(size: int) -> Microbatching:
    """Sentences; the loss is a mean over labels."""
    return Microbatching(size=size, reduction="mean", weight_fn=LabelCount())


STATE_8BIT = OptimizerState(first_moment="8bit", min_size=256, keep_embeddings_32bit=False)
INTO_4BIT = OptimizerState(first_moment="4bit", gradients="into-state", min_size=256, keep_embeddings_32bit=False)
INTO_MEANS = OptimizerState(
    first_moment="4bit", second_moment="factored", gradients="into-state", min_size=256, keep_embeddings_32bit=False
)
INTO_5BIT_MEANS = replace(INTO_MEANS, first_moment="5bit", second_moment="factored")
_INT4 = {"activations": ["exact", "int4"]}
_SPARSE = {**_INT4, "sparsity": 0.9}
_STATE = {**_SPARSE, "optimizer_state": STATE_8BIT}
LADDER: dict[str, dict[str, Any]] = {
    "microbatch alone": {},
    "+ exact, int4": _INT4,
    "+ sparsity 0.9": _SPARSE,
    "+ 8-bit moments": _STATE,
    "+ bf16": {**_STATE, "precision": "bf16-sr"},
    "dense: exact, int4, 8-bit moments, bf16": {
        **_INT4,
        "optimizer_state": STATE_8BIT,
        "precision": "bf16-sr",
    },
    "sparsity 0.3, exact, int4, 4-bit moments, into-state, bf16": {
        **_INT4,
        "sparsity": 0.3,
        "optimizer_state": INTO_4BIT,
        "precision": "bf16-sr",
    },
    "dense: exact, int4, 4-bit moments, into-state, bf16": {
        **_INT4,
        "optimizer_state": INTO_4BIT,
        "precision": "bf16-sr",
    },
    "dense: exact, int4, 4-bit and factored moments, into-state, bf16": {
        **_INT4,
        "optimizer_state": INTO_MEANS,
        "precision": "bf16-sr",
    },
    "dense: exact, int4, linear-cross-entropy, 5-bit and factored moments, into-state, bf16": {
        "activations": ["exact", "int4", "linear-cross-entropy"],
        "optimizer_state": INTO_5BIT_MEANS,
        "precision": "bf16-sr",
    },
}
"""Arguments of `MemSave`, for each size of microbatch."""


def random_batch(num_sentences: int, length: int, num_source: int, num_target: int) -> Batch:
    """Sentences that are all as long."""
    generator = torch.Generator().manual_seed(0)

    def tokens(num_tokens: int) -> torch.Tensor:
        return torch.randint(3, num_tokens, (num_sentences, length), generator=generator)

    return {"source": tokens(num_source), "labels": tokens(num_target)}


class Subwords:
    """Byte pair encoding (Sennrich et al., 2016, https://arxiv.org/abs/1508.07909), learned from sentences."""

    def __init__(self, sentences: Iterable[str], num_tokens: int) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        self._tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=num_tokens, special_tokens=list(SPECIAL), show_progress=False)
        self._tokenizer.train_from_iterator(sentences, trainer)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, sentence: str) -> torch.Tensor:
        return torch.tensor([*self._tokenizer.encode(sentence).ids, END])

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens[: tokens.index(END)] if END in tokens else tokens)


def token_batches(
    pairs: list[tuple[str, str]], german: Subwords, english: Subwords, num_tokens: int, seed: int
) -> list[Batch]:
    """Sentences of about one length together, as many as `num_tokens` allow; the batches in random order."""
    coded = sorted(
        ((german.encode(de), english.encode(en)) for de, en in pairs), key=lambda pair: (len(pair[1]), len(pair[0]))
    )
    batches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
    longest = 0
    for source, target in coded:
        longest = max(longest, len(source), len(target))
        if (len(batches[-1]) + 1) * longest > num_tokens and batches[-1]:
            batches.append([])
            longest = max(len(source), len(target))
        batches[-1].append((source, target))
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()
    return [_padded(batches[i]) for i in order]


def _padded(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
    sources, targets = zip(*pairs, strict=True)
    return {
        "source": pad_sequence(sources, batch_first=True, padding_value=PAD),
        "labels": pad_sequence(targets, batch_first=True, padding_value=IGNORE),
    }
