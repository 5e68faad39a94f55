"""What nodes of a compiled graph need."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from lightning_memsave.saved_tensors import compiled_policy, policy
from lightning_memsave.saved_tensors.compiled_policy import (
    function_of,
    is_reshape,
    is_sensitive,
    is_view,
    name_of,
    operation_of,
)

aten = torch.ops.aten


@pytest.mark.parametrize("name", sorted(policy.LOSSY))
def test_the_tables_names_are_known(name):
    function = next((getattr(where, name) for where in (F, torch, torch.Tensor) if hasattr(where, name)), None)
    assert function is None or name_of(function).strip("_") == name.strip("_")  # in place as out of place


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Linear, "linear"),
        (nn.Conv3d, "conv3d"),
        (nn.ConvTranspose2d, "conv_transpose2d"),
        (nn.BatchNorm2d, "batch_norm"),
        (nn.InstanceNorm1d, "instance_norm"),
        (nn.GroupNorm, "group_norm"),
        (nn.RMSNorm, "rms_norm"),
        (nn.SiLU, "silu"),
        (nn.LeakyReLU, "leaky_relu"),
        (nn.PReLU, "prelu"),
        (operator.mul, "mul"),
        (operator.matmul, "matmul"),
        (nn.Tanh, "Tanh"),
        (nn.Softmax, "Softmax"),
        (torch.exp, "exp"),
    ],
)
def test_modules_have_the_names_of_their_functions(module, name):
    assert name_of(module) == name
    assert (name in policy.LOSSY) == (name not in ("Tanh", "Softmax", "exp"))


def graph_of(target, *arguments, original=None):
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, *arguments))
    if original is not None:
        node.meta["original_aten"] = original
    return node


def test_views_share_memory_and_some_need_its_order():
    assert is_view(graph_of(aten.permute.default, [1, 0]))
    assert not is_reshape(graph_of(aten.permute.default, [1, 0]))
    assert is_reshape(graph_of(aten.view.default, [-1]))
    assert not is_view(graph_of(aten.as_strided.default, [1], [1])), "depends on more than its argument's values"
    assert not is_view(graph_of(aten.clone.default))


@pytest.mark.parametrize("target", [aten.tanh.default, aten._softmax.default, aten.rsqrt.default, aten.exp.default])
def test_results_that_are_in_their_own_derivative_are_sensitive(target):
    assert is_sensitive(graph_of(target))


def test_further_outputs_are_statistics_but_for_parts():
    norm = graph_of(aten.var_mean.correction, original=aten.native_layer_norm.default)
    split = graph_of(aten.split_with_sizes.default, [1, 1])
    for number in (0, 1):
        assert is_sensitive(norm.graph.call_function(operator.getitem, (norm, number)))
        assert not is_sensitive(split.graph.call_function(operator.getitem, (split, number)))
    attention = graph_of(aten._scaled_dot_product_flash_attention_for_cpu.default)
    found = [is_sensitive(attention.graph.call_function(operator.getitem, (attention, n))) for n in (0, 1)]
    assert found == [False, True]


def test_an_operation_that_was_taken_apart_is_known():
    node = graph_of(aten.mul.Tensor, 2, original=aten.gelu.default)
    assert operation_of(node) == "gelu"
    assert function_of(node) == ""
    node.meta["source_fn_stack"] = [("outer", nn.Sequential), ("inner", F.gelu)]
    assert function_of(node) == "gelu"


def test_modules_are_named_as_in_the_model():
    node = graph_of(aten.relu.default)
    node.meta["nn_module_stack"] = {
        "a": ("L['self'].blocks.0", nn.Sequential),
        "b": ("L['self']._modules['blocks']._modules['0'].norm", nn.LayerNorm),
        "c": ("L['self']", nn.Module),
    }
    assert compiled_policy._modules_of(node) == ["blocks.0", "blocks.0.norm", ""]
