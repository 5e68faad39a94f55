"""Training steps whose loss relates the samples of a batch, and steps over a long sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipVisionConfig,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

BATCH, PIXELS = 64, 24


class Images(nn.Module):
    """A small encoder of images: [B, 3, P, P] to [B, width]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_normed(3, 32), *_normed(32, 32), nn.MaxPool2d(2), *_normed(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolutions(x))


class Texts(nn.Module):
    """A small encoder of texts: [B, T] to [B, 64]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.embedding(ids)).mean(1)


class Contrastive(nn.Module):
    """InfoNCE between images and texts: the other samples of the batch are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = Images(), Texts(dropout=0.1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def loss(self, batch: Any) -> Tensor:
        x, ids = batch
        similar = self.scale.exp() * F.normalize(self.images(x), dim=-1) @ F.normalize(self.texts(ids), dim=-1).T
        target = torch.arange(len(x))  # [B, B]
        return (F.cross_entropy(similar, target) + F.cross_entropy(similar.T, target)) / 2


class UNet(nn.Module):
    """Two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.high = nn.Sequential(*_normed(3, 16), *_normed(16, 16))
        self.low = nn.Sequential(*_normed(16, 32), *_normed(32, 32))
        self.joined = nn.Sequential(*_normed(48, 16), *_normed(16, 16), nn.Conv2d(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        high = self.high(x)
        low = F.interpolate(self.low(F.max_pool2d(high, 2)), scale_factor=2)
        return self.joined(torch.cat([low, high], 1))


class Dice(nn.Module):
    """Soft Dice over all pixels of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        p = self.net(x).sigmoid()
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


class Mixup(nn.Module):
    """Samples are mixed with others of the batch in the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Images(10)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        other, share = torch.randperm(len(x)), torch.rand(()) / 2
        logits = self.net((1 - share) * x + share * x[other])
        return (1 - share) * F.cross_entropy(logits, y) + share * F.cross_entropy(logits, y[other])


class Clip(nn.Module):
    """CLIP of transformers."""

    def __init__(self) -> None:
        super().__init__()
        size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
        text = CLIPTextConfig(vocab_size=2000, max_position_embeddings=32, eos_token_id=1999, **size)
        vision = CLIPVisionConfig(image_size=64, patch_size=8, **size)
        self.clip = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=64))

    def loss(self, batch: Any) -> Tensor:
        x, ids = batch
        return self.clip(input_ids=ids, pixel_values=x, return_loss=True).loss


class Siglip(nn.Module):
    """SigLIP of transformers: a sigmoid for each pair of an image and a text."""

    def __init__(self) -> None:
        super().__init__()
        size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
        text = SiglipTextConfig(vocab_size=2000, max_position_embeddings=32, **size)
        vision = SiglipVisionConfig(image_size=64, patch_size=8, **size)
        self.siglip = SiglipModel(SiglipConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))

    def loss(self, batch: Any) -> Tensor:
        x, ids = batch
        return self.siglip(input_ids=ids, pixel_values=x, return_loss=True).loss


class SimClr(nn.Module):
    """NT-Xent between two views of each image; the encoder has BatchNorm, which relates samples as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *_batch_normed(3, 32), *_batch_normed(32, 32), nn.MaxPool2d(2), *_batch_normed(32, 64)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 64))

    def loss(self, batch: Any) -> Tensor:
        views = [F.normalize(self.head(self.encoder(view)), dim=-1) for view in (batch[0], batch[0].flip(-1))]
        z = torch.cat(views)  # [2 B, 64]
        similar = (z @ z.T / 0.1).fill_diagonal_(-torch.inf)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))


class LongSequence(nn.Module):
    """The MLP of a transformer's layer over a sequence, behind a projection: [1, T, D]."""

    def __init__(self, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.mlp = nn.Linear(width, width), mlp

    def loss(self, batch: Any) -> Tensor:
        x = self.first(batch[0])
        return (x + self.mlp(x)).square().mean()


def _normed(num_in: int, num_out: int) -> list[nn.Module]:
    return [nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(4, num_out), nn.ReLU()]


def _batch_normed(num_in: int, num_out: int) -> list[nn.Module]:
    return [nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU()]


def _images(pixels: int = PIXELS) -> Tensor:
    return torch.randn(BATCH, 3, pixels, pixels)


def _ids(vocabulary: int, last: int) -> Tensor:
    ids = torch.randint(0, vocabulary, (BATCH, 32))
    ids[:, -1] = last
    return ids


LENGTH, WIDTH = 4096, 256
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "InfoNCE, batch 64": (Contrastive, lambda: (_images(), _ids(499, 499))),
    "U-Net with Dice, batch 64": (Dice, lambda: (_images(), (torch.rand(BATCH, 1, PIXELS, PIXELS) > 0.7).float())),
    "mixup, batch 64": (Mixup, lambda: (_images(), torch.randint(0, 10, (BATCH,)))),
    "CLIP of transformers, batch 64": (Clip, lambda: (_images(64), _ids(1998, 1999))),
    "MLP of GPT-2, 4096 positions": (
        lambda: LongSequence(GPT2MLP(4 * WIDTH, GPT2Config(n_embd=WIDTH, resid_pdrop=0.1)), WIDTH),
        lambda: (torch.randn(1, LENGTH, WIDTH),),
    ),
    "MLP of Llama, 4096 positions": (
        lambda: LongSequence(LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=688)), WIDTH),
        lambda: (torch.randn(1, LENGTH, WIDTH),),
    ),
}
"""What is trained, and its batch."""
RELATING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    **{name: each for name, each in MODELS.items() if "positions" not in name},
    "SigLIP of transformers, batch 64": (Siglip, lambda: (_images(64), _ids(1998, 1999))),
    "SimCLR with BatchNorm, batch 64": (SimClr, lambda: (_images(),)),
}
"""Those whose loss relates the samples of a batch."""
