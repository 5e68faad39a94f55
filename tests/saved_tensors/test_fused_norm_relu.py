"""The fused chain: one 4-bit code for normalisation and ReLU, unbiased, with the ReLU's mask exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.measuring import allocation_peak
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.fused_norm_relu import Affine
from tests.saved_tensors.nets import Data, int4

SHAPE = (8, 16, 16, 16)
BLOCKS = 8 * 16 * 16 * 16 // 256
CHAIN_BYTES = BLOCKS * (128 + 8)  # 256 codes of 4 bits and four bfloat16 ranges
SEPARATE_BYTES = 2 * BLOCKS * (128 + 4)  # two tensors, two ranges each


class Chain(nn.Module):
    def __init__(self, norm, inplace=False):
        super().__init__()
        self.norm, self.conv, self.relu = norm, nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace)

    def forward(self, x):
        return self.conv(self.relu(self.norm(x)))


def randomized(norm):
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    return norm


NORMS = {
    "batch": lambda: randomized(nn.BatchNorm2d(16)),
    "batch, negative weight": lambda: negative(randomized(nn.BatchNorm2d(16))),
    "batch, not affine": lambda: nn.BatchNorm2d(16, affine=False),
    "group": lambda: randomized(nn.GroupNorm(4, 16)),
}


def negative(norm):
    with torch.no_grad():
        norm.weight[::2].neg_()
    return norm


def run(model, x, store=None, layout=torch.preserve_format):
    leaf = x.clone(memory_format=layout).requires_grad_()
    with store.scope() if store else torch.enable_grad():
        out = Data.apply(model(Data.apply(leaf)))
    grads = torch.autograd.grad(
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), [leaf, *model.parameters()]
    )
    return torch.cat([g.reshape(-1) for g in grads])


PER_CHANNEL, PER_SAMPLE, PER_FEATURE = (16, 1, 1), (20, 16, 1, 1), (5,)


@pytest.mark.parametrize("shapes", [[PER_CHANNEL], [PER_SAMPLE], [(20, 16, 3, 1), PER_FEATURE]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [20, 1])
def test_the_inverse_of_a_part_is_that_of_the_whole(shapes, dtype, size):
    shapes = [(size, *shape[1:]) if len(shape) == 4 else shape for shape in shapes]
    steps = tuple((torch.rand(shape) + 0.5, torch.randn(shape)) for shape in shapes)
    z = torch.randn(size, 16, 3, 5).to(dtype)
    expected = z.clone()
    for scale, shift in reversed(steps):
        expected.sub_(shift).div_(scale)
    assert torch.equal(Affine(steps, None, None, is_of_channels=True).inverse(z), expected)


def test_the_inverse_of_one_normalised_vector():
    z, weight, bias = torch.randn(24).bfloat16(), torch.rand(24) + 0.5, torch.randn(24)
    steps = (torch.tensor([2.0]), torch.tensor([0.5])), (weight, bias)
    expected = z.clone().sub_(bias).div_(weight).sub_(0.5).div_(2)
    assert torch.equal(Affine(steps, None, None, is_of_channels=False).inverse(z), expected)


def test_the_inverse_of_16_bits_takes_float32_copies_of_a_part_of_it():
    z, scale = torch.randn(SHAPE).bfloat16(), torch.full((16, 1, 1), 2.0)
    affine = Affine(((scale, scale),), None, None, is_of_channels=True)
    assert allocation_peak(lambda: affine.inverse(z), 0) == 2 * 4 * z.numel() // 8, "operand and result"


def fused(**options):
    return int4(fuse=True, **options)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", NORMS)
def test_bytes_of_the_pair(name, layout, inplace):
    store = fused()
    run(Chain(NORMS[name](), inplace), torch.randn(SHAPE), store, layout)
    assert store.tally.entries["recomputed"] == 2
    statistics = store.tally.plain_bytes - 2 * 4 * 8 * 16 * 16 * 16  # are kept as they are
    assert statistics <= 2 * 4 * 8 * 16
    assert store.tally.held_bytes == CHAIN_BYTES + statistics
    assert CHAIN_BYTES / (8 * 16 * 16 * 16) == 0.53125


@pytest.mark.parametrize("name", NORMS)
def test_unbiased(name):
    """The mean of N gradients errs by a single one's error / sqrt(N)."""
    model, x, count = Chain(NORMS[name]()), torch.randn(SHAPE), 24
    plain = run(model, x).double()
    found = torch.stack([run(model, x, fused(seed=seed)) for seed in range(count)]).double()
    single = (found - plain).norm(dim=1).square().mean().sqrt()
    assert 0.005 * plain.norm() < single < plain.norm()
    assert float((found.mean(0) - plain).norm()) <= 1.3 * float(single) / count**0.5


@pytest.mark.parametrize("name", NORMS)
def test_the_mask_is_exact(name):
    """A convolution of the identity, frozen: the gradient that passes the ReLU shows the mask alone."""
    norm, x = NORMS[name](), torch.randn(SHAPE)
    masks, weight = [], torch.eye(16).view(16, 16, 1, 1)
    for store in (None, fused()):
        leaf = x.clone().requires_grad_()
        with store.scope() if store else torch.enable_grad():
            z = norm(Data.apply(leaf))
            z.register_hook(lambda grad: masks.append(grad.clone()))
            out = Data.apply(F.conv2d(F.relu(z), nn.Parameter(weight)))
            del z
        out.sum().backward()
    assert store.tally.entries["recomputed"] == 2
    assert torch.equal(masks[0], masks[1])
    assert set(masks[0].unique().tolist()) == {0.0, 1.0}


def with_weight(value):
    norm = randomized(nn.BatchNorm2d(16))
    with torch.no_grad():
        norm.weight[3] = value
    return norm


def all_zero():
    norm = nn.BatchNorm2d(16)
    nn.init.zeros_(norm.weight)
    return norm


FALLBACKS = {
    "one weight is zero": lambda: with_weight(0.0),
    "one weight is tiny": lambda: with_weight(1e-4),
    "one weight is tiny and negative": lambda: with_weight(-1e-4),
    "all weights are zero": all_zero,
    "eval mode": lambda: randomized(nn.BatchNorm2d(16)).eval(),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_falls_back_to_separate_codes(name):
    model, x, store = Chain(FALLBACKS[name]()), torch.randn(SHAPE), fused()
    ours, plain = run(model, x, store), run(model, x)
    assert store.tally.entries["recomputed"] == 0
    assert store.tally.entries["int4"] in (1, 2)  # a ReLU of constants has two values at most in a channel
    assert bool(ours.isfinite().all())
    assert float((ours - plain).norm() / plain.norm()) < 0.5


def test_the_fallback_is_what_int4_keeps():
    model, x = Chain(with_weight(0.0)), torch.randn(SHAPE)
    fallback, separate = (SavedTensorStore(lossy=Fidelity.INT4, fuse=fuse) for fuse in (True, False))
    for store in (fallback, separate):  # other seeds are drawn: the same bytes, not the same bits
        run(model, x, store)
    assert fallback.tally == separate.tally
    assert fallback.tally.held_bytes == SEPARATE_BYTES


def test_without_a_consumer_behind_the_relu_the_chain_is_no_larger_than_its_parts():
    """A bit for the ReLU and 4 for the normalisation's input would be 0.64 B."""
    norm, store = randomized(nn.BatchNorm2d(16)), SavedTensorStore(lossy=Fidelity.INT4, fuse=True)
    leaf = torch.randn(SHAPE, requires_grad=True)
    with store.scope():
        out = Data.apply(F.relu(norm(Data.apply(leaf))))
    out.sum().backward()
    assert store.tally.held_bytes == CHAIN_BYTES


def test_an_exact_consumer_of_the_input_forbids_the_chain():
    """sin needs every bit of x: the chain would take them."""
    norm, conv, x = randomized(nn.BatchNorm2d(16)), nn.Conv2d(16, 16, 1), torch.randn(SHAPE)

    def model(h):
        return conv(F.relu(norm(h))) + h.sin()

    grads = []
    for store in (None, fused()):
        leaf = x.clone().requires_grad_()
        with store.scope() if store else torch.enable_grad():
            out = Data.apply(model(Data.apply(leaf)))
        grads.append(torch.autograd.grad(out[:, :, 0].sum(), leaf)[0])
    error = (grads[1] - grads[0]).norm() / grads[0].norm()
    assert float(error) < 0.3
    fidelity = SavedTensorStore(lossy=Fidelity.EXACT, fuse=True, min_numel=1)
    assert torch.equal(run(Chain(norm), x, fidelity), run(Chain(norm), x)) or fidelity.tally.entries["recomputed"] == 0
