"""What steps return for microbatches, put together."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memsave import MemSave
from lightning_memsave.loops.merged_outputs import merge_outputs
from tests.harness import fit, largest_difference
from tests.loops.whole_batches import EXACT, Module, batches, both, unpack

Pair = namedtuple("Pair", "y names")


def merged(*values, sizes=(2, 1)):
    return merge_outputs([{"value": value} for value in values], list(sizes))["value"]


def test_rows_of_other_lengths_are_not_joined():
    parts = [{"y": torch.zeros(2, 5)}, {"y": torch.zeros(2, 4)}]
    assert [each.shape for each in merge_outputs(parts, [2, 2])["y"]] == [(2, 5), (2, 4)]


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


Two = namedtuple("Two", "a b")


@pytest.mark.parametrize(
    "extra",
    [
        lambda logits, y, i: {"array": logits.detach().numpy()},
        lambda logits, y, i: {"pair": (logits.detach(), None), "named": Two(logits.detach(), y)},
        lambda logits, y, i: {
            "flag": True,
            "count": 3,
            "tensor_count": torch.tensor(3),
            "tensor_flag": torch.tensor(True),
        },
        lambda logits, y, i: {"ids": ["i"] * len(y), "inner": {"y": y, "names": ["s"] * len(y)}},
    ],
    ids=["numpy", "tuples", "scalars", "lists"],
)
def test_outputs_of_any_kind_are_those_of_the_whole_batch(extra):
    class Returns(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            x, y = unpack(batch)
            return {"loss": loss, **extra(self.net(x), y, batch_idx)}

        def on_train_batch_end(self, outputs, *args):
            for name, value in outputs.items():
                if isinstance(value, Tensor) and name != "loss":
                    assert not value.is_floating_point()  # counts and flags keep their type

    plain, ours = both(Returns(), batches(), MemSave(microbatch=3))
    for a, b in zip(plain.outputs, ours.outputs, strict=True):
        for name in a:
            if name == "array":
                assert abs(a[name] - b[name]).max() < EXACT
            elif name == "flag":
                assert b[name] is True
            else:
                assert largest_difference(a[name], b[name]) < EXACT, name


def test_outputs_that_differ_between_the_parts_become_lists():
    class Returns(Module):
        def training_step(self, batch, batch_idx):
            first = len(batch[0]) == 4
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "sometimes": loss.detach() if first else None, **({"once": "x"} if first else {})}

    ours = fit(Returns().double(), batches(sizes=(13,)), MemSave(microbatch=4), precision="64-true", max_epochs=1)
    assert ours.outputs[0]["once"] == "x"
    assert len(ours.outputs[0]["sometimes"]) == 4
    assert ours.outputs[0]["sometimes"][1:] == [None] * 3
