"""The storages behind tensors of every layout, and the tensors of any batch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from lightning_memsave.measuring import Ledger
from lightning_memsave.measuring.storages import storages, tensors_in

DENSE = torch.eye(8)  # eight values, on the diagonal


def num_bytes(tensor):
    return [storage.nbytes() for storage in storages(tensor)]


def compressed(layout, *block):
    """Eight blocks on the diagonal."""
    size = [8 * each for each in block or (1, 1)]
    return torch.sparse_compressed_tensor(torch.arange(9), torch.arange(8), torch.ones(8, *block), size, layout=layout)


def test_a_view_has_the_storage_of_its_base():
    base = torch.zeros(100)
    for view in (base[3:], base.view(10, 10).t(), base.detach(), base.expand(7, 100), base.view(torch.uint8)[:1]):
        (storage,) = storages(view)
        assert storage._cdata == base.untyped_storage()._cdata
        assert storage.nbytes() == 400


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (lambda: DENSE.to_sparse(), [2 * 8 * 8, 8 * 4]),
        (lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)), [2 * 8, 2 * 4]),  # not coalesced
        (lambda: compressed(torch.sparse_csr), [9 * 8, 8 * 8, 8 * 4]),
        (lambda: compressed(torch.sparse_csc), [9 * 8, 8 * 8, 8 * 4]),
        (lambda: compressed(torch.sparse_bsr, 2, 3), [9 * 8, 8 * 8, 8 * 2 * 3 * 4]),
        (lambda: compressed(torch.sparse_bsc, 2, 3), [9 * 8, 8 * 8, 8 * 2 * 3 * 4]),
    ],
    ids=["coo", "coo, twice", "csr", "csc", "bsr", "bsc"],
)
def test_a_sparse_tensor_has_one_storage_for_each_of_its_parts(tensor, expected):
    assert num_bytes(tensor()) == expected


def test_a_wrapper_has_those_of_what_it_wraps():
    a, b = torch.zeros(10), torch.zeros(10)
    wrapped = TwoTensor(a, TwoTensor(b, DENSE.sum(0).repeat(2)[:10]))
    assert num_bytes(wrapped) == [40, 40, 64]
    assert [s._cdata for s in storages(wrapped)][:2] == [t.untyped_storage()._cdata for t in (a, b)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_has_its_values(layout):
    parts = [torch.zeros(2, 5), torch.zeros(3, 5)]
    assert 5 * 5 * 4 in num_bytes(torch.nested.nested_tensor(parts, layout=layout))


def test_batches_of_any_shape():
    class Graph:
        def __init__(self):
            self.nodes, self.me = torch.zeros(10), self
            self.parts = {"edges": [torch.zeros(5), "name"], "none": None}

    batch = (Graph(), {"x": torch.zeros(3)}, [torch.zeros(2), 7])
    assert sorted(t.numel() for t in tensors_in(batch)) == [2, 3, 5, 10]
    with Ledger().watching(nn.Module(), batch=batch) as ledger:
        pass
    assert ledger.measurement.by_category["data"] == ledger.measurement.peak_bytes == 20 * 4


@dataclass
class Sample:
    image: torch.Tensor
    more: object = None


Pair = namedtuple("Pair", "first second")


def test_dataclasses_and_named_tuples_are_looked_into():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(tensors_in(Pair(Sample(a, more=[Sample(b)]), {"c": c})))
    assert all(any(each is tensor for each in found) for tensor in (a, b, c))
    assert len(found) == 3


def test_an_object_that_stands_twice_is_looked_into_once():
    sample = Sample(torch.zeros(4))
    first, second = Sample(sample), Sample(sample)
    first.more, second.more = second, first
    assert [t.numel() for t in tensors_in([first, second, sample])] == [4]


@pytest.mark.parametrize("leaf", [nn.Linear(2, 2), Sample, None, 3, "text", {1, 2}, object(), lambda: 0])
def test_modules_classes_and_what_has_no_tensors_are_no_batch(leaf):
    assert list(tensors_in({"x": [leaf]})) == []


def test_the_mode_of_a_fake_tensor_is_not_searched():
    with FakeTensorMode() as mode:
        fake = torch.empty(3)
    mode.cached = [torch.zeros(7)]
    assert list(tensors_in(vars(fake))) == []
