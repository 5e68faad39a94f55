"""A rehearsal leaves the tensors of a batch as they were, whatever a step does to them."""

import warnings

import numpy as np
import pytest
import torch

from lightning_memsave import Ledger
from lightning_memsave.loops.side_effect_free import values_kept


def changed_by(edit, *tensors):
    with values_kept(list(tensors)):
        edit(*tensors)
    return tensors


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x.mul_(2),
        lambda x: x.data.mul_(2),  # which no version tells
        lambda x: x.transpose_(0, 1),
        lambda x: x.unsqueeze_(0).zero_(),
        lambda x: x.resize_(50).zero_(),
        lambda x: x.set_(torch.zeros(7)),
        lambda x: x.detach().numpy().fill(3),
        lambda x: setattr(x, "data", 2 * x),
        lambda x: setattr(x, "data", x.double()[:2]),
    ],
)
@pytest.mark.parametrize("number", [0.5, torch.nan])
def test_values_and_shapes_come_back(edit, number):
    x = torch.randn(4, 3)
    x[1, 1] = number
    before = x.clone()
    changed_by(edit, x)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert x.stride() == before.stride()


def test_a_part_of_much_is_all_that_is_kept():
    """The rest of the memory belongs to others, who may write to it meanwhile."""
    everything = torch.zeros(1000)
    part = everything[:10]
    with Ledger() as ledger:
        changed_by(lambda part: (part.add_(1), everything[500:].fill_(7)), part)
    assert part.sum() == 0
    assert everything[500:].unique() == 7
    assert ledger.measurement.peak_bytes == everything.nbytes + part.nbytes


def test_memory_that_is_read_only_is_not_written(tmp_path):
    np.array([1.0, np.nan]).tofile(tmp_path / "data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of memory that cannot be written
        x = torch.from_numpy(np.memmap(tmp_path / "data", mode="r", dtype=np.float64))
    changed_by(lambda x: None, x)
    assert x[0] == 1


def test_other_layouts_get_their_values_back():
    parts = [torch.ones(2), torch.ones(3)]
    sparse, nested = torch.eye(3).to_sparse(), torch.nested.nested_tensor(parts, layout=torch.jagged)
    changed_by(lambda sparse, nested: (sparse.mul_(2), nested.mul_(2)), sparse, nested)
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert nested.values().sum() == 5


def test_views_of_one_storage_come_back_and_stay_views():
    base = torch.randn(6, 5)
    before = base.clone()
    part, wide = base[1:3], base[:1].expand(4, 5)
    changed_by(lambda *_: base.add_(1), part, wide)
    assert torch.equal(base[:3], before[:3])
    assert torch.equal(base[3:], before[3:] + 1)  # which is not the batch's
    part.add_(1)
    assert torch.equal(base[1:3], before[1:3] + 1)


def test_the_error_of_a_step_is_its_own():
    x, sparse = torch.ones(3), torch.eye(3).to_sparse()

    def fails(*_):
        x.resize_(0)
        raise RuntimeError("of the step")

    with pytest.raises(RuntimeError, match="of the step"):
        changed_by(fails, x, sparse)
    assert torch.equal(x, torch.ones(3))
