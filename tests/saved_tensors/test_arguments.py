"""What a call was given comes back: structures as they were, objects made anew, tensors by reference."""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import DynamicCache

from lightning_memsave.saved_tensors.arguments import Arguments


@dataclass
class Batch:
    x: torch.Tensor
    history: list[int] = field(default_factory=list)


def test_tensors_come_back_as_they_are():
    x, y = torch.zeros(2), torch.ones(3)
    found = Arguments((x, y), {})
    args, kwargs = found.again(found.leaves)
    assert args[0] is x
    assert args[1] is y
    assert (len(args), kwargs) == (2, {})
    assert [t is u for t, u in zip(found.tensors, (x, y), strict=True)] == [True, True]


def test_structures_come_back_with_other_leaves():
    x, mask = torch.zeros(2), torch.ones(2)
    found = Arguments(({"x": [x, 3]}, "mean"), {"mask": (mask, None)})
    others = [leaf + 5 if isinstance(leaf, torch.Tensor) else leaf for leaf in found.leaves]
    args, kwargs = found.again(others)
    assert args[0]["x"][0].tolist() == [5.0, 5.0]
    assert (args[0]["x"][1], args[1], kwargs["mask"][1]) == (3, "mean", None)
    assert kwargs["mask"][0].tolist() == [6.0, 6.0]
    assert x.tolist() == [0.0, 0.0]


def test_an_object_is_made_anew_as_it_was_with_the_tensors_that_it_had():
    batch, x = Batch(torch.zeros(2)), torch.ones(2)
    before = batch.x
    found = Arguments((x, batch), {})
    assert {id(t) for t in found.tensors} == {id(x), id(before)}
    batch.history.append(7)
    batch.x = torch.full((2,), 9.0)
    for _ in range(2):
        (_, again), _ = found.again(found.leaves)
        assert again is not batch
        assert again.history == []
        assert again.x is before
        again.history.append(1)  # by the call that is repeated
    assert batch.history == [7]


def test_what_has_no_state_to_write_down_is_handed_on():
    steps, lookup = (n for n in range(3)), nn.Linear(1, 1)
    found = Arguments((torch.zeros(1), steps), {"module": lookup})
    args, kwargs = found.again(found.leaves)
    assert args[1] is steps
    assert kwargs["module"] is lookup
    assert list(steps) == [0, 1, 2]


def test_generators_are_found_among_arguments_and_in_objects():
    mine, hidden = torch.Generator(), random.Random(0)
    holder = Batch(torch.zeros(1))
    holder.source = {"rng": hidden}
    found = Arguments((mine, holder, torch.zeros(1)), {"again": hidden})
    assert {id(generator) for generator in found.generators()} == {id(mine), id(hidden)}
    assert Arguments((torch.zeros(1),), {}).generators() == []


def test_released_arguments_keep_no_tensor_alive():
    x, batch = torch.zeros(2), Batch(torch.zeros(2))
    references = weakref.ref(x), weakref.ref(batch.x)
    found = Arguments((x, batch), {"scale": 2.0})
    leaves = [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in found.leaves]
    found.release()
    del x, batch
    assert [reference() for reference in references] == [None, None]
    (x, batch), kwargs = found.again(leaves)  # whoever kept the leaves elsewhere
    assert (x, batch.x, batch.history, kwargs) == ([0.0, 0.0], [0.0, 0.0], [], {"scale": 2.0})


def computed():
    return torch.randn(1, 1, 2, 4, requires_grad=True) * 2


def test_of_a_cache_the_layers_that_a_call_left_alone_are_told():
    cache = DynamicCache()
    for layer in range(3):
        cache.update(computed(), computed(), layer)
    before = [(layer.keys, layer.values) for layer in cache.layers]
    found = Arguments((computed(),), {"cache": cache})
    cache.update(computed(), computed(), 1)
    numbers = found.untouched_in_caches((torch.zeros(1),), {"cache": cache})
    untouched = {id(found.leaves[number]) for number in numbers}
    assert untouched == {id(t) for layer in (0, 2) for t in before[layer]}
    (_,), kwargs = found.again(found.leaves)
    assert kwargs["cache"].get_seq_length(1) == 2
    assert cache.get_seq_length(1) == 4


def test_other_objects_have_no_layers_to_leave_alone():
    batch = Batch(computed())
    found = Arguments((torch.zeros(1), batch), {})
    assert found.untouched_in_caches((torch.zeros(1), batch), {}) == []
