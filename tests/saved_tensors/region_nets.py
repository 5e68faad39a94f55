"""Models with regions, plain twins, and how the two are compared."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lightning_memsave import (
    Checkpointing,
    Ledger,
    apply_checkpointing,
)
from lightning_memsave.saved_tensors import checkpoint_regions

WIDTH = 8


class Block(nn.Module):
    def __init__(self, p: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Saver(nn.Module):
    """Keeps two tensors of the size of its input, and returns a third: what a region saves is easily counted."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.b(self.a(x).tanh())  # keeps x, tanh(...)


class Loop(nn.Module):
    """Blocks in a ModuleList; `between` is what the parent does before each call."""

    def __init__(self, make=Block, n: int = 4, between=lambda self, i, x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(n)])
        self.pos, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 3)
        self.between = between

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(self.between(self, i, x))
        return self.head(x)


def names(n: int, first: int = 0) -> list[str]:
    return [f"blocks.{i}" for i in range(first, n)]


def laminar(first: int, end: int) -> list[list[str]]:
    """Groups inside of groups, each half of the one around."""
    middle, inner = (first + end) // 2, []
    if end - first > 1:
        inner = laminar(first, middle) + laminar(middle, end)
    return [names(end, first), *inner]


def with_regions(plain: nn.Module, groups, offload: bool = False) -> nn.Module:
    ours = copy.deepcopy(plain)
    apply_checkpointing(ours, Checkpointing(regions=groups, offload=offload))
    return ours


def outcome(model, x, backward=lambda loss: loss.backward(), autocast: bool = False):
    """Loss, input gradient, gradients, buffers, and the generator's next number after one step."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    backward(loss)
    found = {"loss": loss.detach(), "x": x.grad, "next number": torch.rand(1)}
    return found | {n: p.grad for n, p in model.named_parameters()} | {n: b.clone() for n, b in model.named_buffers()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, a in first.items():
        b = second[name]
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


def assert_same_steps(plain, ours, x, num_steps: int = 2, **options):
    """Steps of SGD: parameters and buffers as well."""
    for _ in range(num_steps):
        assert_same(outcome(plain, x, **options), outcome(ours, x, **options))
        for model in (plain, ours):
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad


def count_repetitions(monkeypatch) -> list[checkpoint_regions.Region]:
    found, repeat = [], checkpoint_regions.Region.repeat
    monkeypatch.setattr(checkpoint_regions.Region, "repeat", lambda self: found.append(self) or repeat(self))
    return found


def samples(requires_grad: bool = True):
    return torch.randn(5, WIDTH, requires_grad=requires_grad)


def edit(self, i, x):
    return x.add_(1) if i else x


def skips(self, i, x):
    """The first block's output again, before the third."""
    if i == 1:
        self.__dict__["skip"] = x
    return x + self.__dict__.pop("skip") if i == 2 else x


BETWEEN = {
    "nothing": lambda self, i, x: x,
    "a position is added": lambda self, i, x: x + self.pos,
    "mask": lambda self, i, x: x * (torch.arange(WIDTH) % (i + 2) > 0),
    "views": lambda self, i, x: x.view(-1, 1, WIDTH).transpose(0, 1)[0],
    "a reversed view": lambda self, i, x: x.flip(-1).t().contiguous().t(),
    "in-place edit": edit,
    "in-place edit of a view": lambda self, i, x: (x[:2].mul_(2), x)[1] if i else x,
    "skip": skips,
    "dropout": lambda self, i, x: nn.functional.dropout(x, 0.2, self.training),
    "dropout before the third": lambda self, i, x: nn.functional.dropout(x, 0.2, self.training) if i == 2 else x,
    "a number that is thrown away": lambda self, i, x: (torch.rand(1), x)[1] if i == 2 else x,
    "detached before the third": lambda self, i, x: x.detach() if i == 2 else x,
    "a call without gradients": lambda self, i, x: (torch.no_grad()(self.blocks[i])(x), x)[1],
}


GROUPS = {
    "one": [names(4)],
    "two": [names(2), names(4, 2)],
    "a pair inside": [names(3, 1)],
    "three deep": laminar(0, 4),
    "from the start": [names(4), names(3), names(2)],
    "uneven": [names(4), names(4, 1), names(4, 2), ["blocks.3"]],
}


def sequential(p: float = 0.2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Block(p), Block(p), nn.Tanh(), nn.Linear(8, 4))


class Kinds:
    """Blocks with something to look after."""

    class BatchNorm(nn.Sequential):
        def __init__(self, momentum=0.1):
            super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(inplace=True))

    class Average(BatchNorm):
        def __init__(self):
            super().__init__(momentum=None)

    class Spectral(nn.Sequential):
        def __init__(self):
            super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)

        def forward(self, x):
            return self.rnn(x[:, None].expand(-1, 3, -1))[0].sum(1)

    class NoGrad(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                scale = self.a(x).abs().mean()
            return (self.b(x) if x.sum() > 0 else self.b(self.a(x).relu_())) * scale

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block(0.1)
            self.register_buffer("num_calls", torch.zeros(()))

        def forward(self, x):
            self.num_calls = self.num_calls + 1
            return self.inner(x) / self.num_calls


def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


class Impure(nn.Module):
    def __init__(self, does) -> None:
        super().__init__()
        self.linear, self.does, self.number = nn.Linear(8, 8), does, 0
        self.cache, self.table, self.history = None, {}, []

    def forward(self, x):
        return self.does(self, x)


def kept_bytes(model, x) -> tuple[int, int]:
    """Of the graph: after the forward pass, and the peak of a step."""
    model(x).sum().backward()
    with Ledger().watching(model, [], x) as ledger:
        before = ledger.live_bytes
        y = model(x)
        kept = ledger.live_bytes - before - y.nbytes
        loss = y.sum()
        del y
        loss.backward()
    return kept, ledger.measurement.by_category["activations"]
