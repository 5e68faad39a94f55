"""CUDA's autocast on tensors of the CPU, held against torch's list."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import MemSave, predict
from lightning_memsave.simulation.cuda_autocast import CudaAutocast

X = torch.rand(4, 8).bfloat16()
IN_FLOAT32 = {
    "power": lambda: X**3,
    "power of a number": lambda: 2**X,
    "method": lambda: X.exp(),
    "layer norm": lambda: F.layer_norm(X, (8,)),
    "module": lambda: nn.LayerNorm(8)(X),
    "softmax": lambda: X.softmax(-1),
    "module of softmax": lambda: nn.Softmax(-1)(X),
    "sum": lambda: X.sum(1),
    "loss": lambda: F.cross_entropy(X, torch.tensor([0, 1, 2, 3])),
    "squared error": lambda: F.mse_loss(X, X.flip(0)),
}
IN_16_BITS = {
    "relu": lambda: X.relu(),
    "gelu": lambda: F.gelu(X),
    "product": lambda: X * X,
    "matrix product": lambda: X @ X.T,
    "a dtype that is asked for": lambda: X.softmax(-1, dtype=torch.bfloat16),
    "mean": lambda: X.mean(1),
}


@pytest.mark.parametrize("name", [*IN_FLOAT32, *IN_16_BITS])
def test_functions_compute_in_the_dtype_of_cudas_autocast(name):
    function = {**IN_FLOAT32, **IN_16_BITS}[name]
    with torch.autocast("cpu", torch.bfloat16), CudaAutocast():
        assert function().dtype == (torch.float32 if name in IN_FLOAT32 else torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*IN_FLOAT32, *IN_16_BITS])
def test_a_device_computes_in_the_same_dtype(name, monkeypatch):
    monkeypatch.setattr(f"{__name__}.X", X.cuda())
    with torch.autocast("cuda", torch.bfloat16), torch.device("cuda"):
        assert {**IN_FLOAT32, **IN_16_BITS}[name]().dtype == (torch.float32 if name in IN_FLOAT32 else torch.bfloat16)


def test_without_autocast_nothing_changes():
    with CudaAutocast():
        assert (X**3).dtype == torch.bfloat16
        assert X.softmax(-1).dtype == torch.bfloat16


class Cube(nn.Module):
    def forward(self, x):
        return x**3


class Net(L.LightningModule):
    """Blocks whose powers are of 16 bits on a CPU, and of 32 on CUDA."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), Cube()) for _ in range(4))

    def training_step(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    "settings", [{"recipe": "measure"}, {"checkpointing": "blocks"}, {"activations": "exact"}], ids=str
)
def test_predictions_for_cuda_keep_what_it_keeps(settings):
    """Also where regions are run again in backward, which torch hides from function modes."""
    batch = torch.randn(4096, 64)
    on_cpu, on_cuda = (
        predict(Net(), batch, MemSave(**settings), precision="bf16-mixed", target=target) for target in ("cpu", "cuda")
    )
    assert (on_cpu.source, on_cuda.source) == ("fake", "fake")
    assert on_cuda.peak_bytes > on_cpu.peak_bytes
    if settings == {"recipe": "measure"}:
        kept = 4096 * 64  # of each block: its power and the result of tanh, 4 bytes instead of 2
        assert on_cuda.by_category["activations"] - on_cpu.by_category["activations"] >= 4 * kept * 2
