"""Layers with another parameter in the place of their weight: what both kinds have in common."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_memsave import (
    LowRank,
    SparseUpdate,
    Sparsity,
    apply_low_rank,
    apply_sparse_update,
    apply_sparsity,
    export_dense,
)
from lightning_memsave.techniques.low_rank.factored_layers import LowRankLinear
from lightning_memsave.techniques.sparsity import SparseLayer
from lightning_memsave.torch_internals.compact_layers import (
    compact_class,
    compact_layers,
    rename_parameter,
    replace_values,
)


def test_there_is_one_class_for_a_kind_and_a_class_of_layers():
    made = compact_class(LowRankLinear, nn.Linear)
    assert made is compact_class(LowRankLinear, nn.Linear)
    assert made is not compact_class(SparseLayer, nn.Linear)
    assert made.__mro__[:2] == (made, LowRankLinear)
    assert issubclass(made, nn.Linear)
    assert (made.__name__, compact_class(SparseLayer, nn.Linear).__name__) == ("LowRankLinear", "SparseLinear")


@pytest.mark.parametrize(
    "apply",
    [
        lambda m: apply_low_rank(m, LowRank(rank=2)),
        lambda m: apply_sparsity(m, Sparsity(min_size=1)),
        lambda m: apply_sparse_update(m, SparseUpdate(layers={"Linear": 0.5})),
    ],
)
def test_each_kind_is_found_and_exported(apply):
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    apply(model)
    assert list(compact_layers(model)) == ["0", "2"]
    x = torch.randn(3, 16)
    expected = model(x)
    assert compact_layers(export_dense(model)) == {}
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_a_parameter_of_another_name_is_the_same_object(shape):
    layer = nn.Linear(3, 2)
    weight, bias, values = layer.weight, layer.bias, torch.arange(math.prod(shape)).float().view(shape)
    alias = weight.detach()
    before = alias.clone()
    loss = layer(torch.ones(1, 3, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    rename_parameter(layer, "weight", "values", values)
    assert [(name, p) for name, p in layer.named_parameters()] == [("values", weight), ("bias", bias)]
    assert not hasattr(layer, "weight")
    assert weight.grad is None
    assert torch.equal(weight, values)
    assert torch.equal(alias, before)  # what it held is no longer its own
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(shape))
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|must match"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_parameter_of_another_size_takes_gradients_while_a_graph_of_before_is_kept(dtype):
    parameter = nn.Parameter(torch.ones(4, 3, dtype=dtype))
    kept = (parameter * 2).square().sum()
    kept.backward(retain_graph=True)
    parameter.grad = None
    replace_values(parameter, torch.full((4, 2), 3.0, dtype=dtype))
    assert parameter.dtype == dtype
    assert parameter.is_leaf
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(4, 2, dtype=dtype))
    assert torch.equal(parameter, torch.full((4, 2), 3.0, dtype=dtype))
