"""A module that logs and measures much, and its runs with and without microbatches, in float64."""

from __future__ import annotations

import dataclasses
import weakref
from collections import namedtuple
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError
from transformers import BatchEncoding

from lightning_memsave import MemSave
from tests.harness import Net, fit

CALLS = weakref.WeakKeyDictionary()


"""How often the step of each module was called; no attribute, which microbatches would be seen to change."""
EXACT = 1e-12


@dataclasses.dataclass
class Sample:
    x: Tensor
    y: Tensor
    names: list[str]


Pair = namedtuple("Pair", "x y")


SHAPES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y, "names": [f"s{i}" for i in range(len(x))], "scale": torch.tensor(1.0)},
    "nested": lambda x, y: {"in": {"x": x}, "out": (y, [y.clone()])},
    "namedtuple": Pair,
    "dataclass": lambda x, y: Sample(x, y, [f"s{i}" for i in range(len(x))]),
    "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
}


def unpack(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, (tuple, list)):
        return batch[0], batch[1]
    if isinstance(batch, Sample):
        assert len(batch.names) == len(batch.x)
        return batch.x, batch.y
    if "in" in batch:
        return batch["in"]["x"], batch["out"][0]
    if "names" in batch:
        assert len(batch["names"]) == len(batch["x"])
    return batch["x"], batch["y"]


class Module(L.LightningModule):
    def __init__(self, reduction: str = "mean", optimizer: str = "sgd", output: str = "loss", **flags: bool) -> None:
        super().__init__()
        self.net, self.reduction, self.kind, self.output, self.flags = Net(), reduction, optimizer, output, flags
        self.accuracy, self.error = MulticlassAccuracy(3, average="micro"), MeanSquaredError()
        self.error.set_dtype(torch.float64)
        CALLS[self] = 0

    def training_step(self, batch, batch_idx):
        CALLS[self] = CALLS.get(self, 0) + 1
        x, y = unpack(batch)
        logits = self.net(x)
        loss = F.cross_entropy(logits, y, reduction=self.reduction)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", logits.min(), on_epoch=True, on_step=False, reduce_fx="min")
        self.log("count", torch.tensor(float(len(y))), on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("sized", logits.mean(), on_epoch=True, on_step=True, batch_size=len(y))
        self.log("constant", logits.mean(), on_epoch=True, on_step=True, batch_size=64)
        if self.flags.get("metrics", True):
            self.accuracy(logits.argmax(1), y)
            self.error(logits[:, 0], y.to(logits.dtype))
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log("error", self.error, on_step=True, on_epoch=True)
        if self.output == "dict":
            return {"loss": loss, "logits": logits, "n": torch.tensor(2.0), "tag": "t", "ids": list(range(len(y)))[:0]}
        return loss

    def configure_optimizers(self):
        optimizer: Any = {
            "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, 0.01),
            "lbfgs": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=5, line_search_fn="strong_wolfe"),
        }[self.kind](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches(shape: str = "tuple", sizes: tuple[int, ...] = (10, 10, 4)) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for n in sizes:
        x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
        made.append(SHAPES[shape](x, torch.randint(0, 3, (n,), generator=generator)))
    return made


def both(module: Module, data: list[Any], memsave: MemSave, **options: Any) -> tuple[Any, Any]:
    module = module.double()
    return fit(module, data, precision="64-true", **options), fit(module, data, memsave, precision="64-true", **options)
