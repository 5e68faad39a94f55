"""Every rule is used, and gives the same bits as plain autograd."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion

from lightning_memsave.saved_tensors.recompute_rules import RULES
from lightning_memsave.saved_tensors.saved_storage import SavedTensor
from tests.saved_tensors.nets import data, exact, parameter, same_bits

IMAGE = (3, 8, 7, 5)


def frozen(module):
    return module.requires_grad_(False)


def partly(module, name):
    getattr(module, name).requires_grad_(False)
    return module


def randomized(module):
    for p in module.parameters():
        nn.init.normal_(p)
    return module


NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, not affine": lambda: nn.BatchNorm2d(8, affine=False),
    "batch, frozen": lambda: frozen(randomized(nn.BatchNorm2d(8))),
    "batch, frozen weight": lambda: partly(randomized(nn.BatchNorm2d(8)), "weight"),
    "batch, frozen bias": lambda: partly(randomized(nn.BatchNorm2d(8)), "bias"),
    "batch, no statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "batch, eval": lambda: randomized(nn.BatchNorm2d(8)).eval(),
    "batch, eval, not affine": lambda: nn.BatchNorm2d(8, affine=False).eval(),
    "group": lambda: randomized(nn.GroupNorm(4, 8)),
    "group, not affine": lambda: nn.GroupNorm(2, 8, affine=False),
    "group, frozen": lambda: frozen(randomized(nn.GroupNorm(4, 8))),
    "group, frozen bias": lambda: partly(randomized(nn.GroupNorm(4, 8)), "bias"),
    "layer": lambda: randomized(nn.LayerNorm(5)),
    "layer, two dimensions": lambda: randomized(nn.LayerNorm((7, 5))),
    "layer, no bias": lambda: randomized(nn.LayerNorm(5, bias=False)),
    "layer, not affine": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "layer, frozen": lambda: frozen(randomized(nn.LayerNorm(5, eps=1e-3))),
}


@pytest.mark.parametrize("setting", ["plain", "channels_last", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", NORMS)
def test_normalisations(name, setting):
    norm, weight = NORMS[name](), parameter(8, 8, 3, 3)
    x = torch.randn(IMAGE) * 3 + 1
    layout = torch.channels_last if setting == "channels_last" else None
    if setting == "bfloat16":
        norm, weight, x = norm.bfloat16(), parameter(8, 8, 3, 3).bfloat16().detach().requires_grad_(), x.bfloat16()
    trained = [p for p in norm.parameters() if p.requires_grad]
    tally = same_bits(
        lambda h: F.conv2d(norm(h), weight), x, weight, *trained, layout=layout, autocast=setting == "autocast"
    )
    if setting == "autocast" and "layer" in name:
        return  # in float32: its cast is kept as well, and is no smaller
    # Of the input of a BatchNorm in eval mode without weights nothing is read, so its result is kept instead.
    assert tally.entries["shape only" if name == "batch, eval, not affine" else "recomputed"] >= 1


@pytest.mark.parametrize("shape", [(4, 3), (9, 16), (2, 6, 11), (5, 3, 1, 1), (2, 5, 3, 4, 3), (40, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_norms_rounding_is_torchs_own_at_any_size(shape, dtype):
    """Fused multiply-adds differ between a vector's lanes and its tail: arithmetic outside of the kernel differs."""
    norm = randomized(
        {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](shape[1])
    ).to(dtype)
    weight = torch.randn(shape[1:], dtype=dtype, requires_grad=True)
    tally = same_bits(lambda h: norm(h) * weight, torch.randn(shape, dtype=dtype), weight, *norm.parameters())
    assert tally.entries["recomputed"] == 1


ACTIVATIONS = {
    "ReluBackward0": F.relu,
    "GeluBackward0": F.gelu,
    "GeluBackward0, tanh": lambda h: F.gelu(h, approximate="tanh"),
    "SiluBackward0": F.silu,
    "MishBackward0": F.mish,
    "EluBackward0": lambda h: F.elu(h, 0.7),
    "EluBackward0, selu": F.selu,
    "HardswishBackward0": F.hardswish,
    "HardsigmoidBackward0": F.hardsigmoid,
    "LeakyReluBackward0": lambda h: F.leaky_relu(h, 0.2),
    "HardtanhBackward0": lambda h: F.hardtanh(h, -0.3, 0.7),
    "HardtanhBackward0, relu6": F.relu6,
    "SoftplusBackward0": lambda h: F.softplus(h, 2.0, 1.0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    weight = parameter(8, 8)

    def function(h):
        return h.cos() + ACTIVATIONS[name](h) @ weight  # a mask is enough for some: cos keeps the input before

    tally = same_bits(function, torch.randn(6, 5, 8), weight)
    assert tally.entries["recomputed"] >= 1


def keeping(function):
    """h -> function(h) @ weight, where somebody keeps h."""
    weight = parameter(8, 8)
    return lambda h: function(h) @ weight + h.sin() @ torch.eye(8), weight


ARITHMETIC = {
    "AddBackward0": lambda h: h + h.exp(),
    "AddBackward0, alpha": lambda h: torch.add(h, h.exp(), alpha=0.3),
    "AddBackward0, number": lambda h: h + 1.5,
    "AddBackward0, number first": lambda h: 1.5 + h,
    "SubBackward0": lambda h: h - h.exp(),
    "SubBackward0, number": lambda h: h - 1.5,
    "MulBackward0": lambda h: h * h.cos(),
    "MulBackward0, number": lambda h: h * 1.5,
    "MulBackward0, number first": lambda h: 1.5 * h,
    "MulBackward0, constant": lambda h: h * torch.arange(8.0),
    "MulBackward0, constant first": lambda h: torch.arange(8.0) * h,
    "NegBackward0": lambda h: -h,
    "ToCopyBackward0": lambda h: h.double().float(),
    "ViewBackward0": lambda h: (h * 2).view(3, 5, 8),
    "UnsafeViewBackward0": lambda h: (h * 2).unsafe_chunk(1)[0].reshape(15, 8),
    "ExpandBackward0": lambda h: (h * 2).view(15, 1, 8).expand(15, 1, 8).reshape(15, 8),
    "TransposeBackward0": lambda h: (h * 2).reshape(8, 15).transpose(-1, 0),
    "PermuteBackward0": lambda h: (h * 2).reshape(8, 5, 3).permute(-1, 1, 0),
    "CloneBackward0": lambda h: (h * 2).clone(),
    "clone of a view": lambda h: (h * 2).view(5, 3, 8).transpose(0, 1).contiguous(),
    "_DroppedBackward": lambda h: F.dropout(h, 0.4),
    "SwiGLU": lambda h: F.silu(h) * h.cos(),
    "RMSNorm": lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_and_views(name):
    weight, other = parameter(8, 8), parameter(8, 8)

    def function(h):
        h = h.exp()  # keeps h
        return (h @ other).sum() + ARITHMETIC[name](h) @ weight

    tally = same_bits(function, torch.randn(15, 8), weight, other)
    if name != "UnsafeViewBackward0":
        assert tally.entries["recomputed"] >= 1


@pytest.mark.parametrize("shape", [(4, 8, 8), (2, 3, 8, 8)])
def test_dropped_probabilities_of_eager_attention_are_computed_again(shape):
    """Kept are probabilities and dropout's mask. `matmul` expands what it reads where that has four sides."""
    values, num_scores = torch.randn(*shape[:-1], 16), math.prod(shape)
    tally = same_bits(lambda h: F.dropout(torch.softmax(h, -1), 0.3) @ values, torch.randn(shape))
    assert tally.held_bytes == 4 * num_scores + num_scores // 8


def test_every_rule_is_met_by_a_test():
    named = {name.split(",")[0] for name in (*ACTIVATIONS, *ARITHMETIC)}
    elsewhere = {
        "NativeBatchNormBackward0",
        "NativeLayerNormBackward0",
        "NativeGroupNormBackward0",
        "NativeDropoutBackward0",  # CUDA
        "ReshapeAliasBackward0",  # older views
        "CudnnBatchNormBackward0",  # on CUDA
        "FusedRmsNormBackward0",  # on CUDA
    }
    assert set(RULES) - named == elsewhere


# ------------------------------------------------------------------------------- torch's private names
def test_names_of_nodes_and_of_what_they_keep():
    x = data(2, 4, 6, 6)
    seen = {
        "NativeBatchNormBackward0": (F.batch_norm(x, None, None, training=True), "training eps weight result1 result2"),
        "NativeGroupNormBackward0": (F.group_norm(x, 2), "group weight result1 result2"),
        "NativeLayerNormBackward0": (F.layer_norm(x, (6,)), "normalized_shape weight bias result1 result2"),
        "ReluBackward0": (F.relu(x), "result"),
        "GeluBackward0": (F.gelu(x), "approximate self"),
        "SiluBackward0": (F.silu(x), "self"),
        "MishBackward0": (F.mish(x), "self"),
        "EluBackward0": (F.elu(x), "alpha scale input_scale"),
        "HardswishBackward0": (F.hardswish(x), "self"),
        "HardsigmoidBackward0": (F.hardsigmoid(x), "self"),
        "LeakyReluBackward0": (F.leaky_relu(x), "negative_slope self"),
        "HardtanhBackward0": (F.hardtanh(x), "min_val max_val self"),
        "SoftplusBackward0": (F.softplus(x), "beta threshold self"),
        "AddBackward0": (x + x, "alpha"),
        "SubBackward0": (x - x, "alpha"),
        "MulBackward0": (x * x, "self other"),
        "NegBackward0": (-x, ""),
        "ToCopyBackward0": (x.double(), ""),
        "ViewBackward0": (x.view(-1), ""),
        "UnsafeViewBackward0": (torch.ops.aten._unsafe_view(x, [-1]), ""),
        "ExpandBackward0": (x.expand(2, *x.shape), ""),
        "TransposeBackward0": (x.transpose(0, -1), "dim0 dim1"),
        "PermuteBackward0": (x.permute(0, -1, 1, 2), "dims"),
        "CloneBackward0": (x.clone(), ""),
        "NativeDropoutBackward0": (torch.native_dropout(x, 0.5, True)[0], "p result1"),
        "MaxPool2DWithIndicesBackward0": (F.max_pool2d(x, 2), "self result1"),
        "TBackward0": (nn.Parameter(torch.randn(2, 3)).t(), ""),
    }
    for name, (result, attributes) in seen.items():
        node = result.grad_fn
        assert node.name() == name
        for attribute in attributes.split():
            assert hasattr(node, f"_saved_{attribute}"), f"{name}._saved_{attribute}"
    has_eps = hasattr(seen["NativeGroupNormBackward0"][0].grad_fn, "_saved_eps")
    assert has_eps == (torch.__version__ < TorchVersion("2.14"))
    assert set(RULES) - set(seen) == {
        "ReshapeAliasBackward0",
        "CudnnBatchNormBackward0",
        "FusedRmsNormBackward0",
        "_DroppedBackward",  # ours
    }
    node = seen["TransposeBackward0"][0].grad_fn
    assert (node._saved_dim0, node._saved_dim1) == (0, 2**64 - 1), "negative dimensions are shown as unsigned"
    assert (node._sequence_nr() >= 0, list(node._input_metadata[0].shape)) == (True, [6, 4, 6, 2])
    leaf = parameter(2)
    assert (leaf * 2).grad_fn.next_functions[0][0].variable is leaf
    with exact().scope():
        node = x.sin().grad_fn
    assert isinstance(node._raw_saved_self.data, SavedTensor)
    assert isinstance(torch._C._len_torch_function_stack(), int)
    assert callable(torch._C._get_function_stack_at)
    assert callable(torch._C._will_engine_execute_node)
    assert torch.randn(1).untyped_storage()._cdata != 0
