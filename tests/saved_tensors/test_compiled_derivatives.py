"""Derivatives of activations in compiled code are computed in the forward, exactly, and kept in place of the input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors import compiled_partitioner
from lightning_memsave.saved_tensors.encodings import Fidelity
from tests.saved_tensors.compiled_nets import MLP, Counting, Gated, Kept, gradients
from tests.saved_tensors.test_compiled_partitioner import drawn

MOVED = {
    "GELU": F.gelu,
    "GELU by tanh": nn.GELU("tanh"),
    "SiLU": F.silu,
    "Mish": F.mish,
    "SiLU of a product": lambda x: F.silu(2 * x) * x,
    "GELU twice": lambda x: F.gelu(F.gelu(x)),
    "GELU in place": lambda x: F.gelu(x).mul_(2),
}
LEFT = {"ReLU": F.relu, "ELU": F.elu, "Softplus": F.softplus, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def uncoded(monkeypatch):
    """Keep what the partitioner has decided on as it is."""
    monkeypatch.setattr(compiled_partitioner._Coder, "code", lambda self, names: None)


def moved(kept):
    """Return the derivatives that the forwards compute for backward."""
    return [
        node
        for forward in kept.forwards
        for node in forward.graph.nodes
        if compiled_partitioner.compiled_derivatives.is_derivative(node)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MOVED)
@pytest.mark.usefixtures("uncoded")
def test_gradients_are_what_they_were(name, dtype):
    torch.manual_seed(0)
    model, x = MLP(MOVED[name]).to(dtype), torch.randn(32, 64, dtype=dtype)
    kept = Kept(Fidelity.INT4)
    (found,) = drawn(model, kept, x, 1)
    assert moved(kept)
    torch.testing.assert_close(found, gradients(model, model, x))


@pytest.mark.usefixtures("uncoded")
def test_half_precision_rounds_the_derivative_once_more():
    torch.manual_seed(0)
    model, x = MLP().bfloat16(), torch.randn(32, 64).bfloat16()
    kept = Kept(Fidelity.INT4)
    (found,) = drawn(model, kept, x, 1)
    plain = gradients(model, model, x)
    assert {node.meta["val"].dtype for node in moved(kept)} == {torch.bfloat16}
    assert (found - plain).norm() < 2**-7 * plain.norm()


@pytest.mark.parametrize("name", LEFT)
def test_other_activations_are_left_alone(name):
    model, x = MLP(LEFT[name]), torch.randn(32, 64)
    kept = Kept(Fidelity.INT4)
    drawn(model, kept, x, 1)
    assert not moved(kept)


@pytest.mark.parametrize(
    ("fidelity", "settings"),
    [
        (Fidelity.INT8, {}),
        (Fidelity.BF16, {}),
        (Fidelity.INT4, {"overrides": {"gelu": Fidelity.INT8}}),
        (Fidelity.INT4, {"overrides": {"gelu": Fidelity.EXACT}}),
        (Fidelity.INT4, {"min_numel": 10**6}),
    ],
)
def test_where_a_code_of_the_input_is_no_larger_it_is_kept(fidelity, settings):
    model, x = MLP(), torch.randn(32, 64)
    kept = Kept(fidelity, **settings)
    drawn(model, kept, x, 1)
    assert not moved(kept)


def test_the_derivative_of_a_weight_is_computed_in_backward():
    """A weight is there in any case; a derivative of it would not be coded."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return F.linear(x, F.gelu(self.weight))

    kept = Kept(Fidelity.INT4)
    drawn(Weighted(), kept, torch.randn(32, 64), 1)
    assert not moved(kept)


def test_each_derivative_is_kept_once():
    """Of a gated MLP: the derivative of SiLU, its output, the other factor, their product, and what RMSNorm reads."""
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(32, 64)
    kept = Kept(Fidelity.INT4)
    drawn(model, kept, x, 1)
    assert len(moved(kept)) == 1
    kept_as_codes = [name for name, dtype, _ in kept.graphs[0] if dtype == torch.uint8]
    assert len(kept_as_codes) == 5


@pytest.mark.usefixtures("uncoded")
def test_evaluation_and_results_are_untouched():
    torch.manual_seed(0)
    model, x = MLP(), torch.randn(32, 64)
    kept = Kept(Fidelity.INT4)
    run = torch.compile(model, backend=kept.backend)
    with compiled_partitioner.operators.told_to(Counting()):
        y = run(x)
        assert isinstance(y, torch.Tensor)
        torch.testing.assert_close(y, model(x))
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
