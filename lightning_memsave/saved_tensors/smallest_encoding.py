"""The smallest encoding that the consumers of a storage allow, given what is in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_memsave.saved_tensors import encodings
from lightning_memsave.saved_tensors.code_rows import rows_in_memory
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.norm_recompute import Statistics, raise_for_normalisations
from lightning_memsave.saved_tensors.saved_storage import SavedStorage
from lightning_memsave.saved_tensors.seeds import NoiseSeeds


def smallest_encoding(
    entry: SavedStorage, statistics: Mapping[int, Statistics | None], noise: NoiseSeeds
) -> encodings.Encoding | None:
    """Return the encoding; `None` where the bytes themselves are needed, or nothing smaller holds the values.

    Args:
        entry: holds the bytes.
        statistics: of normalisations, by the number of the call; `None` where they are not known.
        noise: seeds of the code's noise.
    """
    need = entry.need
    if need == Fidelity.EXACT and entry.has_gradient:
        return None  # not asked for two values, which would wait for the device
    flat = entry.flat()
    if flat.dtype == torch.bool:
        return encodings.Mask.of(flat)
    if not flat.dtype.is_floating_point:
        is_index = flat.dtype in (torch.int64, torch.int32, torch.int16)
        return encodings.IntDowncast.of(flat) if is_index else None
    if need == Fidelity.SHAPE:
        return encodings.Shape(flat)
    if need == Fidelity.MASK:
        return encodings.Mask.positive(flat) if entry.interval is None else encodings.RangeMask(flat, *entry.interval)
    if need == Fidelity.EXACT:
        return encodings.TwoValues.of(flat)
    rows = entry.rows or rows_in_memory(*entry.made_as, flat.numel())
    if need == Fidelity.PART:
        assert entry.part is not None, "noted with the need"
        return entry.part.encode(flat, entry.fidelity_of_values, noise.next_seed(), rows, entry.keeps_sign)
    need = raise_for_normalisations(entry, rows, statistics)
    if need == Fidelity.EXACT:
        return None
    if need == Fidelity.BF16:
        return encodings.Bf16.of(flat, noise.next_seed())
    return encodings.IntCodes.of(flat, need, noise.next_seed(), entry.keeps_sign, rows)
