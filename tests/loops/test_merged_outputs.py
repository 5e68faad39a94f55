"""What steps return for microbatches, put together."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch

from lightning_memsave.loops.merged_outputs import merge_outputs

Pair = namedtuple("Pair", "y names")


def merged(*values, sizes=(2, 1)):
    return merge_outputs([{"value": value} for value in values], list(sizes))["value"]


def test_tuples_are_merged_by_their_parts():
    y, names = merged((torch.tensor([1, 2]), ["a", "b"]), (torch.tensor([3]), ["c"]))
    assert y.tolist() == [1, 2, 3]
    assert names == ["a", "b", "c"]
    pair = merged(Pair(torch.tensor([1]), ["a"]), Pair(torch.tensor([2]), ["b"]), sizes=(1, 1))
    assert type(pair) is Pair
    assert pair.y.tolist() == [1, 2]
    assert pair.names == ["a", "b"]


def test_arrays_of_whatever_numpy_holds_are_joined():
    assert merged(np.array(["a", "b"]), np.array(["c"])).tolist() == ["a", "b", "c"]
    assert merged(np.array([1.5, 2]), np.array([3.0])).tolist() == [1.5, 2, 3]
    objects = np.array([{}, None], dtype=object), np.array([1], dtype=object)
    assert merged(*objects).tolist() == [{}, None, 1]
    assert merged(np.array(1.0), np.array(4.0)).tolist() == 2.0


def test_what_cannot_be_merged_is_a_list_of_all():
    texts = np.array(["a"]), np.array(["b"])
    assert merged(*texts) == list(texts)
    assert merged((1, 2), (1, 2, 3)) == [(1, 2), (1, 2, 3)]
    shapes = torch.Size([2, 8]), torch.Size([1, 8])
    assert merged(*shapes) == ([2, 1], 8)  # no shape of anything, and no error
    assert merged(shapes[0], shapes[0]) == (2, 8)
