"""A table whose head scores far more classes than it has inputs, and losses of its logits."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import ActivationCompression
from lightning_memsave.techniques.activation_compression import open_store

WIDTH, CLASSES, BATCH, TIME = 8, 200, 3, 6
CODECS = ActivationCompression(codecs=("linear-cross-entropy",))


class Scored(nn.Module):
    """A table, and a head that scores."""

    def __init__(self, dtype=torch.float64, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias)
        self.to(dtype)

    def forward(self, ids):
        return self.head(self.table(ids))


def some_ids():
    return torch.arange(BATCH * TIME).view(BATCH, TIME) * 7 % CLASSES


def step(model, loss_of, store=None, **autocast):
    """The loss, what else `loss_of` returns, and the gradients."""
    model.zero_grad()
    ids = some_ids()
    around = torch.autocast("cpu", **autocast) if autocast else contextlib.nullcontext()
    with store.scope() if store else contextlib.nullcontext(), around:
        found = loss_of(model(ids), ids)
        loss, *others = found if isinstance(found, tuple) else (found,)
    loss.backward()
    return loss.detach(), others, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def store_of(model):
    return open_store(model, CODECS)[0]


def constants(z):
    """One of each class."""
    return torch.arange(CLASSES, dtype=z.dtype)[None, None].cos()


LOSSES = {
    "view": lambda z, y: F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1)),
    "view, inferred": lambda z, y: F.cross_entropy(z.view(BATCH * TIME, -1), y.view(-1)),
    "flatten": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "unsqueeze": lambda z, y: F.cross_entropy(z.unsqueeze(0).flatten(0, 2), y.flatten()),
    "transpose": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "permute, each loss": lambda z, y: F.cross_entropy(z.permute(0, 2, 1), y, reduction="none").square().sum(),
    "module": lambda z, y: nn.CrossEntropyLoss(label_smoothing=0.1)(z.reshape(-1, CLASSES), y.reshape(-1)),
    "shifted": lambda z, y: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1)),
    "shifted by slices": lambda z, y: F.cross_entropy(z[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)),
    "one position": lambda z, y: F.cross_entropy(z[:, -1], y[:, 0]),
    "cast": lambda z, y: F.cross_entropy(z.double().flatten(0, 1).clone(), y.flatten()),
    "log_softmax": lambda z, y: F.nll_loss(F.log_softmax(z.view(-1, CLASSES), -1), y.view(-1)),
    "log_softmax, later flattened": lambda z, y: F.nll_loss(z.log_softmax(dim=-1).flatten(0, 1), y.flatten()),
    "log_softmax over classes": lambda z, y: nn.NLLLoss()(torch.log_softmax(z.transpose(1, 2), 1), y),
    "mask": lambda z, y: F.cross_entropy(z[y > 9], y[y > 9]),
    "ignored": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten().where(y.flatten() > 9, 3), ignore_index=3),
    "weighted": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), torch.arange(1.0, CLASSES + 1, dtype=z.dtype), reduction="sum"
    ),
    "scaled": lambda z, y: F.cross_entropy((2 * z * 0.3 / torch.tensor(0.7)).flatten(0, 1), y.flatten()),
    "softcap": lambda z, y: F.cross_entropy(30 * torch.tanh(z / 30).flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "softcap, transposed": lambda z, y: F.cross_entropy(z.transpose(1, 2).div(3).tanh().mul(3), y),
    "turned": lambda z, y: F.cross_entropy((1 - -z / torch.ones(1, dtype=z.dtype)).flatten(0, 1), y.flatten()),
    "constants": lambda z, y: F.cross_entropy((z - 1 + constants(z)).view(-1, CLASSES).tanh(), y.view(-1)),
    "softcap, log_softmax": lambda z, y: F.nll_loss((5 * (z / 5).tanh()).log_softmax(-1).flatten(0, 1), y.flatten()),
    "two losses": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) + F.cross_entropy(z[:, 0], y[:, 1]),
}
