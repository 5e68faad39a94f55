"""Train a small module with plain Lightning and with MemSave, and keep everything that a user could see."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader


def newer_callback(name: str) -> Any:
    """A callback of Lightning 2.6; with an older version, tests that make one are skipped."""
    return getattr(callbacks, name, lambda *_, **__: pytest.skip(f"this version of Lightning has no {name}"))


WeightAveraging, EMAWeightAveraging = map(newer_callback, ("WeightAveraging", "EMAWeightAveraging"))


class ListLogger(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self):
        return "list"

    @property
    def version(self):
        return 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        kept = {k: v for k, v in metrics.items() if not k.startswith("memsave/")}
        if kept.keys() - {"epoch"}:
            self.rows.append((step, kept))


@dataclass
class Seen:
    """What a run looked like from outside."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    logged: list[tuple[int | None, dict[str, float]]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0


class Spy(Callback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.hooks.append("before_optimizer_step")
        self.seen.gradients.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    def on_before_backward(self, *args):
        self.seen.hooks.append("before_backward")

    def on_after_backward(self, *args):
        self.seen.hooks.append("after_backward")

    def on_train_batch_start(self, *args):
        self.seen.hooks.append("batch_start")

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.seen.hooks.append("batch_end")
        self.seen.outputs.append(tree_map_only(Tensor, lambda t: t.detach().clone(), outputs))


def fit(module: L.LightningModule, batches: list[Any], memsave: Any = None, **options: Any) -> Seen:
    """Train a copy of `module` on `batches`, with `memsave` as callback (`None`: plain Lightning)."""
    module, seen, logger = copy.deepcopy(module), Seen(), ListLogger()
    callbacks = [*([memsave] if memsave is not None else []), Spy(seen), *options.pop("callbacks", [])]
    torch.manual_seed(7)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.pop("max_epochs", 2),
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    seen.logged, seen.step = logger.rows, trainer.global_step
    seen.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    seen.metrics = {k: v for k, v in trainer.callback_metrics.items() if not k.startswith("memsave/")}
    return seen


def largest_difference(a: Any, b: Any) -> float:
    """The largest absolute difference between two nests of tensors and numbers of the same structure."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        assert a.shape == b.shape, (a.shape, b.shape)
        return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if isinstance(a, dict):
        assert a.keys() == b.keys(), (a.keys(), b.keys())
        return max((largest_difference(a[k], b[k]) for k in a), default=0.0)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b), (len(a), len(b))
        return max((largest_difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, (int, float)):
        return abs(a - b)
    assert a == b, (a, b)
    return 0.0


def assert_same_run(plain: Seen, ours: Seen, tolerance: float, hooks: bool = True) -> None:
    """Gradients, parameters, outputs, logs and metrics agree; hooks fired in the same order up to early zero-grad."""
    for name in ("gradients", "parameters", "outputs", "logged", "metrics", "step"):
        difference = largest_difference(getattr(plain, name), getattr(ours, name))
        assert difference <= tolerance, f"{name} differ by {difference}: {getattr(plain, name)} {getattr(ours, name)}"
    assert len(plain.gradients) > 0
    if hooks:
        assert sorted(plain.hooks) == sorted(ours.hooks)


class Net(nn.Module):
    """Two layers with everything that acts on single samples."""

    def __init__(self, features: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, classes))

    def forward(self, x):
        return self.inner(x)
