"""Whole networks and programs inside a scope, against plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memsave import ActivationCompression, Checkpointing, apply_activation_compression, apply_checkpointing
from lightning_memsave.saved_tensors import DifferentiatedTwiceError, Fidelity, SavedTensorStore
from tests.saved_tensors.nets import (
    Attention,
    Data,
    assert_same_bits,
    cnn,
    data,
    exact,
    gradients,
    int4,
    int8,
    relative_error,
)


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.RMSNorm(16)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.rnn = nn.Linear(16, 12), kind(12, 12, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.rnn(self.linear(x).tanh())[0]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.linear(x)) * torch.polar(torch.ones(9), torch.arange(9.0))
        return torch.fft.irfft(spectrum.conj() * spectrum, n=16)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.index = nn.Linear(16, 16), torch.tensor([[0, 3, 1], [1, 5, 2]])

    def forward(self, x):
        h = self.linear(x).flatten(0, -2)
        adjacency = torch.sparse_coo_tensor(self.index, h[0, :3], (len(h), len(h)), check_invariants=True)
        return torch.sparse.mm(adjacency, h.relu())


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True)

    def forward(self, x):
        return self.layer(x, src_mask=torch.ones(x.shape[1], x.shape[1]).tril() == 0)


class Masked(Attention):
    def forward(self, x):
        mask = torch.rand(x.shape[0], 1, x.shape[1], x.shape[1]) > 0.3
        return super().forward(x, mask | torch.eye(x.shape[1], dtype=torch.bool))


def groups(width):
    return nn.GroupNorm(2, width)


IMAGES, WORDS = (2, 3, 12, 12), (3, 10, 16)
MODELS = {
    "CNN": (cnn, IMAGES),
    "CNN, in place": (lambda: cnn(inplace=True), IMAGES),
    "CNN, GroupNorm": (lambda: cnn(norm=groups), IMAGES),
    "attention, causal": (Attention, WORDS),
    "attention, mask": (Masked, WORDS),
    "TransformerEncoderLayer": (Transformer, WORDS),
    "SwiGLU, RMSNorm": (SwiGLU, WORDS),
    "LSTM": (lambda: Recurrent(nn.LSTM), WORDS),
    "GRU": (lambda: Recurrent(nn.GRU), WORDS),
    "complex": (Complex, WORDS),
    "sparse": (Sparse, WORDS),
}
KEPT_RAW = ("complex", "sparse")
LOSSY = {
    "int8": (Fidelity.INT8, False, 0.1),
    "int4": (Fidelity.INT4, False, 1.0),
    "int4-chain": (Fidelity.INT4, True, 1.5),
}
"""Fidelity, fused, and a bound on the relative error that a sign or a scale gone wrong would pass."""


def make(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]
    model, x = model(), torch.randn(shape)
    model(x)
    return model, x


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_is_bit_equal(name, layout):
    if layout == "autocast" and name in (*KEPT_RAW, "LSTM", "GRU"):
        pytest.skip("has no bfloat16 kernel on every CPU")
    model, x = make(name)
    if layout == "channels_last":
        if x.dim() != 4:
            pytest.skip("for images")
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    plain = gradients(model, x, autocast=layout == "autocast")
    for store in (SavedTensorStore(min_numel=1), exact()):
        assert_same_bits(gradients(model, x, store, autocast=layout == "autocast"), plain)
    assert store.tally.held_bytes < store.tally.plain_bytes or name in KEPT_RAW
    assert store.tally.entries["recomputed"] > 0 or name in KEPT_RAW


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("name", MODELS)
def test_lossy_is_near_and_repeats(name, codec):
    model, x = make(name)
    fidelity, fuse, bound = LOSSY[codec]
    plain = gradients(model, x)
    stores = [SavedTensorStore(lossy=fidelity, fuse=fuse, min_numel=1, seed=5) for _ in range(2)]
    first, second = (gradients(model, x, store) for store in stores)
    assert_same_bits(first, second)  # two stores, one seed
    assert torch.equal(first["loss"], plain["loss"]), "forward is untouched"
    assert relative_error(first, plain) < bound
    assert stores[0].tally.held_bytes < stores[0].tally.plain_bytes or name in KEPT_RAW


def test_draw_for_a_step_repeats_the_step():
    model, x = make("CNN")
    store = int4()
    runs = {}
    for step in (0, 0, 1, 2, 1):  # two scopes in step 0 go on in one stream
        store.draw_for(step)
        runs.setdefault(step, []).append(gradients(model, x, store))
    assert_same_bits(*runs[1])
    for one, other in ((runs[0][0], runs[0][1]), (runs[0][0], runs[1][0]), (runs[1][0], runs[2][0])):
        assert relative_error(one, other) > 0
    resumed = int4()
    resumed.draw_for(2)
    assert_same_bits(gradients(model, x, resumed), runs[2][0])


# ------------------------------------------------------------------------------- backward in other ways
@pytest.mark.parametrize("store", [exact, int8, int4], ids=lambda v: v.__name__)
def test_a_second_backward_reads_the_same(store):
    model, x = make("CNN")
    with store().scope():
        loss = model(Data.apply(x.requires_grad_())).square().mean()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _bent(x):
    return x * x.square() / 3 + x


@pytest.mark.parametrize("activation", [F.gelu, F.silu, F.mish, F.softplus, F.elu])
def test_a_code_of_a_derivative_refuses_to_be_differentiated_again(activation):
    w = torch.randn(16, 16, requires_grad=True)

    def penalty(store):
        with store.scope():
            out = activation(data(8, 16) @ w).sum()
        (grad,) = torch.autograd.grad(out, w, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), w)

    name = activation.__name__
    with pytest.raises(DifferentiatedTwiceError, match=rf"derivative of `{name}`, .*operations={{'{name}': 'int8'}}"):
        penalty(int8())
    penalty(SavedTensorStore(lossy=Fidelity.INT8, min_numel=1, overrides={name: Fidelity.INT8}))


@pytest.mark.parametrize(("store", "bound"), [(exact, 0.0), (int8, 0.1)], ids=["exact", "int8"])
def test_double_backward(store, bound):
    w1, w2 = (torch.randn(16, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.randn(8, 16, dtype=torch.float64)

    def second(scope):
        with scope:
            out = _bent(_bent(x @ w1) @ w2).square().sum()
            grads = torch.autograd.grad(out, (w1, w2), create_graph=True)
            norm = sum(g.square().sum() for g in grads)
        return torch.cat(torch.autograd.grad(norm, (w1, w2)))

    plain, ours = second(torch.enable_grad()), second(store().scope())
    assert float((ours - plain).norm() / plain.norm()) <= bound


@pytest.mark.parametrize("where", ["after", "inside"])
def test_penalty_with_the_scope_around_the_first_forward_alone(where):
    """create_graph=True outside of the scope: what the first backward unpacks is kept for the second without hooks."""
    linear = nn.Linear(8, 8).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def penalty(scope):
        with scope:
            out = torch.sin(linear(torch.sin(linear(x)))).sum()
            grad = torch.autograd.grad(out, x, create_graph=True)[0] if where == "inside" else None
        if grad is None:
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), linear.weight)[0]

    assert torch.equal(penalty(exact().scope()), penalty(torch.enable_grad()))


def test_several_backward_calls_inside_one_scope():
    torch.manual_seed(0)
    generator, judge, z = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)), data(32, 8)
    results = []
    for scope in (torch.enable_grad(), exact().scope()):
        generator.zero_grad()
        judge.zero_grad()
        with scope:
            fake = generator(z.detach())
            judge(fake.detach()).mean().backward()
            (-judge(fake).mean()).backward()
            judge(fake.detach() * 2).square().mean().backward()
        results.append([p.grad.clone() for p in (*generator.parameters(), *judge.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_backward_under_autocast():
    model, x = make("attention, causal")
    results = []
    for store in (None, exact()):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            with store.scope() if store else torch.enable_grad():
                loss = model(Data.apply(leaf)).float().square().mean()
            results.append(torch.autograd.grad(loss, [leaf, *model.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ------------------------------------------------------------------------------- regions, custom functions
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


def test_a_custom_function_keeps_every_bit():
    x, store = torch.randn(1000, requires_grad=True), int4()
    with store.scope():
        Cube.apply(Data.apply(x)).sum().backward()
    expected = torch.ones(1000) * 3 * x.detach() * x.detach()
    assert torch.equal(x.grad, expected)


class Regions(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("store", [exact, int4], ids=["exact", "int4"])
def test_torchs_checkpointed_regions_are_left_to_themselves(store, use_reentrant):
    model, x = Regions(use_reentrant), torch.randn(WORDS)
    assert_same_bits(gradients(model, x, store()), gradients(model, x))


@pytest.mark.parametrize("order", ["regions first", "compression first"])
def test_our_regions_are_repeated_under_exact_compression(order):
    model, x = nn.Sequential(Attention(), Attention(), Attention()), torch.randn(WORDS)
    plain = gradients(model, x)
    steps = [
        lambda: apply_checkpointing(model, Checkpointing(modules=Attention)),
        lambda: apply_activation_compression(model, ActivationCompression(codecs=("exact",), min_numel=1)),
    ]
    for step in steps if order == "regions first" else steps[::-1]:
        step()
    assert_same_bits(gradients(model, x), plain)
