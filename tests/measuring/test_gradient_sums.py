"""Sums of gradients: what torch makes in place in a run is not counted beside what it replaces."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memsave.measuring import Ledger, allocation_peak
from lightning_memsave.measuring.step_trace import trace_step
from lightning_memsave.simulation.fake_model import fake_tensors

ROWS, WIDTH = 4096, 64
TABLE_BYTES = 4 * ROWS * WIDTH


class Doubled(torch.autograd.Function):
    """Its backward adds in Python, where no sum is in place."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.add(gradient * 1, gradient * 1)


def of_two_uses(w: Tensor) -> Tensor:
    return (w * 2).sum() + (w * 3).sum()


def of_three_uses(w: Tensor) -> Tensor:
    return (w * 2).sum() + (w * 3).sum() + (w * 4).sum()


def of_a_residual(w: Tensor) -> Tensor:
    return (w + w.tanh()).sin().sum()


def of_a_gradient_that_two_share(w: Tensor) -> Tensor:
    one, other = w * 2, w * 3
    return (one + other).sin().sum() + one.cos().sum() + other.cos().sum()


def of_a_tied_head(w: Tensor) -> Tensor:  # a linear layer's gradient is a view, which torch never adds to
    return F.linear(F.embedding(torch.arange(8), w).tanh(), w).sum()


def of_two_lookups(w: Tensor) -> Tensor:
    return (F.embedding(torch.arange(8), w) * F.embedding(torch.arange(1, 9), w)).sum()


def of_expanded_gradients(w: Tensor) -> Tensor:
    return w.sum() + w.sin().sum()


def of_a_sum_in_python(w: Tensor) -> Tensor:
    return Doubled.apply(w).sum()


def of_sums_inside_of_a_formula(w: Tensor) -> Tensor:  # of C++, which are not in place
    variance, mean = torch.var_mean(w, 1)
    return (variance * mean).sum()


def of_standard_deviations(w: Tensor) -> Tensor:
    deviation, mean = torch.std_mean(w, 1)
    return (deviation * mean).sum() + w.sin().sum()


class Hidden(torch.autograd.Function):
    """Its gradient is made where no mode looks."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        with torch.utils._python_dispatch._disable_current_modes():
            return gradient * 2


def test_a_gradient_that_no_operation_has_returned_is_no_error():
    w = nn.Parameter(torch.randn(ROWS, WIDTH))
    step = step_of(lambda w: (Hidden.apply(w) + Hidden.apply(w)).sum(), w)
    assert trace_step(nn.ParameterList([w]), step).peak_bytes >= 2 * TABLE_BYTES
    assert torch.equal(w.grad, torch.full_like(w, 4))


LOSSES = [value for name, value in list(globals().items()) if name.startswith("of_")]


def step_of(loss_of, w):
    def step():
        w.grad = None
        loss_of(w).backward()

    return step


def tracked(loss_of, w, **options):
    with Ledger(**options).watching(nn.ParameterList([w])) as ledger:
        step_of(loss_of, w)()
    w.grad = None
    return ledger.measurement


@pytest.mark.parametrize("loss_of", LOSSES)
def test_the_peak_is_the_allocators(loss_of):
    w = nn.Parameter(torch.randn(ROWS, WIDTH))
    tracked(loss_of, w)  # the engine's first pass takes some bytes of its own
    found = tracked(loss_of, w)
    assert found.held_bytes == TABLE_BYTES

    def step():
        step_of(loss_of, w)()
        w.grad = None

    in_kernels = allocation_peak(step, found.held_bytes) - found.peak_bytes
    assert 0 <= in_kernels < 64, "some scalars"


@pytest.mark.parametrize("loss_of", LOSSES)
def test_fake_tensors_and_traces_have_the_same_peak(loss_of):
    model = nn.ParameterList([torch.randn(ROWS, WIDTH)])
    real = tracked(loss_of, model[0])
    assert trace_step(model, step_of(loss_of, model[0])).peak_bytes == real.peak_bytes
    model[0].grad = None
    with fake_tensors(model):
        assert tracked(loss_of, model[0], fake=True).peak_bytes == real.peak_bytes


def test_results_are_those_of_the_run():
    w = nn.Parameter(torch.randn(ROWS, WIDTH))
    step_of(of_three_uses, w)()
    plain = w.grad.clone()
    with Ledger():
        step_of(of_three_uses, w)()
    assert torch.equal(w.grad, plain)


def test_two_towers_over_one_table_take_two_gradients_of_it():
    w = nn.Parameter(torch.randn(ROWS, WIDTH))
    few_rows = 2 * 4 * 8 * WIDTH + 8 * (8 + 8)
    peak_bytes = tracked(of_two_lookups, w).peak_bytes
    assert 3 * TABLE_BYTES < peak_bytes <= 3 * TABLE_BYTES + 4 * few_rows
