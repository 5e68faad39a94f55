"""What a function needs of the tensors that it keeps, where that depends on the device."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.function_mode import Call
from lightning_memsave.saved_tensors.policy import SHAPE_ONLY, need
from tests.saved_tensors.nets import exact, same_bits


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", Fidelity.SHAPE), ("cuda", Fidelity.SHAPE), ("mps", Fidelity.EXACT)]
)
def test_pooling_looks_for_its_maxima_again_where_it_keeps_no_indices(device, expected):
    tensor = SimpleNamespace(requires_grad=True, device=torch.device(device), grad_fn=None, output_nr=0)
    assert need(tensor, Call("max_pool2d", (), {}), Fidelity.INT8, {}).fidelity == expected
    assert need(tensor, Call("avg_pool2d", (), {}), Fidelity.INT8, {}).fidelity == Fidelity.SHAPE


INDEX, WINDOWS = torch.tensor([[0, 2, 1], [3, 0, 2], [1, 1, 0], [2, 3, 3]]), torch.rand(4, 3, 2)
SHAPES_READ = {
    "max_pool1d": lambda h: F.max_pool1d(h, 2),
    "max_pool2d": lambda h: F.max_pool2d(h, 2),
    "max_pool3d": lambda h: F.max_pool3d(h, 2),
    "adaptive_max_pool1d": lambda h: F.adaptive_max_pool1d(h, 2),
    "adaptive_max_pool2d": lambda h: F.adaptive_max_pool2d(h, 2),
    "adaptive_max_pool3d": lambda h: F.adaptive_max_pool3d(h, 2),
    "fractional_max_pool2d": lambda h: F.fractional_max_pool2d(h, 2, 3, _random_samples=WINDOWS),
    "fractional_max_pool3d": lambda h: F.fractional_max_pool3d(
        h[None], (1, 2, 2), (2, 3, 3), _random_samples=torch.rand(1, 4, 3)
    ),
    "avg_pool1d": lambda h: F.avg_pool1d(h, 2),
    "avg_pool2d": lambda h: F.avg_pool2d(h, 2),
    "avg_pool3d": lambda h: F.avg_pool3d(h, 2),
    "adaptive_avg_pool1d": lambda h: F.adaptive_avg_pool1d(h, 3),
    "adaptive_avg_pool2d": lambda h: F.adaptive_avg_pool2d(h, 3),
    "adaptive_avg_pool3d": lambda h: F.adaptive_avg_pool3d(h, 3),
    "gather": lambda h: h.gather(0, INDEX),
    "take": lambda h: h.take(INDEX),
    "take_along_dim": lambda h: h.take_along_dim(INDEX, 0),
    "masked_select": lambda h: h.masked_select(torch.arange(h.numel()).view(h.shape) % 3 == 0),
    "cummax": lambda h: h.cummax(0).values,
    "cummin": lambda h: torch.cummin(h, 0)[0],
    "index_add": lambda h: torch.ones(5, 3).index_add(0, INDEX[:, 0], h),
    "index_add_": lambda h: torch.ones(5, 3).index_add_(0, INDEX[:, 0], h, alpha=2),
    "index_copy": lambda h: torch.ones(5, 3).index_copy(0, torch.tensor([0, 2, 1, 3]), h),
    "index_copy_": lambda h: torch.ones(5, 3).index_copy_(0, torch.tensor([0, 2, 1, 3]), h),
    "put": lambda h: torch.ones(12).put(torch.arange(12), h, accumulate=True),
    "put_": lambda h: torch.ones(12).put_(torch.arange(12), h),
    "pad, reflect": lambda h: F.pad(h, (2, 1, 1, 2), mode="reflect"),
    "pad, replicate": lambda h: F.pad(h, (2, 1, 1, 2), mode="replicate"),
    "conv1d": lambda h: F.conv1d(h, torch.ones(2, 3, 2)),
    "conv2d": lambda h: F.conv2d(h, torch.ones(2, 3, 2, 2), padding=1),
    "conv3d": lambda h: F.conv3d(h[None], torch.ones(2, 4, 2, 2, 2), stride=2),
    "conv_transpose1d": lambda h: F.conv_transpose1d(h, torch.ones(3, 2, 2)),
    "conv_transpose2d": lambda h: F.conv_transpose2d(h, torch.ones(3, 2, 2, 2)),
    "conv_transpose3d": lambda h: F.conv_transpose3d(h[None], torch.ones(4, 2, 2, 2, 2)),
}
ROWS = ("gather", "take", "masked", "cum", "index", "put")


@pytest.mark.parametrize("name", SHAPES_READ)
def test_of_what_only_the_shape_is_read_nothing_is_kept(name):
    """Gradients are equal to the bit; what is kept besides is an index or a mask."""
    shape = (4, 3) if name.startswith(ROWS) else (4, 3, 8) if name.endswith("1d") else (4, 3, 8, 8)
    tally = same_bits(lambda h: SHAPES_READ[name](h).sin(), torch.randn(shape))
    assert tally.entries["shape only"] == 1, tally
    assert tally.entries["raw"] <= 2, tally  # what the sine reads, and an index


def test_every_function_of_which_the_shape_is_read_was_met():
    assert SHAPES_READ.keys() >= SHAPE_ONLY


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("autocast", [False, True])
def test_convolutions_that_are_frozen_keep_no_inputs(layout, autocast):
    """Of six layers of which only biases train, ReLU's signs are left, and autocast's copies of weights."""
    layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6)))
    for layer in layers:
        layer[0].weight.requires_grad_(False)
    biases = [layer[0].bias for layer in layers]
    tally = same_bits(layers, torch.randn(4, 8, 16, 16), *biases, layout=layout, autocast=autocast)
    signs, casts = 6 * 4 * 8 * 16 * 16 // 8, 6 * 2 * 8 * 8 * 3 * 3
    assert tally.entries["shape only"] == 1
    assert tally.held_bytes == signs + (casts if autocast else 0), tally
    if not autocast:
        assert (tally.plain_bytes, tally.held_bytes) == (229_376, 6_144)


@pytest.mark.parametrize("affine", [True, False])
def test_batchnorms_in_eval_mode_that_are_frozen_keep_no_inputs(affine):
    """As in detection, where the backbone's statistics and weights stay: ReLU's signs are left."""

    def layer():
        norm = nn.BatchNorm2d(8, affine=affine).eval()
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm, nn.ReLU())

    layers = nn.Sequential(*(layer() for _ in range(4)))
    for conv, norm, _ in layers:
        conv.weight.requires_grad_(False)
        norm.requires_grad_(False)
    biases = [conv.bias for conv, _, _ in layers]
    tally = same_bits(layers, torch.randn(4, 8, 16, 16), *biases)
    assert tally.held_bytes == 4 * 4 * 8 * 16 * 16 // 8, tally


@pytest.mark.parametrize("case", ["weight", "training", "statistics of the batch"])
def test_other_batchnorms_read_their_input(case):
    norm = nn.BatchNorm2d(8, track_running_stats=case != "statistics of the batch").train(case == "training")
    norm.weight.requires_grad_(case == "weight")
    norm.bias.requires_grad_(False)
    trained = [norm.weight] if case == "weight" else []
    before = copy.deepcopy(norm.state_dict())

    def run(h):
        norm.load_state_dict(before)
        return norm(h)

    tally = same_bits(run, torch.randn(4, 8, 6, 6), *trained)
    assert not tally.entries["shape only"]


def test_a_weight_that_trains_reads_the_input():
    weight = nn.Parameter(torch.randn(2, 3, 2, 2))
    tally = same_bits(lambda h: F.conv2d(h, weight), torch.randn(4, 3, 8, 8), weight)
    assert not tally.entries["shape only"]


def test_weights_that_a_transform_has_wrapped_read_the_input():
    """Inside of vmap a weight does not say that it needs a gradient."""
    weights = nn.Parameter(torch.randn(3, 2, 3, 2, 2))
    convolve = torch.func.vmap(F.conv2d, in_dims=(None, 0))
    same_bits(lambda h: convolve(h, weights), torch.randn(4, 3, 8, 8), weights)


_WEIGHT, _MEAN, _VARIANCE = torch.randn(2, 3, 2, 2), torch.randn(3), torch.rand(3) + 0.5


@pytest.mark.parametrize(
    "frozen", [lambda h: F.conv2d(h, _WEIGHT), lambda h: F.batch_norm(h, _MEAN, _VARIANCE, _VARIANCE, _MEAN, False)]
)
def test_shapes_serve_second_derivatives(frozen):
    """A penalty on the gradient of an input, behind a frozen layer: what was not kept is not read."""
    x = torch.randn(4, 3, 8, 8)

    def penalty():
        leaf = x.clone().requires_grad_()
        out = frozen(leaf * 1).square().sum()
        (gradient,) = torch.autograd.grad(out, leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaf)[0]

    plain = penalty()
    with exact().scope():
        assert torch.equal(penalty(), plain)
