"""Sparse models on disk, in copies, and as dense ones again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_memsave import apply_sparsity, export_dense
from lightning_memsave.techniques.sparsity import sparse_layers
from tests.techniques.sparsity_subjects import small, tiny

X = torch.linspace(-1, 1, 2 * 3 * 36).view(2, 3, 6, 6)


def test_checkpoints_are_dense_both_ways():
    model, dense = small(), small()
    keys = list(model.state_dict())
    apply_sparsity(model, tiny())
    assert list(model.state_dict()) == keys
    assert [n.replace("values", "weight") for n, _ in model.named_parameters()] == [
        n for n, _ in dense.named_parameters()
    ]
    dense.load_state_dict(model.state_dict())
    assert torch.equal(dense.eval()(X), model.eval()(X))
    other = small()
    apply_sparsity(other, tiny(seed=5))
    other.load_state_dict(dense.state_dict())  # the pattern is that of what is not zero
    assert torch.equal(other.eval()(X), model(X))
    full = small()
    model.load_state_dict(full.state_dict())  # pruned to the density
    for name, layer in sparse_layers(model).items():
        weight = full.get_submodule(name).weight.detach().abs().view(-1)
        assert torch.equal(layer.values.abs().sort().values, weight.sort().values[-layer.values.numel() :])


def test_loading_keeps_live_zeros():
    layer = nn.Linear(8, 8)
    apply_sparsity(nn.Sequential(layer), tiny())
    with torch.no_grad():
        layer.values[::2] = 0
    positions = layer.layout.positions()
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer.layout.positions(), positions)


def test_a_checkpoint_that_does_not_fit_is_told_in_torchs_words():
    model = small()
    apply_sparsity(model, tiny())
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*4\.weight"):
        model.load_state_dict({k: v for k, v in state.items() if k != "4.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*4\.weight_mask"):
        model.load_state_dict({**state, "4.weight_mask": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"size mismatch for 4\.weight"):
        model.load_state_dict({**state, "4.weight": torch.zeros(3, 3)})
    assert model.load_state_dict({}, strict=False).missing_keys == [k for k in state if not k.endswith("tracked")]


def test_copies_and_pickles_compute_with_their_own_weights():
    model = small().eval()
    apply_sparsity(model, tiny())
    expected = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), expected)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert not twin(X).any()
        assert torch.equal(model(X), expected)


def test_undo_and_export_give_a_plain_module_back():
    model, plain = small().eval(), small()
    applied = apply_sparsity(model, tiny())
    expected = model(X)
    exported = export_dense(copy.deepcopy(model))
    applied.undo()
    applied.undo()
    for module in (model, exported):
        assert [type(m) for m in module.modules()] == [type(m) for m in plain.modules()]
        assert [(n, p.shape) for n, p in module.named_parameters()] == [
            (n, p.shape) for n, p in plain.named_parameters()
        ]
        assert [n for n, _ in module.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert all(vars(m).keys() == vars(p).keys() for m, p in zip(module.modules(), plain.modules(), strict=True))
        assert torch.equal(module(X), expected)
    with pytest.raises(ValueError, match="must have sparse, low-rank or partly trained layers"):
        export_dense(model)


def test_device_and_dtype_moves():
    model = small().eval()
    apply_sparsity(model, tiny())
    model.to(torch.float64)
    assert model(X.double()).dtype == torch.float64
    assert model[4].values_index.dtype == torch.uint8
    model.bfloat16()
    assert model[4].values.element_size() == 2
    assert model(X.bfloat16()).dtype == torch.bfloat16
