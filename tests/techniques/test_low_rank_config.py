"""Settings of low-rank training."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave import LowRank, MemSave


@pytest.mark.parametrize("rank", [0, -3, 1.0, 0.0, -0.5, True, "16", float("nan"), None])
def test_wrong_ranks(rank):
    with pytest.raises(ValueError, match=r"`low_rank` must be a positive rank, or a fraction .* between 0 and 1, got"):
        LowRank(rank=rank)


def test_the_slot_takes_a_rank_a_fraction_and_settings():
    assert MemSave(low_rank=8).recipe.get(LowRank) == LowRank(rank=8)
    assert MemSave(low_rank=0.2).recipe.get(LowRank) == LowRank(rank=0.2)
    assert MemSave(low_rank=LowRank(rank=8, modules="blocks.*")).recipe.get(LowRank).modules == "blocks.*"
    assert MemSave(low_rank=False).recipe.get(LowRank) is None
    with pytest.raises(ValueError, match="got True"):
        MemSave(low_rank=True)


def test_the_rank_of_a_shape():
    assert LowRank(rank=7).rank_of(torch.Size([3, 3])) == 7
    assert LowRank(rank=0.5).rank_of(torch.Size([100, 100])) == 25
    assert LowRank(rank=0.1).rank_of(torch.Size([4, 4])) == 0
