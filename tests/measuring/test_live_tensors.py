"""What is alive: every tensor once, where it belongs, without waking anything up."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.measuring.live_tensors import alive

N = 257  # a size that nothing else in the process has
CPU = torch.device("cpu")


def sizes(model, optimizers=(), batch=(), device=CPU):
    """Bytes of the tensors of this test, by category and place."""
    gc.collect()
    return {(k.category, k.where): k.num_bytes for k in alive(model, optimizers, batch, device) if N in k.shape}


def test_every_tensor_stands_once_where_it_belongs():
    model = nn.Sequential(nn.Linear(N, N, bias=False), nn.Tanh())
    model.register_buffer("mask", torch.zeros(N, dtype=torch.uint8))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    batch = {"x": torch.randn(3, N)}
    model(batch["x"]).sum().backward()
    optimizer.step()
    y = model(batch["x"])
    other = torch.zeros(5, N)
    views = [other[0], other.T]
    found = sizes(model, [optimizer], batch, CPU)
    assert found == {
        ("weights", "*"): N * N * 4,
        ("weights", "Sequential"): N,
        ("gradients", "*"): N * N * 4,
        ("optimizer_state", "SGD"): N * N * 4,
        ("data", "batch"): 3 * N * 4,
        ("activations", "kept by TanhBackward0 after *"): y.nbytes,
        ("other", "held by Python"): other.nbytes,
    }
    assert len(views) == 2
    assert {category for category, _ in found} <= {*CATEGORIES, "other"}


def test_what_only_the_graph_holds_is_found_and_counted_by_shape():
    layers = [nn.Linear(N, N, bias=False) for _ in range(4)]
    y = torch.randn(3, N)
    for layer in layers:
        y = layer(y).exp()
    total = y.sum()
    del y
    gc.collect()
    everything = alive(nn.Sequential(*layers), [], (), CPU)
    kinds = [k for k in everything if k.shape == (3, N)]
    assert total.grad_fn is not None
    # The first input and each layer's result; those are kept by `exp` and by the next product, and counted once.
    assert sum(k.count for k in kinds) == 5
    assert sum(k.num_bytes for k in kinds) == 5 * 3 * N * 4
    assert {k.where for k in kinds} == {"kept by ExpBackward0 after *", "kept by MmBackward0 in *"}
    assert [k.num_bytes for k in everything] == sorted((k.num_bytes for k in everything), reverse=True)


class Blocks(nn.Module):
    """Two equal blocks between an embedding and a head of its own parameter."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, N)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(N), "up": nn.Linear(N, N, bias=False)}) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(N))

    def forward(self, ids):
        h = self.tokens(ids)
        for block in self.blocks:
            h = h + block["up"](block["norm"](h)).tanh()
        return h * self.scale


@pytest.mark.parametrize("autocast", [False, True])
def test_activations_are_placed_by_module(autocast):
    model = Blocks()
    with torch.autocast("cpu", enabled=autocast, cache_enabled=False):
        y = model(torch.arange(3)).sin().cos()
    places = {k.where for k in alive(model, [], (), CPU) if k.category == "activations" and N in k.shape}
    product = "kept by MmBackward0 in blocks.*.up"
    assert places >= {
        product,
        "kept by NativeLayerNormBackward0 in blocks.*.norm",
        "kept by TanhBackward0 after blocks.*.up",
        "kept by MulBackward0 in Blocks",
        "kept by CosBackward0 after Blocks",
    }
    assert sum(k.count for k in alive(model, [], (), CPU) if k.where == product and N in k.shape) >= 2
    assert y.requires_grad


def test_a_graph_without_parameters_has_no_place():
    y = torch.randn(3, N, requires_grad=True).exp().exp()
    assert sizes(nn.Linear(2, 2))[("activations", "kept by ExpBackward0")] == 2 * 3 * N * 4
    assert y.requires_grad


def test_a_deep_graph_is_placed_without_recursion():
    layer = nn.Linear(N, N)
    y = layer(torch.randn(2, N))
    for _ in range(3000):
        y = y.exp()
    assert sizes(layer)[("activations", "kept by ExpBackward0 after Linear")] == 3000 * 2 * N * 4


def test_no_hook_is_run():
    def unpack(packed):
        raise AssertionError("unpacked")

    x = torch.randn(3, N, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        y = x.exp()
    found = sizes(nn.Identity())
    assert found[("activations", "kept by ExpBackward0")] == 3 * N * 4
    assert y.shape == x.shape


def test_other_devices_are_left_out():
    kept = torch.zeros(3, N, device="meta")
    assert sizes(nn.Identity(), [], kept, CPU) == {}
    assert sizes(nn.Identity(), [], kept, torch.device("meta")) == {("data", "batch"): 3 * N * 4}


@pytest.mark.parametrize("batch", [None, "text", [1, 2], object()])
def test_any_batch_will_do(batch):
    assert sizes(nn.Identity(), [], batch, CPU) == {}


def test_parameters_without_a_shape_yet_are_left_out():
    lazy = nn.LazyLinear(3)
    kinds = alive(nn.Linear(2, 2), [], None, torch.device("cpu"))
    assert sum(kind.num_bytes for kind in kinds if kind.category == "weights") == 4 * (4 + 2)
    assert lazy.has_uninitialized_params()


def test_views_of_what_was_edited_have_no_node_and_stop_nothing():
    model = nn.Linear(1, N)
    h = model(torch.ones(4, 1)) * 2
    first, *_ = h.split(2)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        _ = first.grad_fn
    assert sum(sizes(model).values()) >= h.nbytes
