"""A rehearsal leaves the tensors of a batch as they were, whatever a step does to them."""

import pytest
import torch

from lightning_memsave.strategies.rehearsal import values_kept


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
    ],
)
def test_values_and_shapes_come_back(edit):
    x = torch.randn(4, 3)
    before = x.clone()
    changed_by(edit, x)
    assert torch.equal(x, before)
    assert x.stride() == before.stride()


def test_views_of_one_storage_come_back_and_stay_views():
    base = torch.randn(6, 5)
    before = base.clone()
    part, wide = base[1:3], base[:1].expand(4, 5)
    changed_by(lambda *_: base.add_(1), part, wide)
    assert torch.equal(base, before)
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
