"""Codes in compiled code against eager codes, and against the compiler's own budget for activations.

Peaks are by events of the allocator, as no ledger sees what is inside of compiled code. The noise is the relative
difference of all gradients from eager code's. Beside it is what the mean of so many draws leaves of it: with codes that
are right on average, about the noise over their root. Measures the models that it is given by name, or all.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from benchmarks.harness.measurement import Subject, environment, measure_cpu_seconds, put_row, time_columns
from benchmarks.models.subjects import DeepResNet, PlainGPT, next_token_loss, relative_difference
from lightning_memsave import ActivationCompression, allocation_peak, apply_activation_compression
from lightning_memsave.demo.model import WideResNet

NUM_DRAWS, NUM_STEPS = 8, 5


class Loss(nn.Module):
    """A network and its loss, which are compiled together."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any, Any], Tensor]) -> None:
        super().__init__()
        self.net, self._loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self.net, x, y)


def _language(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    return next_token_loss(getattr(out, "logits", out), y)


def _classes(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    return F.cross_entropy(getattr(out, "logits", out), y)


def _tokens(batch_size: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocabulary, (batch_size, length))
    return ids, ids


def _images(batch_size: int, size: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, 3, size, size), torch.randint(0, 10, (batch_size,))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]] = {
    "GPT, 4 layers of 256, batch 8 x 128": lambda: (
        Loss(PlainGPT(4, 256, 4, 128, dropout=0.0), _language),
        _tokens(8, 128, 256),
    ),
    "ResNet, 8 bottlenecks, batch 16": lambda: (
        Loss(DeepResNet((2, 2, 2, 2), 16, num_classes=10), _classes),
        _images(16, 64),
    ),
    "WideResNet-28-2, batch 16": lambda: (Loss(WideResNet(), _classes), _images(16)),
    "ViT, 4 layers of 192, batch 16 x 64 patches": lambda: (
        Loss(
            ViTForImageClassification(
                ViTConfig(
                    hidden_size=192,
                    num_hidden_layers=4,
                    num_attention_heads=3,
                    intermediate_size=768,
                    image_size=32,
                    patch_size=4,
                    num_labels=10,
                    hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                )
            ),
            _classes,
        ),
        _images(16),
    ),
    "Llama, 4 layers of 256, batch 8 x 128": lambda: (
        Loss(
            LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=256,
                    num_hidden_layers=4,
                    num_attention_heads=4,
                    intermediate_size=688,
                    vocab_size=1000,
                    use_cache=False,
                )
            ),
            _language,
        ),
        _tokens(8, 128, 1000),
    ),
}
CODES = ("int8", "int4")
BUDGETS = (0.7, 0.5, 0.3)


@contextlib.contextmanager
def _budget(share: float) -> Iterator[None]:
    before = torch._functorch.config.activation_memory_budget
    torch._functorch.config.activation_memory_budget = share
    try:
        yield
    finally:
        torch._functorch.config.activation_memory_budget = before


def rows(name: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    eager, parameters = copy.deepcopy(model), list(model.parameters())

    def run(function: Callable[..., Tensor]) -> None:
        model.zero_grad()
        function(*batch).backward()

    def gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        run(function)
        return [p.grad.clone() for p in parameters if p.grad is not None]

    plain = gradients(model)

    def row(
        setting: str, function: Callable[..., Tensor], draw: Callable[[int], object] | None = None
    ) -> dict[str, Any]:
        begin = time.process_time()
        run(function)
        compile_seconds = time.process_time() - begin
        draws = []
        for step in range(NUM_DRAWS if draw else 1):
            if draw is not None:
                draw(step)
            draws.append(gradients(function))
        mean = [torch.stack(each).mean(0) for each in zip(*draws, strict=True)]
        noise = sum(relative_difference(each, plain) for each in draws) / len(draws)
        peak = allocation_peak(lambda: run(function), 0)

        def run_eager() -> None:  # of a copy: codes of eager code are in `model` itself
            eager.zero_grad()
            eager(*batch).backward()

        subjects = [
            Subject("eager", eager, None, batch, run_eager),
            Subject(setting, model, None, batch, lambda: run(function)),
        ]
        base, taken = measure_cpu_seconds(subjects, NUM_STEPS)
        print(name, setting, peak, noise, flush=True)
        return {
            "benchmark": "compiled",
            "model": name,
            "setting": setting,
            "allocation_bytes": peak,
            "error": noise,
            "error_of_mean": relative_difference(mean, plain),
            "num_draws": len(draws),
            "compile_cpu_seconds": compile_seconds if setting.startswith("compiled") else None,
            **time_columns(taken, base),
            **environment(),
        }

    found = [row("eager", model)]
    for codec in CODES:
        applied = apply_activation_compression(model, ActivationCompression(codecs=(codec,)))
        found.append(row(f"eager, {codec}", model, model._activation_store.store.draw_for))
        applied.undo()
    torch.compiler.reset()
    found.append(row("compiled", torch.compile(model)))
    for share in BUDGETS:
        torch.compiler.reset()
        with _budget(share):
            found.append(row(f"compiled, activation_memory_budget {share}", torch.compile(model)))
    for codec in CODES:
        torch.compiler.reset()
        compiled = torch.compile(model)
        applied = apply_activation_compression(compiled, ActivationCompression(codecs=(codec,)))
        found.append(row(f"compiled, {codec}", compiled, compiled.__dict__["_activation_store"].store.draw_for))
        applied.undo()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True  # else the second run compiles in no time
    for name in sys.argv[1:] or MODELS:
        for row in rows(name):
            put_row("compiled", row, ("model", "setting"))
