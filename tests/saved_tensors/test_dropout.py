"""Dropout as a mask: torch's own numbers to the bit, whatever stands in the tensor, and in every further derivative."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors.dropout import _Dropped
from lightning_memsave.saved_tensors.store import SavedTensorStore

CALLS = {
    "functional": lambda h, p: F.dropout(h, p),
    "module": lambda h, p: nn.Dropout(p)(h),
    "by name": lambda h, p: F.dropout(input=h, p=p, training=True),
    "torch.dropout": lambda h, p: torch.dropout(h, p, True),
    "torch.dropout by name": lambda h, p: torch.dropout(input=h, p=p, train=True),
}
LEFT_TO_TORCH = {
    "evaluation": lambda h: F.dropout(h, 0.3, training=False),
    "torch.dropout in evaluation": lambda h: torch.dropout(h, 0.3, train=False),
    "nothing dropped": lambda h: F.dropout(h, 0.0),
    "all dropped": lambda h: F.dropout(h, 1.0),
    "in place": lambda h: F.dropout(h * 1.0, 0.3, inplace=True),
    "float64": lambda h: F.dropout(h.double(), 0.3),
    "bfloat16": lambda h: F.dropout(h.bfloat16(), 0.3),
    "a transposed tensor": lambda h: F.dropout((h * 1.0).t(), 0.3),
    "no gradient": lambda h: F.dropout(h.detach(), 0.3) * h,
}


def outcome(function, x, store=None):
    """Result, gradient, and the generator's next number."""
    torch.manual_seed(5)
    leaf = x.clone().requires_grad_()
    if store is None:
        out = function(leaf * 1.0)
    else:
        with store.scope():
            out = function(leaf * 1.0)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), leaf.grad, torch.rand(1), out.grad_fn.name()


def same(a, b):
    return torch.equal(
        a.contiguous().view(torch.int8), b.contiguous().view(torch.int8)
    )  # NaN and the sign of 0 as well


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.999])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_torchs_dropout_to_the_bit(name, p):
    x = torch.randn(37, 41)
    x[0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    *plain, _ = outcome(lambda h: CALLS[name](h, p), x)
    *ours, node = outcome(lambda h: CALLS[name](h, p), x, SavedTensorStore(min_numel=1))
    assert node == "_DroppedBackward"
    assert all(same(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_the_rest_is_left_to_torch(name):
    x = torch.randn(37, 41)
    *plain, expected = outcome(LEFT_TO_TORCH[name], x)
    *ours, node = outcome(LEFT_TO_TORCH[name], x, SavedTensorStore(min_numel=1))
    assert node == expected != "_DroppedBackward"
    assert all(same(a, b) for a, b in zip(ours, plain, strict=True))


def test_an_invalid_probability_is_torchs_error():
    with SavedTensorStore().scope(), pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(torch.randn(4, requires_grad=True), 1.5)


def test_what_it_keeps_is_a_bit_per_element():
    store = SavedTensorStore(min_numel=1)
    with store.scope():
        out = F.dropout(torch.randn(1000, requires_grad=True), 0.5)
    assert store.tally.entries == {"1-bit mask": 1}
    assert store.tally.held_bytes == 125
    out.sum().backward()


def test_gradcheck():
    x, mask = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.rand(7, 5) > 0.4
    assert torch.autograd.gradcheck(lambda x: _Dropped.apply(x, mask, 1.25), x)
    assert torch.autograd.gradgradcheck(lambda x: _Dropped.apply(x, mask, 1.25), x)


def test_a_second_derivative_through_the_store():
    def second(store):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 50).requires_grad_()
        if store is None:
            y = F.dropout(x**3, 0.4).sum()
        else:
            with store.scope():
                y = F.dropout(x**3, 0.4).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert torch.equal(second(SavedTensorStore(min_numel=1)), second(None))
