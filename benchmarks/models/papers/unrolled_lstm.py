"""A stacked LSTM language model, unrolled over time: the recurrent network of Chen et al., 2016.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016
(https://arxiv.org/abs/1604.06174), section 5: 4 layers of 1024, 64 steps, batch 64. Steps are grouped into chunks, so
that a chunk can be a checkpointed region: its input is the state of all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[tuple[Tensor, Tensor], ...]
"""(hidden, cell) of each layer, [B, C] each."""


class Chunk(nn.Module):
    """Some steps of all layers. The cells are those of the network: a chunk has no weights of its own."""

    def __init__(self, cells: nn.ModuleList) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """[B, T, C] -> [B, T, C]."""
        outputs = []
        for x in inputs.unbind(1):
            states = []
            for cell, before in zip(self.cells, state, strict=True):
                hidden, memory = cell(x, before)
                states.append((hidden, memory))
                x = hidden
            state = tuple(states)
            outputs.append(x)
        return torch.stack(outputs, 1), state


class UnrolledLSTM(nn.Module):
    """Tokens -> mean cross-entropy of each token given the ones before.

    Args:
        num_layers: LSTM layers.
        width: of each.
        num_tokens: words.
        chunk_length: steps in a chunk.
    """

    def __init__(self, num_layers: int = 4, width: int = 1024, num_tokens: int = 1000, chunk_length: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.chunk = Chunk(nn.ModuleList(nn.LSTMCell(width, width) for _ in range(num_layers)))
        self.head = nn.Linear(width, num_tokens)
        self.chunk_length = chunk_length

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T + 1] -> scalar."""
        inputs = self.embedding(tokens[:, :-1])
        zeros = torch.zeros_like(inputs[:, 0])
        state: State = tuple((zeros, zeros) for _ in self.chunk.cells)
        loss = zeros.new_zeros(())
        for part, following in zip(
            inputs.split(self.chunk_length, 1), tokens[:, 1:].split(self.chunk_length, 1), strict=True
        ):
            outputs, state = self.chunk(part, state)
            loss = loss + F.cross_entropy(self.head(outputs).flatten(0, 1), following.flatten(), reduction="sum")
        return loss / tokens[:, 1:].numel()
