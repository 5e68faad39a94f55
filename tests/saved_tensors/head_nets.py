"""Linears whose outputs are scored, and a step of them: subjects of the loss that is computed in chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import ActivationCompression
from lightning_memsave.techniques.activation_compression import open_store

BATCH, TIME, WIDTH, CLASSES = 4, 16, 8, 400
ROWS = {
    "all": lambda z: z.flatten(0, 1),
    "but the last": lambda z: z[:, :-1].flatten(0, 1),
    "but the last, contiguous": lambda z: z[..., :-1, :].contiguous().view(-1, CLASSES),
    "but the first": lambda z: z[:, 1:].reshape(-1, CLASSES),
    "every second of some": lambda z: z[1:, ::2].reshape(-1, CLASSES),
    "strided": lambda z: z.flatten(0, 1)[::3],
    "viewed twice": lambda z: z.view(2, BATCH * TIME // 2, CLASSES)[:, 3:].reshape(-1, CLASSES),
    "cast": lambda z: z.double().flatten(0, 1),
    "cast slices": lambda z: z[:, :-1].double().reshape(-1, CLASSES),
}


def head(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES, bias=bias)).to(dtype)
    return model, torch.randn(BATCH, TIME, WIDTH, dtype=dtype)


def step(model, x, rows, store=None, **options):
    """The loss and the gradients of one step."""
    model.zero_grad()

    def loss_of():
        logits = rows(model(x))
        target = torch.arange(len(logits)) % logits.shape[1]
        target[::5] = -100
        return F.cross_entropy(logits, target, **options)

    if store is None:
        loss = loss_of()
    else:
        with store.scope():
            loss = loss_of()
    loss.sum().backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def both(model, x, rows, **options):
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    return step(model, x, rows, **options), step(model, x, rows, store, **options)
