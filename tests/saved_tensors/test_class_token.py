"""A class token beside patches: rows of very different sizes in one tensor, at widths that are no multiple of 256."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import ActivationCompression
from lightning_memsave.techniques.activation_compression import open_store


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, 3, width // 3).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ClassToken(nn.Module):
    """A vision transformer whose class token starts with the standard deviation `std`."""

    def __init__(self, width, std, depth=2):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(1, 1, width) * std)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.norm(self.blocks(x))[:, 0])


def subject(width, std):
    torch.manual_seed(0)
    model, images, labels = ClassToken(width, std), torch.randn(2, 3, 32, 32), torch.randint(0, 10, (2,))
    return model, lambda: F.cross_entropy(model(images), labels)


def gradients(model, loss_of, store=None):
    """Of the token, and of all parameters."""
    model.zero_grad()
    if store is None:
        loss = loss_of()
    else:
        with store.scope():
            loss = loss_of()
    loss.backward()
    return model.token.grad.flatten().clone(), torch.cat([p.grad.flatten() for p in model.parameters()])


def off(found, plain):
    return float((found - plain).norm() / plain.norm())


@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.03), ("int4", 0.4)])
@pytest.mark.parametrize("std", [0, 1e-3, 0.02, 1])
@pytest.mark.parametrize("width", [96, 192, 384, 768])
def test_noise_is_bounded_at_every_width_and_size_of_the_token(width, std, codec, bound):
    model, loss_of = subject(width, std)
    store, _ = open_store(model, ActivationCompression(codecs=(codec,)))
    for found, plain in zip(gradients(model, loss_of, store), gradients(model, loss_of), strict=True):
        assert 0 < off(found, plain) < bound


@pytest.mark.parametrize("std", [0, 0.02])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_mean_of_64_gradients_is_the_plain_one_within_chance(codec, std):
    model, loss_of = subject(96, std)
    store, _ = open_store(model, ActivationCompression(codecs=(codec,)))
    plain, draws = gradients(model, loss_of), 64
    sums, squares = [torch.zeros_like(p) for p in plain], [0.0, 0.0]
    for _ in range(draws):
        for k, found in enumerate(gradients(model, loss_of, store)):
            sums[k] += found - plain[k]
            squares[k] += float((found - plain[k]).square().sum())
    for total, square, bound in zip(sums, squares, (1.4, 1.15), strict=True):  # the token is one row: chance varies
        assert (total / draws).norm() < bound * (square / draws) ** 0.5 / draws**0.5


@pytest.mark.slow
def test_training_goes_as_without_codes():
    """40 steps at width 192, where every step was clipped with noise of 27 times the gradient before."""

    def train(codec, seed):
        torch.manual_seed(seed)
        model, images, labels = ClassToken(192, 0.0, depth=4), torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
        store = None
        if codec is not None:
            store, _ = open_store(model, ActivationCompression(codecs=(codec,), seed=seed))
        optimizer, norms, losses = torch.optim.AdamW(model.parameters(), 3e-4), [], []
        for step in range(40):
            optimizer.zero_grad()
            if store is None:
                loss = F.cross_entropy(model(images), labels)
            else:
                store.draw_for(step)
                with store.scope():
                    loss = F.cross_entropy(model(images), labels)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 10.0)))
            losses.append(loss.item())
            optimizer.step()
        return losses[-1], max(norms)

    plain = [train(None, seed) for seed in range(3)]
    for codec in ("int8", "int4"):
        coded = [train(codec, seed) for seed in range(3)]
        assert max(norm for _, norm in coded) < 1.5 * max(norm for _, norm in plain)
        assert max(loss for loss, _ in coded) < 1.5 * max(loss for loss, _ in plain) + 0.01
