"""What is known of fake tensors against the real ones: never a wrong value, never too narrow a range."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_memsave.simulation import value_propagation
from lightning_memsave.simulation.fake_model import fake_tensors
from lightning_memsave.simulation.known_sizes import ReadsValueError
from lightning_memsave.simulation.value_propagation import FactsMode, note_values
from lightning_memsave.torch_internals.fake_tensors import facts_of, has_two_values, integer_range, is_fake


def ids():
    return torch.tensor([[5, 0, 7, 2], [1, 1, 3, 6]])


# ---------------------------------------------------------------------- values that follow from the batch
PROGRAMS = {
    "mask": lambda x: (x != 0).long(),
    "positions": lambda x: (x != 0).long().cumsum(1) - 1,
    "lengths": lambda x: (x != 0).sum(1),
    "causal": lambda x: torch.ones(4, 4, dtype=torch.bool).tril() & (x[:1] > 0),
    "shifted": lambda x: F.pad(x[:, :-1], (1, 0), value=9),
    "joined": lambda x: torch.cat([x, torch.arange(4).expand(1, 4)]),
    "chosen": lambda x: torch.where(x > 2, x, torch.full_like(x, -1)),
    "filled": lambda x: x.masked_fill(x == 1, -100),
    "sorted": lambda x: x.sort(1).indices,
    "counted": lambda x: F.one_hot(x.clamp(max=3), 4),
    "halves": lambda x: x.float() / 2,
    "edited": lambda x: x.clone().add_(3).mul_(2),
    "edited in part": lambda x: x.clone().index_fill_(1, torch.tensor([1]), 8),
    "through a view": lambda x: [y := x.clone(), y[0].zero_(), y][-1],
    "a row": lambda x: x[1],
    "another type": lambda x: x.to(torch.uint8).to(torch.float64),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_that_follow_from_the_batch_are_the_real_ones(name):
    program, x = PROGRAMS[name], ids()
    real = program(x.clone())
    with fake_tensors(nn.Identity()) as fake:
        made = program(fake(x))
        assert is_fake(made)
        assert made.tolist() == real.tolist()
        assert bool((made == made.clone()).all())
        assert torch.equal(made, made.clone())
        if made.dtype == torch.int64:
            assert integer_range(made)[0] <= int(real.min()) <= int(real.max()) <= integer_range(made)[1]
    assert torch.equal(x, ids())


def test_a_branch_goes_the_way_of_the_real_step():
    def way(mask):
        return "dense" if mask.all() else "padded" if mask.any() else "empty"

    for mask in (torch.ones(3, 4).bool(), torch.tensor([[True, False]]), torch.zeros(5, dtype=torch.bool)):
        with fake_tensors(nn.Identity()) as fake:
            assert way(fake(mask)) == way(mask)


def test_what_is_drawn_or_computed_of_parameters_is_not_known_and_the_line_is_told():
    model, batch, whole = nn.Linear(4, 4), torch.randn(2, 4), ids()
    with fake_tensors(model) as fake:
        for unknown in (
            lambda: torch.rand(3).sum(),
            lambda: model(fake(batch)).sum(),
            lambda: torch.randint(5, (3,)).max(),
            lambda: fake(batch).sum(),  # floats of the batch are not followed
            lambda: fake(whole).float().mean() * model.weight.sum(),
        ):
            value = unknown()
            with pytest.raises(ReadsValueError, match=r"read at .*test_value_propagation\.py:\d+ test_what_is_drawn"):
                value.item()
        with pytest.raises(ReadsValueError):
            torch.equal(torch.rand(3), torch.zeros(3))


def test_values_that_were_changed_in_an_unknown_way_are_forgotten_through_all_views():
    real = ids()
    with fake_tensors(nn.Identity()) as fake:
        x = fake(real)
        row, copy = x[0], x.clone()
        assert row.tolist() == [5, 0, 7, 2]
        x[:, 1].add_(torch.randint(5, (2,)))
        for tensor in (x, row, x.t()):
            with pytest.raises(ReadsValueError):
                tensor.tolist()
        assert copy.tolist() == real.tolist()
        x.zero_()
        assert integer_range(x) == (0, 0)


def test_large_tensors_are_not_followed(monkeypatch):
    monkeypatch.setattr(value_propagation, "_MOST_VALUES", 7)
    eight, seven = ids(), torch.arange(7)
    with fake_tensors(nn.Identity()) as fake:
        x = fake(eight)
        assert integer_range(x) == (0, 7)
        with pytest.raises(ReadsValueError):
            x[0].tolist()
        assert fake(seven).tolist() == list(range(7))


def test_nothing_of_the_values_lives_on():
    gc.collect()  # of tests that ended with an error
    before, real = len(value_propagation._values), ids()
    with fake_tensors(nn.Identity()) as fake:
        x = fake(real)
        y = x + 1
        assert y.tolist()
        assert len(value_propagation._values) > before
    del x, y, fake
    gc.collect()
    assert len(value_propagation._values) == before
    assert value_propagation._lost == {}


def test_of_real_floats_nothing_is_noted():
    floats, integers = torch.ones(3), torch.ones(3, dtype=torch.int64)
    with fake_tensors(nn.Identity()) as fake:
        x, y = fake(floats), fake(integers)
        note_values(x, floats)
        assert facts_of(x) == (None, None, None)
        assert facts_of(y) == (1, 1, 1)


# ---------------------------------------------------------------------- who reads
def read_by(module, value):
    room = {"__name__": module}
    exec("def read(value):\n    return value.item()", room)
    return room["read"](value)


@pytest.mark.parametrize("library", ["lightning.pytorch.loops.x", "torchmetrics.aggregation", "pytorch_lightning.core"])
def test_who_only_logs_gets_some_value(library):
    with fake_tensors(nn.Identity()):
        assert type(read_by(library, torch.rand(3).sum())) is float
        assert type(read_by(library, torch.randint(5, (3,)).sum())) is int
        assert read_by(library, torch.rand(3).sum() > 0) is True
        with pytest.raises(ReadsValueError):
            read_by("my.lightning", torch.rand(3).sum())


def test_a_library_reads_what_is_known_as_it_is():
    x = ids()
    with fake_tensors(nn.Identity()) as fake:
        assert read_by("torchmetrics.aggregation", fake(x).sum()) == 25


# ---------------------------------------------------------------------- facts of what is not followed
def drawn(low=3, high=9, size=(40,)):
    return torch.randint(low, high, size)


FACTS = {
    "draw": lambda: drawn(),
    "draw from 0": lambda: torch.randint(9, (40,)),
    "copy": lambda: drawn().clone().int(),
    "plus": lambda: drawn() + 4,
    "minus": lambda: drawn() - 20,
    "in place": lambda: drawn().add_(5).sub_(1),
    "moved": lambda: drawn().roll(3).flip(0),
    "taken": lambda: drawn()[drawn(0, 40)],
    "index_select": lambda: drawn().index_select(0, drawn(0, 40)),
    "gather": lambda: drawn().gather(0, drawn(0, 40)),
    "joined": lambda: torch.cat([drawn(), drawn(50, 60)]),
    "stacked": lambda: torch.stack([drawn(), torch.full((40,), -7)]),
    "padded": lambda: F.pad(drawn(), (2, 2)),
    "padded with": lambda: F.pad(drawn(), (2, 2), value=77),
    "where": lambda: torch.where(drawn() > 5, drawn(), drawn(-4, 0)),
    "masked": lambda: drawn().masked_fill(drawn() > 5, -100),
    "masked in place": lambda: drawn().masked_fill_(drawn() > 5, 100),
    "a part": lambda: [y := drawn(), y[:3].fill_(99), y][-1],
    "a part of another": lambda: [y := torch.zeros(9, dtype=torch.int64), y[:3].copy_(drawn(5, 8, (3,))), y][-1],
    "all of another": lambda: torch.zeros(9, dtype=torch.int64).copy_(drawn(5, 8, (9,))),
    "repeated": lambda: drawn().repeat(2, 3),
    "times": lambda: drawn() * 3,
    "clamped": lambda: drawn().clamp_(max=5),
    "coins": lambda: torch.bernoulli(torch.full((40,), 0.5)).bool(),
    "is": lambda: drawn() == 4,
    "is not": lambda: drawn() != 4,
    "more": lambda: drawn() > 2,
    "less": lambda: drawn() < 9,
    "at least": lambda: drawn() >= 9,
    "at most": lambda: drawn() <= 2,
    "none": lambda: ~(drawn() > 2),
    "any": lambda: (drawn() > 8).any(),
    "all": lambda: (drawn() > 2).all(),
}


@pytest.mark.parametrize("name", FACTS)
def test_ranges_hold_what_is_drawn(name):
    lowest, highest = None, None
    for seed in range(20):
        torch.manual_seed(seed)
        real = FACTS[name]()
        low, high = int(real.min()), int(real.max())
        lowest = low if lowest is None else min(lowest, low)
        highest = high if highest is None else max(highest, high)
    with fake_tensors(nn.Identity()):
        facts = facts_of(FACTS[name]())
    assert facts.low is None or facts.low <= lowest
    assert facts.high is None or highest <= facts.high
    assert facts.num_values is None or highest - lowest < facts.num_values or facts.num_values > 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("draw", (3, 8)),
        ("plus", (7, 12)),
        ("minus", (-17, -12)),
        ("in place", (7, 12)),
        ("joined", (3, 59)),
        ("masked", (-100, 8)),
        ("a part", (3, 99)),
        ("all of another", (5, 7)),
        ("more", (1, 1)),
        ("at least", (0, 0)),
        ("is", (0, 1)),
        ("none", (0, 0)),
        ("all", (1, 1)),
    ],
)
def test_ranges_are_as_narrow_as_the_draw(name, expected):
    with fake_tensors(nn.Identity()):
        facts = facts_of(FACTS[name]())
    assert (facts.low, facts.high) == expected


def test_a_condition_that_holds_for_every_draw_is_known():
    with fake_tensors(nn.Identity()):
        assert (drawn() > 2).all()
        assert not (drawn() < 3).any()
        assert bool(drawn().ge(3).logical_not().any()) is False
        with pytest.raises(ReadsValueError):
            bool((drawn() > 5).all())


def test_dropouts_noise_has_two_values():
    with fake_tensors(nn.Identity()):
        scaled = torch.empty(400).bernoulli_(0.5).div_(0.5)
        assert has_two_values(scaled)
        assert has_two_values(scaled.clone().bfloat16())
        assert not has_two_values(scaled + torch.rand(400))
        assert not has_two_values(torch.cat([scaled, scaled * 3]))


@given(
    low=st.integers(-300, 300),
    width=st.integers(1, 50),
    number=st.integers(-300, 300),
    compare=st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge"]),
)
def test_comparisons_with_a_number_are_known_where_they_cannot_differ(low, width, number, compare):
    every = torch.arange(low, low + width)
    results = set(getattr(every, compare)(number).tolist())
    with fake_tensors(nn.Identity()):
        facts = facts_of(getattr(torch.randint(low, low + width, (3,)), compare)(number))
    known = {bool(facts.low)} if facts.low == facts.high else {False, True}
    assert known >= results
    if compare not in ("eq", "ne"):
        assert known == results


# ---------------------------------------------------------------------- dtypes, lists and edits of parts
LARGE = 2**21  # elements: more than are followed one by one


def test_integers_that_wrap_have_no_known_range():
    with fake_tensors(nn.Identity()):
        wrapped = torch.randint(0, 256, (10,), dtype=torch.uint8) + 10
        assert integer_range(wrapped) == (0, 255)
        assert integer_range(torch.randint(0, 300, (10,)).to(torch.uint8)) == (0, 255)
        assert integer_range(torch.randint(0, 200, (10,)).to(torch.uint8)) == (0, 199)


def test_a_cast_to_booleans_is_of_what_is_not_zero():
    with fake_tensors(nn.Identity()):
        x = torch.randint(2, 8, (10,))
        assert not bool((~x.bool()).any())
        assert bool(torch.full((LARGE,), 5, dtype=torch.bool)[0])
        assert integer_range(torch.full((LARGE,), 5, dtype=torch.bool).long()) == (1, 1)


def test_an_edit_of_a_list_of_tensors_ends_what_was_known_of_them():
    with fake_tensors(nn.Identity()):
        z = torch.zeros(LARGE, dtype=torch.int64)
        torch._foreach_add_([z], 5)
        with pytest.raises(ReadsValueError):
            z[0].item()


def test_a_number_is_read_in_its_dtype():
    with fake_tensors(nn.Identity()):
        one = torch.ones(LARGE)
        assert one[0].item() == 1.0
        assert isinstance(one[0].item(), float)
        with pytest.raises(ReadsValueError):
            one.view(torch.int32)[0].item()


def test_none_of_no_elements_is_true():
    with fake_tensors(nn.Identity()), pytest.raises(ReadsValueError):
        bool(torch.randint(1, 5, (LARGE, 0)).any())


def test_padding_with_a_number_keeps_a_range():
    with fake_tensors(nn.Identity()):
        assert integer_range(F.pad(torch.randint(3, 9, (40,)), (2, 2))) == (0, 8)


def test_values_of_a_tensor_that_is_made_among_fakes_are_followed():
    with fake_tensors(nn.Identity()) as fake:
        assert (fake(torch.tensor([[5, 0]])) + 1).tolist() == [[6, 1]]


def test_edits_of_real_tensors_are_done_once():
    counts = [torch.zeros(()), torch.zeros(())]
    with FactsMode():
        torch._foreach_add_(counts, 1)
        counts[0].add_(1)
    assert counts == [2, 1]
