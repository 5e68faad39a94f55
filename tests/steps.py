"""Small models with a training step, for whoever traces one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_memsave import Ledger
from lightning_memsave.demo.model import WideResNet


class Step(NamedTuple):
    """A model, its batch, and the loss of both."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, dict[str, Any]], Tensor]

    def run(self) -> None:
        self.loss(self.model, self.batch).backward()

    def measured(self):
        """What the ledger says about one step that starts without gradients."""
        self.model.zero_grad()
        with Ledger().watching(self.model, batch=self.batch) as ledger:
            self.run()
        return ledger.measurement


def squares(model, batch):
    return model(batch["x"]).square().mean()


def head_loss(model, batch):
    return model(**batch).loss


def mlp() -> Step:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return Step(model, {"x": torch.randn(32, 16)}, squares)


def in_place() -> Step:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True))
    return Step(model, {"x": torch.randn(32, 16)}, squares)


def wide_resnet(depth: int = 16, batch_size: int = 4) -> Step:
    batch = {"x": torch.randn(batch_size, 3, 16, 16), "y": torch.randint(10, (batch_size,))}
    return Step(WideResNet(depth=depth, width=1), batch, lambda model, b: F.cross_entropy(model(b["x"]), b["y"]))


def gpt2(num_layers: int = 2, **options: Any) -> Step:
    tokens = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
    config = transformers.GPT2Config(
        vocab_size=50, n_layer=num_layers, n_embd=16, n_head=2, n_positions=32, **tokens, **options
    )
    ids = torch.randint(50, (4, 24))
    return Step(transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}, head_loss)


def bert() -> Step:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    ids = torch.randint(50, (4, 24))
    return Step(transformers.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}, head_loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def lstm() -> Step:
    return Step(Recurrent(), {"x": torch.randn(4, 10, 8)}, squares)


STEPS = {"MLP": mlp, "in-place ReLU": in_place, "WideResNet": wide_resnet, "GPT-2": gpt2, "BERT": bert, "LSTM": lstm}
