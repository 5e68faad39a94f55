"""What a function needs of the tensors that it keeps, where that depends on the device."""

from types import SimpleNamespace

import pytest
import torch

from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.function_mode import Call
from lightning_memsave.saved_tensors.policy import need


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", Fidelity.SHAPE), ("cuda", Fidelity.SHAPE), ("mps", Fidelity.EXACT)]
)
def test_pooling_looks_for_its_maxima_again_where_it_keeps_no_indices(device, expected):
    tensor = SimpleNamespace(requires_grad=True, device=torch.device(device))
    assert need(tensor, Call("max_pool2d", (), {}), Fidelity.INT8, {}).fidelity == expected
    assert need(tensor, Call("avg_pool2d", (), {}), Fidelity.INT8, {}).fidelity == Fidelity.SHAPE
