"""DynamicConv: an encoder-decoder for translation whose self-attention is a convolution that looks at one step.

Source: Wu, Fan, Baevski, Dauphin, Auli, "Pay Less Attention with Lightweight and Dynamic Convolutions", 2019
(https://arxiv.org/abs/1901.10430). A kernel has one weight per tap and head, normalised over the taps by a softmax;
in a lightweight convolution it is a parameter, in a dynamic one a linear function of the step that it is centred on.
Shapes of the paper's model for IWSLT'14 German-English are the defaults of `DynamicConvConfig`. Different:
normalisation before each part instead of after it, which needs less care with the learning rate; gated inputs, off
there, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, BEGIN, END = 0, 1, 2
IGNORE = -100
Batch = dict[str, Tensor]
"""`source`: [B, S] with PAD behind each sentence and its END; `labels`: [B, T], IGNORE behind each."""


@dataclass(frozen=True, kw_only=True)
class DynamicConvConfig:
    """Shapes and training; the defaults are those of IWSLT'14 German-English."""

    num_source_tokens: int = 8848
    num_target_tokens: int = 6632
    width: int = 512
    hidden_width: int = 1024
    num_heads: int = 4
    encoder_kernels: tuple[int, ...] = (3, 7, 15, 31, 31, 31, 31)
    decoder_kernels: tuple[int, ...] = (3, 7, 15, 31, 31, 31)
    is_dynamic: bool = True
    """Whether kernels depend on the input; otherwise the convolutions are lightweight."""
    dropout: float = 0.3
    kernel_dropout: float = 0.1
    label_smoothing: float = 0.1
    lr: float = 5e-4
    warmup_steps: int = 4000


class HeadConvolution(nn.Module):
    """A convolution over time with one kernel per head, of softmax-normalised taps.

    Args:
        width: channels, split evenly over the heads.
        kernel_size: taps.
        num_heads: kernels.
        is_causal: whether a step sees itself and what came before, instead of as much on both sides.
        is_dynamic: whether the kernel is a function of the step's input.
        dropout: of taps.
    """

    def __init__(
        self, width: int, kernel_size: int, num_heads: int, is_causal: bool, is_dynamic: bool, dropout: float
    ) -> None:
        super().__init__()
        self.kernel_size, self.num_heads = kernel_size, num_heads
        self.num_before = kernel_size - 1 if is_causal else kernel_size // 2
        self.taps = nn.Linear(width, num_heads * kernel_size, bias=False) if is_dynamic else None
        self.kernel = None if is_dynamic else nn.Parameter(torch.randn(num_heads, kernel_size) / kernel_size**0.5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        batch, time, _ = x.shape
        if self.taps is not None:
            taps = self.taps(x).view(batch, time, self.num_heads, self.kernel_size).transpose(1, 2)
        else:
            assert self.kernel is not None
            taps = self.kernel[None, :, None].expand(batch, -1, time, -1)
        taps = self.dropout(taps.softmax(-1))  # [B, H, T, K]
        heads = x.view(batch, time, self.num_heads, -1).transpose(1, 2)  # [B, H, T, C / H]
        return (as_band(taps, self.num_before) @ heads).transpose(1, 2).reshape(x.shape)  # [T, T] @ [T, C / H]


def as_band(taps: Tensor, num_before: int) -> Tensor:
    """[..., T, K] -> [..., T, T]: tap k of step t stands in column t + k - num_before; the others are zero.

    >>> as_band(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), num_before=1)
    tensor([[2., 3.],
            [4., 5.]])
    """
    time, kernel_size = taps.shape[-2:]
    rows = F.pad(taps, (0, time)).flatten(-2)  # each row is one longer than the band, so that the next one starts later
    skewed = rows[..., : time * (time + kernel_size - 1)].unflatten(-1, (time, time + kernel_size - 1))
    return skewed[..., num_before : num_before + time]


class ConvolutionBlock(nn.Module):
    """x + convolution(x), between two projections."""

    def __init__(self, config: DynamicConvConfig, kernel_size: int, is_causal: bool) -> None:
        super().__init__()
        width = config.width
        self.norm = nn.LayerNorm(width)
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.convolution = HeadConvolution(
            width, kernel_size, config.num_heads, is_causal, config.is_dynamic, config.kernel_dropout
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, padded: Tensor | None = None) -> Tensor:
        """[B, T, C] -> [B, T, C]; steps that are `padded`, [B, T, 1], are not looked at."""
        y = self.before(self.norm(x))
        if padded is not None:
            y = y.masked_fill(padded, 0)
        return x + self.dropout(self.after(self.convolution(y)))


class AttentionBlock(nn.Module):
    """x + attention from x to what the encoder says."""

    def __init__(self, config: DynamicConvConfig) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.width
        self.norm = nn.LayerNorm(width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
        """[B, T, C], [B, S, C], [B, S, 1] -> [B, T, C]."""
        query = self.query(self.norm(x)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, C / H]
        key, value = self.key_value(memory).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        seen = ~padded.squeeze(2)[:, None, None, :]  # [B, 1, 1, S]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """x + a hidden layer."""

    def __init__(self, config: DynamicConvConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.up, self.down = nn.Linear(config.width, config.hidden_width), nn.Linear(config.hidden_width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return x + self.dropout(self.down(F.relu(self.up(self.norm(x)))))


class EncoderLayer(nn.Module):
    """Convolution, feed-forward."""

    def __init__(self, config: DynamicConvConfig, kernel_size: int) -> None:
        super().__init__()
        self.mix, self.feed = ConvolutionBlock(config, kernel_size, is_causal=False), FeedForward(config)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        """[B, S, C], [B, S, 1] -> [B, S, C]."""
        return self.feed(self.mix(x, padded))


class DecoderLayer(nn.Module):
    """Causal convolution, attention to the encoder, feed-forward."""

    def __init__(self, config: DynamicConvConfig, kernel_size: int) -> None:
        super().__init__()
        self.mix, self.attend = ConvolutionBlock(config, kernel_size, is_causal=True), AttentionBlock(config)
        self.feed = FeedForward(config)

    def forward(self, x: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
        """[B, T, C], [B, S, C], [B, S, 1] -> [B, T, C]."""
        return self.feed(self.attend(self.mix(x), memory, padded))


class DynamicConv(nn.Module):
    """Source tokens and the target so far -> logits of the next target token; the head shares the target's table."""

    def __init__(self, config: DynamicConvConfig) -> None:
        super().__init__()
        self.scale = config.width**0.5
        self.source = nn.Embedding(config.num_source_tokens, config.width, padding_idx=PAD)
        self.target = nn.Embedding(config.num_target_tokens, config.width, padding_idx=PAD)
        for table in (self.source, self.target):
            nn.init.normal_(table.weight, std=1 / self.scale)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config, k) for k in config.encoder_kernels)
        self.decoder = nn.ModuleList(DecoderLayer(config, k) for k in config.decoder_kernels)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S] -> [B, S, C], and which steps are padded, [B, S, 1]."""
        padded = (source == PAD)[:, :, None]
        x = self._embed(self.source, source)
        for layer in self.encoder:
            x = layer(x, padded)
        return self.encoder_norm(x), padded

    def decode(self, target: Tensor, memory: Tensor, padded: Tensor) -> Tensor:
        """[B, T], [B, S, C], [B, S, 1] -> [B, T, tokens]."""
        x = self._embed(self.target, target)
        for layer in self.decoder:
            x = layer(x, memory, padded)
        return F.linear(self.decoder_norm(x), self.target.weight)

    def _embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        places = positions(tokens.shape[1], table.embedding_dim, tokens.device)
        return self.dropout(self.scale * table(tokens) + places)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """[B, S], [B, T] -> [B, T, tokens]."""
        return self.decode(target, *self.encode(source))

    @torch.no_grad()
    def translate(self, source: Tensor, max_length: int = 64) -> Tensor:
        """Greedy: [B, S] -> [B, up to max_length], END behind each sentence."""
        memory, padded = self.encode(source)
        said = torch.full((len(source), 1), BEGIN, device=source.device)
        while said.shape[1] <= max_length and not (said == END).any(1).all():
            latest = self.decode(said, memory, padded)[:, -1].argmax(-1, keepdim=True)
            said = torch.cat([said, latest], 1)
        return said[:, 1:]


def positions(length: int, width: int, device: torch.device) -> Tensor:
    """Sine and cosine of the position at geometric frequencies, [length, width]."""
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-9.21 / width))  # from 1 to 1 / 10,000
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


class Translator(L.LightningModule):
    """`DynamicConv`, label-smoothed cross-entropy, Adam and the inverse square root schedule.

    The loss is a mean over the labels that count; microbatches need `Microbatching(weight_fn=LabelCount())`.
    """

    def __init__(self, config: DynamicConvConfig) -> None:
        super().__init__()
        self.config, self.model = config, DynamicConv(config)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch["labels"]
        begun = F.pad(labels[:, :-1].masked_fill(labels[:, :-1] == IGNORE, PAD), (1, 0), value=BEGIN)
        logits = self.model(batch["source"], begun)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, label_smoothing=self.config.label_smoothing
        )
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.config.lr, betas=(0.9, 0.98))
        warmup = self.config.warmup_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]
