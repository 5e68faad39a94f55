"""What is read of torch's autograd graph, of storages and of versions, against what torch itself does."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from lightning_memsave.torch_internals.autograd_graph import (
    Kept,
    UnreadableError,
    WeakStorage,
    autograd_is_running,
    check_version,
    edge_of,
    function_modes,
    has_hooks,
    innermost_hooks,
    inputs_of,
    is_asked_for,
    is_held_elsewhere,
    is_inside_transform,
    is_made_of_weights,
    is_operator,
    kept_by,
    let_go,
    output_of,
    packed,
    refuses_hooks,
    running_node,
    running_pass,
    saved,
    sequence_nr_of,
    signed,
    storage_key,
    version_of,
    watch,
    watch_again,
    will_run,
)


# ---------------------------------------------------------------------- nodes and edges
def test_an_edge_is_one_output_of_one_node():
    x = torch.randn(4, 6, requires_grad=True)
    assert edge_of(x) is edge_of(x.detach()) is None
    first, second = (x * 2).split(3, dim=1)
    assert edge_of(first).sequence_nr == edge_of(second).sequence_nr == sequence_nr_of(first.grad_fn)
    assert (edge_of(first).output_nr, edge_of(second).output_nr) == (0, 1)
    assert edge_of(x * 2) != edge_of(x * 2)


def test_inputs_and_outputs_of_a_node():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    middle = a * 2
    node = (middle @ b).grad_fn
    assert inputs_of(node) == ((middle.grad_fn, 0), (None, 0))
    assert tuple(output_of(node, 0).shape) == (3, 2)
    assert output_of((a.double() + 1).grad_fn, 0).dtype == torch.float64


def test_current_graph_task_id_has_not_moved():
    assert hasattr(torch._C, "_current_graph_task_id"), "torch._C._current_graph_task_id has moved"
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(autograd_is_running()))
    assert autograd_is_running() is False
    y.sum().backward()
    assert seen == [True]
    assert autograd_is_running() is False


def test_inside_of_backward_the_node_and_the_pass_are_told():
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    y = a.exp()
    node, seen = y.grad_fn, []

    def look(*_):
        seen.append((running_node(), will_run(node), is_asked_for(a), is_asked_for(b)))
        passes.append(running_pass())

    passes = []
    y.register_hook(look)
    total = (y * b).sum()
    assert running_node() == running_pass() == -1
    total.backward(inputs=[a], retain_graph=True)
    assert seen == [(sequence_nr_of(node), True, True, False)]
    total.backward(retain_graph=True)
    assert seen[1][1:] == (True, True, True)
    torch.autograd.grad(total, [b], retain_graph=True)
    assert len(seen) == 2, "backward does not come by"
    assert passes[0] != passes[1]
    assert running_node() == running_pass() == -1


@pytest.mark.parametrize("number", [0, 1, 5, -1, -2, 2**63 - 1, -(2**63)])
def test_numbers_of_nodes_are_in_twos_complement(number):
    assert signed(int.from_bytes(number.to_bytes(8, "little", signed=True), "little")) == number


def test_a_dimension_from_the_end_is_read_as_such():
    x = torch.randn(2, 3, requires_grad=True)
    assert signed(x.sum(-1).grad_fn._saved_dim[0]) == -1
    assert signed(None) is None


# ---------------------------------------------------------------------- what nodes keep
class Handle(Kept):
    def __init__(self, tensor):
        self.tensor = tensor

    def get(self):
        return self.tensor


def test_what_torch_keeps_is_read():
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    assert torch.equal(saved(y.grad_fn, "result"), y)
    assert packed(y.grad_fn, "result").data_ptr() == y.data_ptr()
    assert packed(y.grad_fn, "no_such_name") is None
    with pytest.raises(UnreadableError):
        saved(y.grad_fn, "no_such_name")


def test_what_the_store_keeps_is_its_own_and_what_others_keep_is_not_read():
    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(Handle, Handle.get):
        ours = x.exp()
    handle = packed(ours.grad_fn, "result")
    assert isinstance(handle, Handle)
    assert torch.equal(saved(ours.grad_fn, "result"), ours)

    def unpack(_):
        raise AssertionError("unpacked")

    with saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        theirs = x.exp()
    for read in (packed, saved):
        with pytest.raises(UnreadableError):
            read(theirs.grad_fn, "result")


def test_a_graph_that_has_run_keeps_nothing():
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    total = y.sum()
    total.backward()
    assert list(kept_by(y.grad_fn)) == []


def test_private_names_of_the_graph_are_there():
    """`_raw_saved_*` and `.data` of what they hold (torch 2.13): for operations and for functions of one's own."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x + 1)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.randn(3, requires_grad=True)
    (kept,) = kept_by(x.exp().grad_fn)
    assert torch.equal(kept, x.exp())
    doubled = Double.apply(x)  # up to torch 2.10 a node of Python's does not keep what it stands for alive
    first, second = kept_by(doubled.grad_fn)
    assert torch.equal(first, x)
    assert torch.equal(second, x + 1)


def test_the_hook_that_comes_next_is_told():
    assert innermost_hooks() == (None, None)

    def pack(tensor):
        return tensor

    def unpack(tensor):
        return tensor

    with saved_tensors_hooks(unpack, pack), saved_tensors_hooks(pack, unpack):
        assert innermost_hooks() == (pack, unpack)
    assert innermost_hooks() == (None, None)


# ---------------------------------------------------------------------- storages
def test_storage_addresses_have_not_moved():
    x = torch.zeros(10)
    assert hasattr(x.untyped_storage(), "_cdata"), "UntypedStorage._cdata has moved"
    assert x.untyped_storage()._cdata == x[2:].untyped_storage()._cdata != torch.zeros(10).untyped_storage()._cdata


def test_one_python_object_per_storage():
    # A weak reference must live as long as the memory, not as long as a Python wrapper of it.
    x, fired = torch.zeros(10), []
    reference = weakref.ref(x.untyped_storage(), fired.append)
    gc.collect()
    assert reference() is x.untyped_storage()
    y = x[1:]
    del x
    assert fired == []
    del y
    assert len(fired) == 1


def test_a_weak_storage_keeps_nothing_alive():
    x = torch.zeros(10)
    weak, fired = WeakStorage(x), weakref.finalize(x.untyped_storage(), lambda: None)
    assert weak.is_alive
    assert weak.get()._cdata == storage_key(x) == storage_key(x[3:])
    view = x[3:]
    del x
    gc.collect()
    assert weak.is_alive
    del view
    gc.collect()
    assert not fired.alive
    assert not weak.is_alive
    assert weak.get() is None


def test_copies_of_a_weak_storage():
    x = torch.zeros(10)
    weak = WeakStorage(x.untyped_storage())
    assert copy.deepcopy(weak) is weak
    elsewhere = pickle.loads(pickle.dumps(weak))
    assert not elsewhere.is_alive
    assert weak.is_alive


def test_other_owners_of_a_storage_are_seen():
    x = torch.zeros(10)
    assert not is_held_elsewhere(x)
    view = x[1:]
    assert is_held_elsewhere(x)
    del view
    assert not is_held_elsewhere(x)
    assert is_held_elsewhere(x.requires_grad_().exp())  # by its node


# ---------------------------------------------------------------------- weights
W, A, B = (nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (6, 2), (2, 4)))
FROZEN, DATA = nn.Parameter(torch.randn(6, 4), requires_grad=False), torch.randn(6, 4)
NORMED = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: W, True),
        (lambda: W.t(), True),
        (lambda: W.bfloat16().t().contiguous(), True),
        (lambda: W.view(2, 12)[0], True),
        (lambda: W / W.norm(dim=1, keepdim=True), True),
        (lambda: (W - W.mean()) * W.var().rsqrt(), True),
        (lambda: W + 0.5 * (A @ B), True),
        (lambda: W * 2 + DATA, True),  # no larger than the weight
        (lambda: NORMED.weight, True),
        (lambda: torch.cat([W, W]), False),  # larger than either
        (lambda: FROZEN, False),
        (lambda: DATA, False),
        (lambda: W @ torch.randn(4, 4), False),
        (lambda: W[torch.tensor([0, 0, 1])], False),  # an embedding's output
        (lambda: nn.functional.embedding(torch.tensor([1, 2]), W), False),
        (lambda: W.sum(0) + torch.randn(9, 6, 4), False),
        (lambda: W + torch.randn(9, 6, 4), False),
        (lambda: W.exp(), False),  # an activation function
    ],
)
def test_what_is_made_of_weights_alone(made, expected):
    assert is_made_of_weights(made()) is expected


def test_a_long_way_from_a_weight_is_not_followed():
    near, far = W, W
    for _ in range(5):
        near = near * 2
    for _ in range(20):
        far = far * 2
    assert is_made_of_weights(near)
    assert not is_made_of_weights(far)


def test_a_hook_on_a_gradient_is_seen():
    x = torch.ones(3, requires_grad=True)
    y, z = x * 2, x * 2
    assert not has_hooks(y)
    y.register_hook(lambda gradient: gradient)
    z.retain_grad()
    assert has_hooks(y)
    assert has_hooks(z)


# ---------------------------------------------------------------------- modes
def test_operators_are_those_of_torch_ops():
    assert is_operator(torch.ops.aten.add)
    assert is_operator(torch.ops.aten.add.Tensor)
    assert not is_operator(torch.add)
    assert not is_operator(torch.Tensor.add)


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_modes_are_told_the_outermost_first():
    outer, inner = Mode(), Mode()
    before = function_modes()
    with outer, inner:
        assert function_modes() == [*before, outer, inner]
    assert function_modes() == before


def test_transforms_are_told_and_their_refusal_of_hooks():
    seen, x = [], torch.randn(3)

    def function(x):
        seen.append(is_inside_transform())
        return x.square().sum()

    torch.func.grad(function)(x)
    torch.vmap(function)(x)
    torch.func.jvp(function, (x,), (x,))
    function(x)
    assert seen == [True, True, True, False]
    with torch.autograd.forward_ad.dual_level():
        assert is_inside_transform()
    assert not is_inside_transform()
    with saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(RuntimeError) as caught:
        torch.func.grad(function)(x)
    assert refuses_hooks(caught.value)
    assert not refuses_hooks(RuntimeError("out of memory"))


# ---------------------------------------------------------------------- in-place changes
def refusal_of_torch(change):
    """What autograd says of a saved tensor that was changed."""
    y = torch.ones(3, 2, requires_grad=True).exp()
    before = version_of(y)
    change(y)
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    return y, before, str(caught.value)


@pytest.mark.parametrize("change", [lambda y: y.add_(1), lambda y: y[0].zero_(), lambda y: y.detach().mul_(2).add_(1)])
def test_a_change_is_refused_in_the_words_of_torch(change):
    y, before, theirs = refusal_of_torch(change)
    with pytest.raises(RuntimeError) as caught:
        check_version(y.detach(), before)
    ours = str(caught.value)
    begin, end = ours[: ours.index("]]") + 1], ours[ours.index("is at version") :]
    assert theirs.startswith(begin)
    assert end in theirs


def test_an_unchanged_tensor_passes():
    x = torch.zeros(3)
    x.add_(1)
    check_version(x, version_of(x))
    with torch.inference_mode():
        made = torch.zeros(3)
        made.add_(1)
        check_version(made, version_of(made))
    assert version_of(made) == 0


def test_the_shape_that_is_told_is_that_of_the_tensor():
    x = torch.zeros(6)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"\[torch.FloatTensor \[2, 3\]\] is at version 1; expected version 0"):
        check_version(x, 0, shape=(2, 3))


def test_a_watcher_counts_with_the_tensor_and_can_drop_its_bytes():
    x = torch.arange(6.0)
    view = x.view(2, 3)[1]
    watched, weak = watch(view), WeakStorage(x)
    assert torch.equal(watched, view)
    assert watched.data_ptr() == view.data_ptr()
    version = version_of(watched)
    view.add_(1)
    assert version_of(watched) == version_of(x) == version + 1
    let_go(watched)
    assert watched.numel() == 0
    x.mul_(2)
    assert version_of(watched) == version + 2
    watch_again(watched, x.untyped_storage())
    assert watched.data_ptr() == x.data_ptr()
    assert torch.equal(watched, x)
    let_go(watched)
    del x, view
    gc.collect()
    assert not weak.is_alive
