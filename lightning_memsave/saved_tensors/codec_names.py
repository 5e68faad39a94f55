"""Names of codecs, and names from papers that stand for some of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.samples import Sampling

FIDELITIES = {
    "exact": Fidelity.EXACT,
    "bf16": Fidelity.BF16,
    "int8": Fidelity.INT8,
    "int4": Fidelity.INT4,
    "int2": Fidelity.INT2,
}
"""What a module or an operation may be set to, and how much of a tensor that keeps."""
HEAD = "linear-cross-entropy"
CODECS = (*FIDELITIES, "int4-chain", "offload", HEAD)
LOSSY = ("bf16", "int8", "int4", "int2", "int4-chain")
FEW_BITS = tuple(f"fewbit-{bits}" for bits in (1, 2, 3, 4))
"""Levels of activations' derivatives, beside any other codec."""


class Alias(NamedTuple):
    """What a paper's name stands for."""

    codecs: tuple[str, ...]
    operations: Mapping[str, str] = {}

    def __str__(self) -> str:
        return ", ".join([*self.codecs, *(f"{name} in {codec}" for name, codec in self.operations.items())])


ALIASES: Mapping[str, Alias] = {
    "dropit": Alias(("topk-0.1",)),
    "inplace-abn": Alias(("exact",)),
    "inverted": Alias(("exact",)),
    "mesa": Alias(("int8",), {"softmax": "int8"}),
    "tempo": Alias(("exact",)),
}
"""Methods of papers whose promise a setting keeps: tests/techniques/test_codec_aliases.py."""

KNOWN = (*CODECS, "topk-0.1", "rows-0.3", *FEW_BITS, *ALIASES)
"""Names to choose from; the fractions are examples."""


def sampling_of(codec: str) -> Sampling | None:
    """Return what `"topk-0.1"` or `"rows-0.3"` stands for; `None` for other codecs.

    >>> sampling_of("rows-0.3"), sampling_of("rows-3"), sampling_of("int4")
    (Sampling(kind='rows', fraction=0.3), None, None)
    """
    kind, _, fraction = codec.partition("-")
    is_one = kind in ("topk", "rows") and re.fullmatch(r"\d*\.?\d+", fraction) and 0 < float(fraction) <= 1
    return Sampling(kind, float(fraction)) if is_one else None


def is_codec(name: object) -> bool:
    """Return whether a codec or a paper's method has this name."""
    return isinstance(name, str) and (name in KNOWN or sampling_of(name) is not None)


def explained(codec: str) -> str:
    """Return a codec's name, and behind a paper's name what it stands for.

    >>> explained("int4"), explained("mesa")
    ('int4', 'mesa (int8, softmax in int8)')
    """
    return f"{codec} ({ALIASES[codec]})" if codec in ALIASES else codec
