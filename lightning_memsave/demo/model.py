"""WideResNet-28-2 as a plain LightningModule: nothing in it knows about memory saving.

Source: Zagoruyko and Komodakis, "Wide Residual Networks", 2016 (https://arxiv.org/abs/1605.07146), pre-activation
blocks. 1,467,610 parameters at depth 28, width 2, 10 classes.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class WideBlock(nn.Module):
    """Pre-activation residual block: BatchNorm, ReLU, 3x3 convolution, twice."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C_in, H, W] -> [B, C_out, H / stride, W / stride]."""
        y = self.conv1(F.relu(self.bn1(x)))
        y = self.conv2(F.relu(self.bn2(y)))
        out: Tensor = y + self.shortcut(x)
        return out


class WideResNet(nn.Module):
    """A stem, three groups of blocks, and a linear head."""

    def __init__(self, depth: int = 28, width: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        blocks_per_group = (depth - 4) // 6
        channels = [16, 16 * width, 32 * width, 64 * width]
        self.stem = nn.Conv2d(3, channels[0], 3, 1, 1, bias=False)
        self.groups = nn.Sequential(
            *(
                nn.Sequential(
                    *(
                        WideBlock(channels[g] if b == 0 else channels[g + 1], channels[g + 1], 2 if g and not b else 1)
                        for b in range(blocks_per_group)
                    )
                )
                for g in range(3)
            )
        )
        self.bn = nn.BatchNorm2d(channels[3])
        self.head = nn.Linear(channels[3], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, num_classes]."""
        x = F.relu(self.bn(self.groups(self.stem(x))))
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class ImageClassifier(L.LightningModule):
    """Any image model, cross-entropy, SGD with momentum and a cosine schedule."""

    def __init__(self, model: nn.Module, num_classes: int = 10, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__()
        self.model, self.lr, self.momentum = model, lr, momentum
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of a batch of (images, labels)."""
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy over the test set."""
        images, labels = batch
        self.test_accuracy(self.model(images), labels)
        self.log("test/accuracy", self.test_accuracy)

    def configure_optimizers(self) -> Any:
        """Return SGD with momentum; the learning rate falls to zero along a cosine."""
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=5e-4)
        num_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
