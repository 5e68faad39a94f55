"""Two numbers that tell whether a repetition has computed the same values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.saved_tensors.fingerprints import fingerprint, is_near

MADE = {
    "float32": lambda: torch.randn(3, 700),
    "float64": lambda: torch.randn(50, 7, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(40_000).bfloat16(),
    "float16": lambda: torch.randn(40_000).half(),
    "int64": lambda: torch.randint(-9, 9, (30, 40)),
    "bool": lambda: torch.rand(300) < 0.3,
    "transposed": lambda: torch.randn(30, 40).t(),
    "a slice": lambda: torch.randn(30, 40)[::3, 1:5],
    "every other element": lambda: torch.randn(30, 40)[:, ::2],
    "every other of one row": lambda: torch.randn(64)[::2],
    "expanded": lambda: torch.randn(5, 1).expand(5, 6),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a scalar": lambda: torch.tensor(-2.5),
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_the_sum_and_the_sum_of_magnitudes(name):
    x = MADE[name]()
    exact = x.double()
    total, magnitude = fingerprint(x)
    assert magnitude == pytest.approx(float(exact.abs().sum()), rel=1e-5)
    assert total == pytest.approx(float(exact.sum()), abs=1e-5 * magnitude)


def test_complex_numbers_count_by_their_parts():
    x = torch.tensor([1 - 2j, -3 + 0.5j])
    assert fingerprint(x) == (1 - 2 - 3 + 0.5, 1 + 2 + 3 + 0.5)
    assert fingerprint(x.conj().resolve_conj()) == (1 + 2 - 3 - 0.5, 1 + 2 + 3 + 0.5)


def test_nothing_adds_up_to_nothing():
    assert fingerprint(torch.zeros(0, 3)) == (0.0, 0.0)


def test_of_some_tensors_there_is_none():
    assert fingerprint(torch.zeros(3, dtype=torch.uint8)) is None, "work space of kernels"
    assert fingerprint(torch.eye(2).to_sparse()) is None
    assert fingerprint(nn.Buffer(torch.zeros(2)).as_subclass(Marked)) is None
    with FakeTensorMode():
        assert fingerprint(torch.zeros(3)) is None


class Marked(torch.Tensor):
    pass


def test_the_order_of_additions_is_no_difference():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(1000).to(dtype)
        again = x.view(20, 50).t().contiguous()
        assert is_near(fingerprint(x), fingerprint(again), dtype, x.numel())


@pytest.mark.parametrize(("dtype", "change"), [(torch.float32, 0.01), (torch.bfloat16, 2.0), (torch.float64, 1e-6)])
def test_one_element_of_a_thousand_is_noticed(dtype, change):
    x = torch.randn(1000).to(dtype)
    other = x.clone()
    other[17] += change
    assert not is_near(fingerprint(x), fingerprint(other), dtype, 1000)
    assert not is_near(fingerprint(other), fingerprint(x), dtype, 1000)


def test_a_flipped_sign_is_noticed_where_magnitudes_are_the_same():
    x = torch.randn(1000)
    assert not is_near(fingerprint(x), fingerprint(-x), x.dtype, 1000)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_near_its_like_alone(number):
    x = torch.tensor([1.0, number])
    assert is_near(fingerprint(x), fingerprint(x.clone()), x.dtype, 2)
    assert not is_near(fingerprint(x), fingerprint(torch.ones(2)), x.dtype, 2)
    assert not is_near(fingerprint(torch.ones(2)), fingerprint(x), x.dtype, 2)


@pytest.mark.parametrize("num_elements", [10**4, 10**6, 10**7])
def test_rounding_and_another_order_are_no_difference(num_elements):
    x = torch.rand(num_elements)
    rounded = x * (1 + 6e-8 * torch.randn(num_elements))
    assert is_near(fingerprint(x), fingerprint(rounded), x.dtype, num_elements)
    assert is_near(fingerprint(x), fingerprint(x[torch.randperm(num_elements)]), x.dtype, num_elements)


def test_conjugated_and_negated_tensors_are_seen_as_their_values():
    x = torch.randn(10, dtype=torch.complex64)
    assert fingerprint(x.conj()) == fingerprint(x.conj().resolve_conj())
    assert fingerprint(x.conj().imag) == fingerprint(x.conj().imag.resolve_neg())


def test_no_mode_sees_a_fingerprint_being_taken():
    class Counting(TorchDispatchMode):
        num_calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num_calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(10, requires_grad=True) * 2
    with Counting() as mode:
        fingerprint(x)
    assert mode.num_calls == 0


@pytest.mark.parametrize("is_on_cuda", [True, False])
def test_seeds_that_no_kernel_has_written_are_not_compared(is_on_cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_on_cuda)
    for seeds in (torch.tensor(5), torch.tensor([5, 7]), torch.tensor([1, 2], dtype=torch.uint64)):
        assert (fingerprint(seeds) is None) == is_on_cuda
    assert fingerprint(torch.arange(3)) == (3.0, 3.0)
    assert fingerprint(torch.tensor(2.0)) == (2.0, 2.0)
