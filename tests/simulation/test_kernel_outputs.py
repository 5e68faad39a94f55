"""Fake outputs against those of the real kernels, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave.simulation import kernel_outputs
from lightning_memsave.simulation.fake_model import fake_tensors
from lightning_memsave.simulation.kernel_outputs import CORRECTIONS


class Outputs(TorchDispatchMode):
    """Dtype and bytes of each tensor that the corrected kernels return."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in CORRECTIONS:
            self.found.append([_kind(each) for each in out if isinstance(each, Tensor)])
        return out


def _kind(tensor):
    num_bytes = tensor.untyped_storage().nbytes()
    return (tensor.dtype if num_bytes else None), num_bytes


def outputs(run):
    with Outputs() as mode:
        run()
    return mode.found


def real_and_fake(model, x):
    real = outputs(lambda: model(x))
    with fake_tensors(model) as fake:
        made = fake(x)
        return real, outputs(lambda: model(made))


NORMS = {
    "batch": lambda **options: nn.BatchNorm2d(6, **options),
    "batch, eval": lambda **options: nn.BatchNorm2d(6, **options).eval(),
    "group": lambda **options: nn.GroupNorm(2, 6, **options),
    "layer": lambda **options: nn.LayerNorm((6, 4, 4), **options),
    "layer, no weight": lambda **options: nn.LayerNorm((6, 4, 4), elementwise_affine=False, **options),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_statistics_of_norms_have_the_dtype_of_the_real_ones(name, x_dtype, weight_dtype):
    model, x = NORMS[name](dtype=weight_dtype), torch.randn(5, 6, 4, 4, dtype=x_dtype)
    real, made = real_and_fake(model, x)
    assert len(real) == 1
    assert made == real


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_norms_have_the_dtype_of_the_real_ones(name, weight_dtype):
    model, x = NORMS[name](dtype=weight_dtype), torch.randn(5, 6, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    real = outputs(lambda: model(x).sum().backward())
    with fake_tensors(model) as fake:
        made = fake(x.detach()).requires_grad_()
        assert outputs(lambda: model(made).sum().backward()) == real


LSTMS = {
    "one layer": (nn.LSTM(8, 16), (10, 4, 8)),
    "two layers": (nn.LSTM(8, 16, 2), (7, 3, 8)),
    "both ways": (nn.LSTM(8, 16, bidirectional=True), (6, 3, 8)),
    "batch first": (nn.LSTM(5, 12, batch_first=True), (4, 9, 5)),
    "without bias": (nn.LSTM(5, 12, bias=False), (9, 4, 5)),
}


@pytest.mark.parametrize("name", LSTMS)
def test_the_workspace_of_an_lstm_is_that_of_its_kernel(name):
    model, shape = LSTMS[name]
    real, made = real_and_fake(model, torch.randn(shape))
    assert len(real) == model.num_layers * (2 if model.bidirectional else 1)
    assert made == real
    assert all(workspace > 0 for *_, (_, workspace) in made)


def test_of_long_inputs_the_workspace_grows_evenly(monkeypatch):
    """Asked of 64 and 128 steps where the input itself would be large: here, any."""
    model, x = nn.LSTM(8, 16), torch.randn(500, 4, 8)
    (real,), _ = real_and_fake(model, x)
    monkeypatch.setattr(kernel_outputs, "_LARGEST_BYTES", 0)
    asked = []
    plain = kernel_outputs._workspace_bytes
    monkeypatch.setattr(kernel_outputs, "_workspace_bytes", lambda *a: asked.append(a[-1]) or plain(*a))
    _, (made,) = real_and_fake(model, x)
    assert asked == [64, 128]
    page = 4096
    assert abs(made[-1][1] - real[-1][1]) <= 8 * page
    assert made[:-1] == real[:-1]


def test_a_recurrent_layer_keeps_no_workspace_without_gradients():
    model, x = nn.LSTM(8, 8), torch.randn(5, 3, 8)
    with torch.no_grad():
        real, fake = real_and_fake(model, x)
    assert [each for each in real[0] if each[1]] == [each for each in fake[0] if each[1]]
