"""Subjects of the benchmarks, made from scratch with a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.harness.measurement import Subject
from lightning_memsave import microbatches
from lightning_memsave.demo.model import WideResNet


def wide_resnet(setting: str, batch_size: int = 100, microbatch: int | None = None) -> Subject:
    """WideResNet-28-2 on 32x32 images, SGD with momentum."""
    torch.manual_seed(0)
    model = WideResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        for (images, labels), weight in microbatches(batch, size=microbatch or batch_size):
            (F.cross_entropy(model(images), labels) * weight).backward()
        optimizer.step()

    def loss() -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Subject(setting, model, optimizer, batch, step, loss)


def gpt(setting: str, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> Subject:
    """A small GPT-2 (4 layers, width 256, context 128, batch 8), AdamW."""
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 1000}
    model = GPT2LMHeadModel(GPT2Config(**shape, use_cache=False, loss_type="ForCausalLMLoss")).train()
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    ids = torch.randint(0, 1000, (8, 128))
    return _subject(setting, model, optimizer, ids, lambda: model(input_ids=ids, labels=ids).loss)


class ResidualBlock(nn.Module):
    """Pre-norm feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gelu = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gelu(self.up(self.norm(x))))


def deep_chain(setting: str, num_blocks: int, width: int = 256, num_tokens: int = 512) -> Subject:
    """A chain of equal residual blocks; gradients exist before the step, and nothing but them changes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(ResidualBlock(width) for _ in range(num_blocks)))
    x = torch.randn(num_tokens, width)
    return _backward_only(setting, model, x, lambda: model(x).square().mean())


class Bottleneck(nn.Module):
    """Pre-activation bottleneck: 1x1, 3x3 and 1x1 convolutions (He et al., 2016, https://arxiv.org/abs/1603.05027)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(in_channels), nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn3, self.conv3 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * channels, 1, bias=False)
        has_projection = stride > 1 or in_channels != 4 * channels
        self.shortcut = nn.Conv2d(in_channels, 4 * channels, 1, stride, bias=False) if has_projection else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        kept = x if self.shortcut is None else self.shortcut(y)
        y = F.relu(self.bn2(self.conv1(y)))
        return kept + self.conv3(F.relu(self.bn3(self.conv2(y))))


class DeepResNet(nn.Module):
    """Pre-activation ResNet for ImageNet; 3 sum(units) + 2 layers."""

    def __init__(self, units: tuple[int, ...], width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, in_channels = [], width
        for stage, num_units in enumerate(units):
            channels = width * 2**stage
            blocks = []
            for unit in range(num_units):
                blocks.append(Bottleneck(in_channels, channels, 2 if stage and not unit else 1))
                in_channels = 4 * channels
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.bn, self.head = nn.BatchNorm2d(in_channels), nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, num_classes]."""
        x = F.relu(self.bn(self.stages(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet_1001(setting: str, image_size: int, width: int, batch_size: int) -> Subject:
    """1001 layers: the units of ResNet-200, times five; only backward, onto gradients that exist."""
    torch.manual_seed(0)
    model = DeepResNet((15, 121, 182, 15), width)
    batch = torch.randn(batch_size, 3, image_size, image_size), torch.randint(0, 1000, (batch_size,))
    return _backward_only(setting, model, batch, lambda: F.cross_entropy(model(batch[0]), batch[1]))


def _backward_only(setting: str, model: nn.Module, batch: Any, loss: Callable[[], Tensor]) -> Subject:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Subject(setting, model, optimizer, batch, lambda: loss().backward(), loss)


class PlainBlock(nn.Module):
    """Pre-norm attention and feed-forward, of torch's own modules only."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, self.num_heads, -1))  # [B, T, 3, heads, width / heads]
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(self.gelu(self.up(self.norm2(x)))))


class PlainGPT(nn.Module):
    """Token and position embedding, blocks, a norm, and a head of its own."""

    def __init__(
        self, num_layers: int, width: int, num_heads: int, context: int, num_tokens: int = 256, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(PlainBlock(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, num_tokens]."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(self.dropout(x))))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each token given the ones before."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def plain_gpt(
    setting: str, batch_size: int = 8, context: int = 256, microbatch: int | None = None, seed: int = 0, **shape: Any
) -> Subject:
    """A GPT of plain torch modules (6 layers, width 256, 8 heads, context 256, batch 8, bytes, dropout 0.1), AdamW."""
    torch.manual_seed(seed)
    model = PlainGPT(**{"num_layers": 6, "width": 256, "num_heads": 8, **shape}, context=context)
    ids = torch.randint(0, 256, (batch_size, context))
    subject = _subject(setting, model, _adamw(model), ids, lambda: next_token_loss(model(ids), ids))
    if microbatch is not None:
        subject.step = lambda: _step_in_parts(subject, microbatch)
    return subject


def _step_in_parts(subject: Subject, size: int) -> None:
    subject.optimizer.zero_grad()
    for part, weight in microbatches(subject.batch, size=size):
        (next_token_loss(subject.model(part), part) * weight).backward()
    subject.optimizer.step()


def llama(setting: str) -> Subject:
    """A small Llama (4 layers, width 256, 4 heads on 2 for keys and values, batch 8 x 128), AdamW."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False)).train()
    ids = torch.randint(0, 1000, (8, 128))
    return _subject(setting, model, _adamw(model), ids, lambda: next_token_loss(model(input_ids=ids).logits, ids))


def llama_large_vocabulary(setting: str) -> Subject:
    """The same with 2 layers and 16,000 words, and the model computes its loss itself."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "vocab_size": 16_000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False)).train()
    ids = torch.randint(0, 16_000, (8, 128))
    return _subject(setting, model, _adamw(model), ids, lambda: model(input_ids=ids, labels=ids).loss)


def head_of_gpt2(setting: str) -> Subject:
    """A GPT-2 of one layer, width 128, tied, on 2,048 tokens of 16,000 words: most of it is head and loss."""
    torch.manual_seed(0)
    shape = {"n_embd": 128, "n_layer": 1, "n_head": 4, "vocab_size": 16_000, "n_positions": 2048}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, **off, use_cache=False, loss_type="ForCausalLMLoss")).train()
    ids = torch.randint(0, 16_000, (1, 2048))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    return _subject(setting, model, optimizer, ids, lambda: model(input_ids=ids, labels=ids).loss)


def vit(setting: str) -> Subject:
    """A small ViT (4 layers, width 192, 3 heads, 32x32 images in patches of 4, batch 32), AdamW."""
    torch.manual_seed(0)
    shape = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=4, num_labels=10)).train()
    batch = images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    return _subject(setting, model, _adamw(model), batch, lambda: F.cross_entropy(model(images).logits, labels))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _subject(
    setting: str, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Callable[[], Tensor]
) -> Subject:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Subject(setting, model, optimizer, batch, step, loss)


def gradients(subject: Subject) -> list[Tensor]:
    """Gradients of one step from the present weights, which are put back; random numbers are the same each time."""
    torch.manual_seed(5)
    state = {name: value.clone() for name, value in subject.model.state_dict().items()}
    subject.step()
    found = [p.grad.clone() for p in subject.model.parameters() if p.grad is not None]
    subject.model.load_state_dict(state)
    return found


def relative_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Norm of the difference over norm of the second, all tensors together."""
    difference = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return (difference / sum(float(y.double().square().sum()) for y in b)) ** 0.5


def eval_batchnorm(model: nn.Module) -> None:
    """Freeze BatchNorm, where a comparison must be exact."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
