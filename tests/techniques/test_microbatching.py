from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BatchEncoding

from lightning_memsave import Ledger, Microbatching, microbatches
from lightning_memsave.techniques.microbatching import (
    UnsplittableBatchError,
    active_microbatching,
    batch_size,
    split,
    why_not_exact,
)
from lightning_memsave.techniques.microbatching.split import cloned, take
from tests.contracts.spec import Spec

SPEC = Spec(config=Microbatching(size=16), loss_class="exact", bit_equal=False, shrinks="activations")


@given(num_samples=st.integers(1, 60), size=st.integers(1, 70))
def test_parts_cover_the_batch_in_order_in_sizes_that_differ_by_at_most_one(num_samples, size):
    batch = {"x": torch.arange(num_samples), "names": [str(i) for i in range(num_samples)]}
    parts = split(batch, size)
    sizes = [n for _, n in parts]
    assert torch.equal(torch.cat([part["x"] for part, _ in parts]), batch["x"])
    assert [name for part, _ in parts for name in part["names"]] == batch["names"]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-num_samples // size)


@given(num_samples=st.integers(2, 40), size=st.integers(1, 40))
def test_weighted_gradients_add_up_to_the_gradient_of_the_mean(num_samples, size):
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 3, dtype=torch.float64, generator=generator)
    w = torch.randn(3, dtype=torch.float64, generator=generator, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ w).exp().mean(), w)
    for part, weight in microbatches(x, size=size):
        ((part @ w).exp().mean() * weight).backward()
    torch.testing.assert_close(w.grad, expected, rtol=1e-12, atol=1e-14)


def test_parts_are_views_and_cost_no_memory():
    x = torch.zeros(8, 4)
    assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part, _ in split(x, 3))


def test_scalars_constants_and_unrelated_lists_are_given_to_every_part():
    batch = {"x": torch.zeros(4, 2), "temperature": torch.tensor(0.5), "task": "a", "classes": ["cat", "dog"], "n": 3}
    for part, _ in split(batch, 2):
        assert part["temperature"] is batch["temperature"]
        assert (part["task"], part["classes"], part["n"]) == ("a", ["cat", "dog"], 3)


def test_a_list_of_containers_without_tensors_has_one_for_each_sample():
    meta = [{"id": i, "boxes": [i] * i, "scale": torch.tensor(float(i))} for i in range(5)]
    captions = [["a"] * i for i in range(5)]
    batch = {"x": torch.arange(5), "meta": meta, "captions": captions, "of the whole": [["a", "b"], ["c"]]}
    for part, n in split(batch, 2):
        assert [each["id"] for each in part["meta"]] == part["x"].tolist()
        assert [len(each) for each in part["captions"]] == part["x"].tolist()
        assert len(part["meta"]) == n
        assert part["of the whole"] == batch["of the whole"]
    transposed = {"x": torch.arange(5), "captions": [list("abcde"), list("fghij")]}  # as `default_collate` has it
    assert [part["captions"][1] for part, _ in split(transposed, 2)] == [["f", "g"], ["h", "i"], ["j"]]
    with pytest.raises(UnsplittableBatchError, match="list of 2 containers with lists of 2"):
        split({"x": torch.arange(2), "captions": [["a", "b"], ["c", "d"]]}, 1)
    with pytest.raises(UnsplittableBatchError, match="list of 2 containers"):
        split({"x": torch.arange(2), "objects": [{"name": ("a", "b")}, {"name": ("c", "d")}]}, 1)


def test_frozen_dataclasses_and_dict_subclasses_keep_their_type_and_extras():
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: torch.Tensor

    class Tagged(dict):
        tag = None

    tagged = Tagged(x=torch.zeros(4))
    tagged.tag = "kept"
    part = take({"a": Frozen(torch.arange(4)), "b": tagged}, 1, 3, 4)
    assert isinstance(part["a"], Frozen)
    assert part["a"].x.tolist() == [1, 2]
    assert isinstance(part["b"], Tagged)
    assert part["b"].tag == "kept"
    assert len(part["b"]["x"]) == 2
    assert len(tagged["x"]) == 4  # the user's batch is not touched


def test_a_clone_shares_nothing_that_a_step_may_change():
    @dataclasses.dataclass
    class Pair:
        x: torch.Tensor
        y: torch.Tensor

    class Scene:
        """An object of the user's: it is shared."""

    x, scene = torch.zeros(4, requires_grad=True), Scene()
    encoding = BatchEncoding({"ids": torch.zeros(4), "names": ["a"] * 4})
    batch = (Pair(x, x), encoding, np.zeros(4), torch.tensor(0.5), scene)
    (pair, ids, array, scalar, same), untouched = cloned(batch), [0.0] * 4
    assert pair.x is pair.y
    assert type(ids) is BatchEncoding
    assert same is scene
    with torch.no_grad():
        pair.x.add_(1)
    ids["ids"].add_(1)
    ids["names"].append("b")
    array += 1
    scalar.add_(1)
    assert x.tolist() == encoding["ids"].tolist() == batch[2].tolist() == untouched
    assert len(encoding["names"]) == 4
    deep = collections.deque([x])
    assert cloned({"d": deep})["d"][0] is not x
    assert batch[3] == 0.5


@pytest.mark.parametrize("batch", [{"x": torch.zeros(3), "y": torch.zeros(4)}, {"n": 1}, [torch.tensor(1.0)], None])
def test_ambiguous_batches_are_refused_and_name_the_way_out(batch):
    with pytest.raises(UnsplittableBatchError, match="split_fn"):
        batch_size(batch)


def test_an_empty_batch_is_one_part():
    assert split(torch.zeros(0, 3), 2)[0][1] == 0


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "10", None])
def test_wrong_sizes_are_refused_by_name(size):
    with pytest.raises(ValueError, match="microbatch"):
        Microbatching(size=size)


def test_wrong_reduction_is_refused():
    with pytest.raises(ValueError, match=r"reduction.*weight_fn"):
        Microbatching(size=1, reduction="median")


def test_modules_that_see_the_batch_are_named_only_while_they_are_active():
    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Dropout(0.0), nn.LSTM(3, 3, 2, dropout=0.1), nn.GroupNorm(1, 3)
    )
    assert [reason.split()[0] for reason in why_not_exact(model)] == ["0", "1", "3"]
    assert why_not_exact(model.eval()) == ()


class DropPath(nn.Module):
    """As in timm, which is not installed here: known by its name."""


def test_other_modules_that_see_the_batch_are_named():
    model = nn.Sequential(
        DropPath(),
        nn.RReLU(),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.InstanceNorm1d(3),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    )
    names = [reason.split()[0] for reason in why_not_exact(model)]
    assert names == ["0", "1", "2", "4.parametrizations.weight.0"]
    assert why_not_exact(model.eval()) == ()


def test_a_split_fn_tells_the_samples():
    config = Microbatching(split_fn=lambda batch, size: [batch["x"][i : i + size] for i in range(0, 6, size)])
    assert config.num_samples({"x": list(range(6)), "weights": torch.ones(3)}) == 6


def test_activations_shrink_by_the_ratio_of_the_sizes_to_the_byte():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.zeros(32, 256, 4)

    def activations(size):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with Ledger().watching(model, batch=x) as ledger:
            for part, weight in microbatches(x, size=size):
                (model(part).sum() * weight).backward()
        return ledger.measurement.by_category["activations"]

    for size in (32, 16, 8, 1):  # Tanh's output for each sample; the loss and the weighted loss
        assert activations(size) == size * 256 * 4 * 4 + 2 * 4


def test_another_size_has_the_other_settings_of_the_run():
    config = Microbatching(size=4, reduction="mean", weight_fn=lambda part: part.sum())
    x = torch.tensor([1.0, 2.0, 3.0, 2.0])
    with active_microbatching(config, lambda num_parts: None):
        weights = [weight for _, weight in microbatches(x, size=2)]
    assert weights == [3 / 8, 5 / 8]


def test_parts_of_a_sum_have_no_shares():
    x = torch.arange(5.0, requires_grad=True)
    with active_microbatching(Microbatching(size=2, reduction="sum"), lambda num_parts: None):
        for part, weight in microbatches(x):
            (part.square().sum() * weight).backward()
    assert torch.equal(x.grad, 2 * x.detach())


def test_a_sum_has_no_use_for_weights():
    with pytest.raises(ValueError, match=r'weight_fn` is used with reduction="auto" or "mean" only'):
        Microbatching(reduction="sum", weight_fn=len)


def test_lists_of_samples_are_cut_as_lists():
    images = [torch.zeros(3, 8, 8 + i) for i in range(5)]
    targets = [{"boxes": torch.zeros(i, 4)} for i in range(5)]
    assert [(len(a), len(b), n) for (a, b), n in split((images, targets), 2)] == [(2, 2, 2), (2, 2, 2), (1, 1, 1)]
    assert [len(part) for part, _ in split(targets, 3)] == [3, 2]
    assert split((images, targets), 2)[0][0][0][1] is images[1]


def test_a_list_of_equal_tensors_is_refused_and_entries_are_named():
    with pytest.raises(UnsplittableBatchError, match=r"a list of 4 tensors of one shape.*split_fn"):
        batch_size([torch.zeros(3, 8, 8)] * 4)
    with pytest.raises(UnsplittableBatchError, match="2 in `edge_index`; 9 in `x`"):
        batch_size({"x": torch.zeros(9, 3), "edge_index": torch.zeros(2, 20)})


@pytest.mark.parametrize(
    "batch",
    [[torch.zeros(3) for _ in range(6)], [{"x": torch.zeros(2)} for _ in range(6)], [(torch.zeros(3), 1)] * 6],
    ids=["tensors", "dictionaries", "tuples"],
)
def test_a_list_of_alike_items_is_not_guessed_about(batch):
    with pytest.raises(UnsplittableBatchError, match=r"a list of 6 items of one kind.*Pass `tuple\(batch\)`"):
        next(iter(microbatches(batch, size=2)))
    assert [len(part) for part, _ in microbatches([torch.zeros(6, 3), torch.zeros(6)], size=2)] == [2, 2, 2]
    parts = [part for part, _ in microbatches(tuple(torch.zeros(4, 3) for _ in range(6)), size=2)]
    assert [part[0].shape for part in parts] == [(2, 3), (2, 3)]


def test_the_smallest_is_a_goal_of_auto():
    assert Microbatching.from_shorthand("smallest") == Microbatching(size="auto", goal="smallest")
    with pytest.raises(ValueError, match=r'`Microbatching.goal` must be "fit" or "smallest", got \'least\''):
        Microbatching(goal="least")
    with pytest.raises(ValueError, match=r'goal` is used with size="auto" only'):
        Microbatching(size=4, goal="smallest")
