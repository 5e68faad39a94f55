"""Calls as the store sees them: their names and operands, and the changes that the graph does not show."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors import SavedTensorStore
from lightning_memsave.saved_tensors.call_site import NO_CALL, Call
from lightning_memsave.saved_tensors.function_mode import CallTracker, seen, window_index


def exact():
    return SavedTensorStore(recompute=True, min_numel=1)


def gradient(function, store=None, seed=0):
    """Gradients of `function(h)` by the input behind h, [32, 64], and the weight that it is given."""
    torch.manual_seed(seed)
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def loss():
        h = (x @ w).exp().log()  # not a view of a leaf, not cheap
        return function(h, w).square().mean()

    if store is None:
        total = loss()
    else:
        with store.scope():
            total = loss()
    total.backward()
    return torch.cat([x.grad, w.grad])


def clamped(h, w):
    y = F.gelu(h)
    with torch.no_grad():
        y.clamp_(max=0.5)
    return y @ w


def clamped_in_between(h, w):
    y = F.gelu(h)
    with torch.no_grad():
        y.clamp_(max=0.5)
    return (y * 2) @ w


def assigned(h, w):
    y = F.gelu(h)
    with torch.no_grad():
        y[:, ::2] = 0.0
    return y @ w


def assigned_in_between(h, w):
    y = F.gelu(h)
    with torch.no_grad():
        y[:, ::2].zero_()
    return (y * 2) @ w


def assigned_through_a_view(h, w):
    y = F.gelu(h).view(64, 32)
    with torch.no_grad():
        y[::2].zero_()
    return (y * 2).view(32, 64) @ w


def written_in_between(h, w):
    y = F.gelu(h)
    with torch.no_grad():
        torch.clamp(y, max=0.5, out=y)
    return (y * 2) @ w


def scaled_in_a_list(h, w):
    y = F.gelu(h)
    with torch.no_grad():
        torch._foreach_mul_([y], 0.5)
    return (y * 2) @ w


def binarised(h, w):
    y = F.gelu(h)
    y.data = y.data.sign()
    return y @ w


CHANGES = (
    *(
        clamped,
        clamped_in_between,
        assigned,
        assigned_in_between,
        assigned_through_a_view,
        written_in_between,
        scaled_in_a_list,
    ),
    binarised,
)


@pytest.mark.parametrize("function", CHANGES)
def test_changes_without_gradient_are_kept(function):
    assert torch.equal(gradient(function), gradient(function, exact()))


def test_in_place_functions_are_still_recomputed():
    store = exact()

    def function(h, w):
        return F.silu(F.gelu(h).mul_(2.0)) @ w

    assert torch.equal(gradient(function), gradient(function, store))
    assert store.tally.entries["recomputed"]


def test_operands_are_read_by_signature():
    def direct(h, w):
        stats = torch.zeros(64), torch.ones(64)
        return torch.batch_norm(h, None, None, *stats, True, 0.1, 1e-5, False) @ w

    assert torch.equal(gradient(direct), gradient(direct, exact()))


def test_custom_operators_are_not_taken_for_torchs():
    library = torch.library.Library("memsave_test", "DEF")
    library.define("max_pool2d(Tensor x) -> Tensor")

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            return 3 * ctx.saved_tensors[0] ** 2 * grad

    library.impl("max_pool2d", Cube.apply, "Autograd")

    def function(h, w):
        return torch.ops.memsave_test.max_pool2d(h) @ w

    assert torch.equal(gradient(function), gradient(function, SavedTensorStore(min_numel=1)))
    library._destroy()


class Owner:
    """Answers a loss with its number, as a store does, and notes what it was asked."""

    def __init__(self, answer=None, **options):
        self.asked, self.result, self.edited = [], answer, []
        self.calls = CallTracker(self.answer, self.edited_next, **options)

    def edited_next(self, tensor):
        self.edited.append((tensor, tensor._version))

    def answer(self, call):
        self.asked.append((self.calls.current.name, call.name))
        return self.result


def test_only_heads_losses_and_dropouts_are_asked_about_and_an_answer_takes_their_place():
    owner = Owner(torch.tensor(7.0))
    with owner.calls:
        h = F.linear(torch.randn(3, 5, requires_grad=True), torch.randn(4, 5))
        loss = F.cross_entropy(h, torch.tensor([0, 1, 2]))
        assert owner.calls.current == NO_CALL
    assert float(loss) == 7.0
    assert owner.asked == [("linear", "linear"), ("cross_entropy", "cross_entropy")]


EDITS = {
    "relu_": lambda h: h.relu_(),
    "silu": lambda h: F.silu(h, inplace=True),
    "by position": lambda h: F.elu(h, 1.0, True),
    "a module": lambda h: nn.Dropout(0.5, inplace=True)(h),
    "an operator": lambda h: h.__iadd__(1),
    "an item": lambda h: h.__setitem__(0, 0.0),
    "nothing": lambda h: F.relu(h),
    "a mode that is no edit": lambda h: F.dropout(h, 0.5, True),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_tensor_is_told_of_before_it_is_edited(name):
    owner, h = Owner(None), torch.randn(3, 4)
    with owner.calls:
        EDITS[name](h)
        assert owner.calls.edited == set()
    edits = name not in ("nothing", "a mode that is no edit")
    assert [(tensor is h, version) for tensor, version in owner.edited] == [(True, 0)] * edits
    assert h._version > 0 or not edits


def test_a_call_without_an_answer_is_torchs_own():
    owner, h, target = Owner(None), torch.randn(3, 5), torch.tensor([0, 1, 2])
    with owner.calls:
        found = F.cross_entropy(h, target)
    assert torch.equal(found, F.cross_entropy(h, target))
    assert len(owner.asked) == 1


def test_a_call_that_raises_is_over():
    owner = Owner()
    with owner.calls:
        with pytest.raises(RuntimeError, match="shape"):
            torch.mm(torch.zeros(2, 3), torch.zeros(2, 3))
        assert owner.calls.current == NO_CALL


def test_unseen_calls_are_taken_for_one_function():
    owner = Owner(torch.tensor(7.0))
    with owner.calls:
        with owner.calls.unseen("silu"):
            assert (owner.calls.current.name, owner.calls.unseen_as) == ("silu", "silu")
            F.cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
        assert owner.asked == []
        assert (owner.calls.current, owner.calls.unseen_as) == (NO_CALL, None)
        F.cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
    assert len(owner.asked) == 1


def test_the_latest_lookup_of_a_table_is_known_while_the_table_is_the_same():
    owner = Owner(notes_heads=True)
    table, other = nn.Embedding(5, 3), nn.Embedding(5, 3)
    with owner.calls:
        table(torch.tensor([0]))
        second = table(torch.tensor([1]))
    assert owner.calls.lookup_of(table.weight).node is second.grad_fn
    assert owner.calls.lookup_of(other.weight) is None


def test_parameters_are_seen_with_their_storage_and_version():
    weight = nn.Parameter(torch.zeros(3))
    before = seen(weight, None)
    assert before == seen(weight, None)
    assert before[1] is None
    with torch.no_grad():
        weight.add_(1)
    after = seen(weight, None)
    assert after != before
    weight.data = weight.data.clone()
    assert seen(weight, None) != after


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("settings", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}])
def test_the_argmax_of_a_pool_is_kept_in_less_and_found_again(dims, settings):
    x = torch.randn(2, 3, *[8] * dims)
    pool = getattr(F, f"max_pool{dims}d_with_indices")
    _, index = pool(x, **settings)
    found = window_index(index, Call(f"max_pool{dims}d_with_indices", (x,), settings))
    assert torch.equal(found.flat().view(index.shape), index)
    bits = next(bits for bits in (1, 2, 4, 8) if 2**bits >= settings["kernel_size"] ** dims)
    assert sum(t.nbytes for t in found.payload()) == -(-index.numel() * bits // 8)
    assert window_index(index, Call("topk", (x,), settings)) is None
    assert window_index(index[1:], Call(f"max_pool{dims}d", (x,), settings)) is None
