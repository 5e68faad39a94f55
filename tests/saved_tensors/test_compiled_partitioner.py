"""Codes in compiled code: what is kept, in how many bytes, and what it does to gradients."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.numerics.kbit import coded_bytes
from lightning_memsave.saved_tensors import SavedTensorStore
from lightning_memsave.saved_tensors.compiled_operators import told_to
from lightning_memsave.saved_tensors.compiled_partitioner import CodePartitioner, Settings
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.torch_internals.partitioning import min_cut
from tests.saved_tensors.compiled_nets import MLP, NETS, Attention, ByHand, Counting, Images, Kept, gradients, made

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles


NOT_LISTED = {
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softmax": lambda x: torch.softmax(x, -1),
    "sin": torch.sin,
    "cube": lambda x: x**3,
    "quotient": lambda x: 1 / (2 + x.abs()),
    "swish by hand": lambda x: x * torch.sigmoid(x),
    "hardtanh": F.hardtanh,
    "selu": F.selu,
    "bell": lambda x: torch.exp(-(x**4) / 2),
    "log": lambda x: torch.log1p(x.square()),
}


class Cube(torch.autograd.Function):
    """A function whose own backward is made of products."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (3 * (x * x))


class Hooked(nn.Module):
    """A layer whose input goes through a sine in a hook."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.layer.register_forward_pre_hook(lambda module, args: (torch.sin(args[0]),))

    def forward(self, x):
        return self.layer(x)


class Masked(nn.Module):
    """Attention under a mask that is made inside, of numbers that no code holds."""

    def forward(self, x):
        heads = x.view(4, 4, 4, 64)
        mask = torch.where(torch.ones(4, 4, dtype=torch.bool).tril(), 0.0, -1e4).expand(4, 4, 4, 4)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask.contiguous()).reshape(64, 64)


NO_CODE = {
    "custom function": Cube.apply,
    "hook": Hooked(),
    "integers": lambda x: x * (3 * x).int().float(),
    "rounded quotient": lambda x: x * torch.div(x, 0.3, rounding_mode="floor"),
    "bits": lambda x: x * (x.view(torch.int32) & -65536).view(torch.float32),
}
"""Functions through which no noise may go: what is in front of them is kept as it is."""


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def drawn(model, kept, x, num_draws):
    """Return the gradients of so many draws of the noise, [num_draws, n]."""
    run, scope = torch.compile(model, backend=kept.backend), Counting()
    found = []
    for step in range(num_draws):
        scope.noise.begin(step)
        with told_to(scope):
            found.append(gradients(model, run, x))
    return torch.stack(found)


# ---------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("fidelity", [Fidelity.INT8, Fidelity.INT4])
@pytest.mark.parametrize("name", NETS)
def test_the_mean_of_many_draws_is_the_gradient(name, fidelity):
    """What 24 draws leave of their noise is chance: a root of 24 less than that of one."""
    model, x = made(name)
    plain = gradients(model, model, x)
    kept = Kept(fidelity)
    draws = drawn(model, kept, x, 24)
    noise = (draws - plain).norm(dim=1).mean()
    assert 0 < noise < {Fidelity.INT8: 0.05, Fidelity.INT4: 0.6}[fidelity] * plain.norm()
    assert (draws.mean(0) - plain).norm() < 1.5 * noise / 24**0.5


@pytest.mark.parametrize("name", NETS)
def test_the_noise_is_that_of_eager_code(name):
    model, x = made(name)
    plain, store = gradients(model, model, x), SavedTensorStore(lossy=Fidelity.INT4, min_numel=64)

    def eager(x):
        with store.scope():
            return model(x)

    found = []
    for step in range(8):
        store.draw_for(step)
        found.append(gradients(model, eager, x))
    expected = (torch.stack(found) - plain).norm(dim=1).mean()
    noise = (drawn(model, Kept(Fidelity.INT4), x, 8) - plain).norm(dim=1).mean()
    assert noise < 1.35 * expected


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "gated")) for name in NETS])
def test_noise_is_repeated_by_the_step(name):
    model, x = made(name)
    first, kept = drawn(model, Kept(Fidelity.INT4), x, 2), Kept(Fidelity.INT4)
    again = drawn(model, kept, x, 2)
    assert torch.equal(first, again)
    assert not torch.equal(*again)


def test_two_calls_of_one_graph_have_noise_of_their_own():
    model, x = made("MLP")
    run, scope = torch.compile(model, backend=Kept(Fidelity.INT4).backend), Counting()
    with told_to(scope):
        first = gradients(model, run, x)
        assert not torch.equal(first, gradients(model, run, x))


def test_a_relus_mask_is_exact():
    """Where its output is not positive, no gradient flows: whatever the codes make of it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))
    x = torch.randn(64, 64, requires_grad=True)
    run = torch.compile(model, backend=Kept(Fidelity.INT2).backend)
    with told_to(Counting()):
        run(x).sum().backward()
    expected = (model[0](x) > 0).float() @ (model[0].weight * model[2].weight.sum(0)[:, None])
    assert torch.allclose(x.grad, expected, atol=1e-5)


@pytest.mark.parametrize("function", NOT_LISTED.values(), ids=NOT_LISTED)
def test_functions_that_the_policy_does_not_list_keep_every_bit(function):
    """The gradient of the first layer goes through the function's derivative, and through no code."""
    torch.manual_seed(0)
    first, last, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(64, 64)

    def step(x):
        return last(function(first(x))).sum()

    expected = torch.autograd.grad(step(x), first.weight)[0]
    with told_to(Counting()):
        (found,) = torch.autograd.grad(torch.compile(step, backend=Kept(Fidelity.INT2).backend)(x), first.weight)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo, of a Function
@pytest.mark.parametrize("function", NO_CODE.values(), ids=NO_CODE)
def test_what_only_looks_like_the_tables_functions_gets_no_noise(function):
    torch.manual_seed(0)
    first, last, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(64, 64)

    def step(x):
        return last(function(first(x))).sum()

    expected = torch.autograd.grad(step(x), first.weight)[0]
    draws = []
    with told_to(Counting()):
        for _ in range(2):
            run = torch.compile(step, backend=Kept(Fidelity.INT2).backend)
            draws.append(torch.autograd.grad(run(x), first.weight)[0])
    noise = (draws[0] - draws[1]).norm() / expected.norm()
    assert noise < 1e-4 or (draws[0] - expected).norm() < 1.2 * noise * expected.norm()
    if function in (NO_CODE["custom function"], NO_CODE["hook"]):
        assert torch.allclose(draws[0], expected, rtol=1e-3, atol=1e-2)


def test_a_mask_that_is_made_inside_is_kept_as_it_is():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), Masked(), nn.Linear(64, 64)), torch.randn(64, 64)
    plain = gradients(model, model, x)
    assert (drawn(model, Kept(Fidelity.INT4), x, 1)[0] - plain).norm() < 0.2 * plain.norm()


class OfWeights(nn.Module):
    """A layer whose weight is computed from parameters."""

    def __init__(self):
        super().__init__()
        self.base, self.scale = nn.Parameter(torch.randn(64, 64) / 8), nn.Parameter(torch.rand(64, 1) + 0.5)

    def forward(self, x):
        return F.linear(x, self.base * self.scale)


def test_what_is_made_of_weights_alone_is_kept_as_it_is():
    torch.manual_seed(0)
    model, x, kept = nn.Sequential(OfWeights(), OfWeights()), torch.randn(128, 64), Kept(Fidelity.INT2)
    drawn(model, kept, x, 1)
    codes = [name for name, dtype, _ in kept.graphs[0] if dtype == torch.uint8]
    assert len(codes) == 1, "what the second layer reads"


def test_weights_in_the_dtype_of_autocast_are_kept_as_they_are():
    torch.manual_seed(0)
    model, x, kept = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(128, 64), Kept(Fidelity.INT2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drawn(model, kept, x, 1)
    assert len([name for name, dtype, _ in kept.graphs[0] if dtype == torch.uint8]) == 1


@pytest.mark.parametrize("spread", [1, 1000])
def test_channels_of_other_sizes_do_not_share_their_noise(spread):
    """BatchNorm makes channels alike: noise of a large one in a small one would be large behind it."""
    torch.manual_seed(0)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3)
            with torch.no_grad():
                self.conv.weight.mul_(torch.logspace(0, -math.log10(spread), 16)[:, None, None, None])

        def forward(self, x):
            return self.last(self.norm(self.conv(x)))

    model, x = Scaled(), torch.randn(4, 3, 18, 18)
    plain = gradients(model, model, x)
    noise = (drawn(model, Kept(Fidelity.INT4), x, 8) - plain).norm(dim=1).mean() / plain.norm()
    assert noise < 0.15


def test_checkpoints_inside_say_themselves_what_is_kept():
    torch.manual_seed(0)
    block, x = Attention(dropout=0.1), torch.randn(4, 32, 64)

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    kept = Kept(Fidelity.INT4)
    assert drawn(Repeated(), kept, x, 1).isfinite().all()
    assert not [name for name, dtype, _ in kept.graphs[0] if name.startswith("memsave")]


def test_a_sum_is_coded_once_and_not_its_parts():
    """Noise of a residual stream does not add up along it: each sum is kept itself."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention(), Attention(), Attention()), torch.randn(2, 16, 64)
    kept = Kept(Fidelity.INT4)
    drawn(model, kept, x, 1)
    decoded = [node for node in kept.backwards[0].graph.nodes if "decode" in str(node.target)]
    assert len(decoded) == len({node.args[0] for node in decoded}), "nobody decodes twice"


# ---------------------------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize("fidelity", [Fidelity.INT8, Fidelity.INT4, Fidelity.INT2])
def test_an_mlp_keeps_two_codes(fidelity):
    model, x = made("MLP")
    kept = Kept(fidelity)
    drawn(model, kept, x, 1)
    bits = {Fidelity.INT8: 8, Fidelity.INT4: 4, Fidelity.INT2: 2}[fidelity]
    assert kept.num_bytes == 2 * coded_bytes(128 * 256, bits, row=256), "the GELU's derivative and its output"


def test_bfloat16_halves_what_is_kept():
    model, x = made("MLP")
    kept = Kept(Fidelity.BF16)
    drawn(model, kept, x, 1)
    assert kept.num_bytes == 2 * 2 * 128 * 256


def test_a_mask_takes_a_bit():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), torch.randn(128, 64)
    kept = Kept(Fidelity.INT8)
    drawn(model, kept, x, 1)
    assert kept.num_bytes == 128 * 64 // 8


def test_views_of_one_tensor_share_its_code():
    """Query, key and value: the fused attention keeps them, its output and the log-sum-exp."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 32, 64)
    kept = Kept(Fidelity.INT4)
    drawn(model, kept, x, 1)
    tokens = 4 * 32
    eight_bits = coded_bytes(3 * 64 * tokens, 8, row=192) + coded_bytes(64 * tokens, 8, row=64)
    codes = [num_bytes for _, dtype, num_bytes in kept.graphs[0] if dtype in (torch.uint8, torch.bfloat16)]
    four_bits = 2 * coded_bytes(4 * 64 * tokens, 4, row=256) + 2 * coded_bytes(64 * tokens, 4, row=64)
    assert sum(codes) == eight_bits + four_bits  # the GELU's two; what the first Linear and the MLP read
    assert len(codes) == 2 * 6


@pytest.mark.parametrize(
    ("square", "is_coded"),
    [(lambda x: x.pow(2), True), (lambda x: x**2, True), (torch.square, True), (lambda x: x.pow(4), False)],
)
def test_what_is_squared_is_coded_and_other_powers_are_not(square, is_coded):
    torch.manual_seed(0)
    model, x = ByHand(square), torch.randn(128, 64)
    kept = Kept(Fidelity.INT4)
    drawn(model, kept, x, 1)
    codes, exact = 2 * coded_bytes(128 * 64, 4, row=64), 4 * 128 * 64 + coded_bytes(128 * 64, 4, row=64)
    assert kept.num_bytes == (codes if is_coded else exact) + 4 * 128, "and the root of each mean"


def test_small_tensors_are_left_alone():
    model, x = made("MLP")
    kept = Kept(Fidelity.INT4, min_numel=128 * 256 + 1)
    drawn(model, kept, x, 1)
    assert kept.num_bytes == 2 * 4 * 128 * 256


def test_what_is_returned_is_kept_as_it_is():
    class Both(MLP):
        def forward(self, x):
            hidden = self.activation(self.up(x))
            return torch.cat([self.down(hidden), hidden], -1)[..., :64], hidden

    model, kept = Both(), Kept(Fidelity.INT4)
    run = torch.compile(model, backend=kept.backend)
    with told_to(Counting()):
        out, hidden = run(torch.randn(128, 64))
    assert {name: num_bytes for name, _, num_bytes in kept.graphs[0]}.get("mul_2", 4 * 128 * 256) == 4 * 128 * 256
    assert hidden.shape == (128, 256)
    (out.sum() + hidden.sum()).backward()


def test_images_are_coded_as_they_lie():
    """Convolutions want channels last: a code in another order would need a copy of each tensor."""
    model, x = made("images")
    kept = Kept(Fidelity.INT4)
    drawn(model, kept, x, 1)
    strides = [
        node.args[-1] for node in kept.forwards[0].graph.nodes if str(node.target) == "lightning_memsave.encode.default"
    ]
    assert [stride[1] for stride in strides].count(1) == 4, "what convolutions read"
    assert len(strides) == 8, "what BatchNorms read as well, in rows of a channel"


# ---------------------------------------------------------------------------------------------------- settings
def test_a_functions_codec_can_be_set():
    model, x = made("MLP")
    kept = Kept(Fidelity.INT4, overrides={"gelu": Fidelity.EXACT})
    drawn(model, kept, x, 1)
    assert kept.num_bytes == 4 * 128 * 256 + coded_bytes(128 * 256, 4, row=256)


def test_a_modules_codec_can_be_set():
    model, x = made("MLP")
    kept = Kept(Fidelity.INT4, modules={"down": Fidelity.EXACT})
    drawn(model, kept, x, 1)
    assert kept.num_bytes == 4 * 128 * 256 + coded_bytes(128 * 256, 4, row=256)


def test_caches_tell_settings_apart():
    partitioners = [
        CodePartitioner(Settings(fidelity, {}, modules, 1024), lambda path: None, lambda: "net")
        for fidelity in (Fidelity.INT8, Fidelity.INT4)
        for modules in ({}, {"head": Fidelity.EXACT})
    ]
    assert len({each.uuid() for each in partitioners}) == 4
    assert len({pickle.dumps(each) for each in partitioners}) == 4  # as the compiler's settings are


# ---------------------------------------------------------------------------------------------------- shapes
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "images")) for name in NETS])
def test_sizes_may_change(name):
    model, x = made(name)
    run, scope = torch.compile(model, backend=Kept(Fidelity.INT8).backend), Counting()
    for size in (4, 3, 2):  # from the second on, the batch's size is a symbol
        scope.noted.clear()
        plain = gradients(model, model, x[:size])
        with told_to(scope):
            found = gradients(model, run, x[:size])
        assert (found - plain).norm() < 0.05 * plain.norm()
    assert any(kind == "int8" for kind, *_ in scope.noted)


def test_rows_of_unknown_length_are_kept_as_they_are():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return (self.weight @ x.relu().t()) ** 2  # rows of x.t() are as long as the batch

    model, kept = Turned(), Kept(Fidelity.INT8)
    run = torch.compile(model, backend=kept.backend, dynamic=True)
    for size in (100, 90):
        x = torch.randn(size, 64)
        plain = gradients(model, model, x)
        with told_to(Counting()):
            assert (gradients(model, run, x) - plain).norm() < 0.05 * plain.norm()


def test_half_precision_is_coded():
    model, x = made("MLP")
    model, x = model.bfloat16(), x.bfloat16()
    kept = Kept(Fidelity.INT4)
    found = drawn(model, kept, x, 1)
    assert kept.num_bytes == 2 * coded_bytes(128 * 256, 4, row=256)
    assert found.isfinite().all()


def test_gradients_are_those_of_torchs_partitioner_where_nothing_is_coded():
    torch.manual_seed(0)
    model, x = Images(), torch.randn(4, 3, 16, 16)
    kept = Kept(Fidelity.INT8, min_numel=2**40)
    plain = gradients(model, torch.compile(model, backend=Kept(partitioner=min_cut).backend), x)
    torch.compiler.reset()
    with told_to(Counting()):
        found = gradients(model, torch.compile(model, backend=kept.backend), x)
    assert torch.allclose(found, plain, rtol=1e-4, atol=1e-7)


def test_dropouts_mask_is_the_same_in_both_halves():
    torch.manual_seed(0)
    model, x = Attention(dropout=0.5), torch.randn(4, 32, 64)
    run = torch.compile(model, backend=Kept(Fidelity.INT8).backend)
    torch.manual_seed(1)
    with told_to(Counting()):
        found = gradients(model, run, x)
    torch.compiler.reset()
    torch.manual_seed(1)
    plain = gradients(model, torch.compile(model, backend=Kept(partitioner=min_cut).backend), x)
    assert (found - plain).norm() < 0.05 * plain.norm()


def test_functional_relu_and_inplace_relu_agree():
    found = []
    for activation in (F.relu, F.relu_):
        torch.manual_seed(0)
        model, x = Images(activation), torch.randn(4, 3, 16, 16)
        found.append(drawn(model, Kept(Fidelity.INT8), x, 1)[0])
    assert torch.allclose(*found, rtol=0.05, atol=1e-4)
