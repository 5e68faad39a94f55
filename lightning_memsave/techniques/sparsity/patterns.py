"""Patterns of the weights that live at the start: sparse layers, how many values each has, and where."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_memsave.core.selection import Selector
from lightning_memsave.torch_internals.fake_tensors import truth
from lightning_memsave.torch_internals.layer_selection import Wanted, select_layers

_KINDS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
)
_WANTED = Wanted("sparsity", "sparse", _KINDS, "Linear, Conv or Embedding")
Modules = Selector | None
Weights = Mapping[str, nn.Parameter]
Group = tuple[int, int]
"""(2, 4): two live weights in each group of four."""


def group_of(sparsity: float | str) -> Group | None:
    """Return the group that a text names; `None` for a fraction.

    >>> group_of("2:4")
    (2, 4)
    """
    found = re.fullmatch(r"(\d+):(\d+)", sparsity) if isinstance(sparsity, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def drawn(size: int, device: torch.device, *key: object) -> Tensor:
    """Return uniform random numbers, [size]: the same ones for the same `key`, on every device and rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.rand(size, generator=generator, device="cpu").to(device)


# ------------------------------------------------------------------------------- which layers
class _Selection(Protocol):
    @property
    def modules(self) -> Modules: ...

    @property
    def min_size(self) -> int: ...

    @property
    def group(self) -> Group | None: ...


def layers_to_change(model: nn.Module, config: _Selection) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers to make sparse, and for those that match but stay dense, why.

    Raises:
        ValueError: nothing can be made sparse, or what would be is tied, or needs its dense weight.
    """

    def why_dense(module: nn.Module, weight: nn.Parameter) -> str | None:
        if weight.numel() < config.min_size:
            return f"{weight.numel()} weights"
        if config.group is not None and weight[0].numel() % config.group[1]:
            return f"{weight[0].numel()} weights per output do not divide into groups of {config.group[1]}"
        return None

    return select_layers(model, config, _WANTED, why_dense)


# ------------------------------------------------------------------------------- how many values
def count_live(shapes: Mapping[str, torch.Size], density: float, distribution: str) -> dict[str, int]:
    """Return live weights of each layer.

    `"uniform"`: the same density everywhere. `"erk"` (Erdos-Renyi-Kernel; Evci et al., 2020): density in proportion
    to (sum of sizes) / (product of sizes), so that small layers stay denser; layers that would exceed 1 are full.
    """
    if distribution == "uniform":
        return {name: _rounded(density, shape) for name, shape in shapes.items()}
    total = density * sum(shape.numel() for shape in shapes.values())
    full: set[str] = set()
    while True:
        rest = total - sum(shapes[name].numel() for name in full)
        scale = rest / max(1, sum(sum(shape) for name, shape in shapes.items() if name not in full))
        above = {name for name, shape in shapes.items() if scale * sum(shape) > shape.numel()} - full
        if not above:
            break
        full |= above
    return {
        name: shape.numel() if name in full else _rounded(scale * sum(shape) / shape.numel(), shape)
        for name, shape in shapes.items()
    }


def _rounded(density: float, shape: torch.Size) -> int:
    return max(1, round(density * shape.numel()))


# ------------------------------------------------------------------------------- where
def best(scores: Tensor, num_live: int) -> Tensor:
    """Return the ascending positions of the highest scores."""
    return scores.topk(num_live, sorted=False).indices.sort().values


def best_of_groups(scores: Tensor, group: Group) -> Tensor:
    """Return the ascending positions of the highest scores of each group."""
    kept, size = group
    inside = scores.view(-1, size).topk(kept, dim=1).indices  # [groups, kept]
    starts = torch.arange(0, scores.numel(), size, device=scores.device)
    return (inside + starts[:, None]).view(-1).sort().values


def best_of_all(scores: Mapping[str, Tensor], num_live: int) -> dict[str, Tensor]:
    """Return the ascending positions of the highest scores of all layers together; at least one of each."""
    everything = torch.cat(list(scores.values()))
    lives = torch.zeros_like(everything, dtype=torch.bool)
    lives[everything.topk(num_live, sorted=False).indices] = True
    parts = lives.split([score.numel() for score in scores.values()])
    return {
        name: part.nonzero().view(-1) if part.any() else best(score, 1)
        for (name, score), part in zip(scores.items(), parts, strict=True)
    }


def choose_positions(
    weights: Weights,
    density: float,
    group: Group | None,
    initial: str,
    distribution: str,
    seed: int,
    named: Mapping[str, str],
) -> dict[str, Tensor]:
    """Return the positions of the values that live, ascending in each flat weight.

    A model, or without `"global"` a layer, that is as sparse already keeps what it has, and draws the rest. A layer in
    `named` draws under that name.
    """
    num_nonzero = {name: int(weight.count_nonzero()) for name, weight in weights.items()}
    if distribution == "global":
        total = max(1, round(density * sum(weight.numel() for weight in weights.values())))
        is_sparse = sum(num_nonzero.values()) <= total
        return best_of_all(
            {name: _scores(named.get(name, name), w, initial, seed, is_sparse) for name, w in weights.items()}, total
        )
    counts = count_live({name: weight.shape for name, weight in weights.items()}, density, distribution)
    chosen = {}
    for name, weight in weights.items():
        scores = _scores(named.get(name, name), weight, initial, seed, num_nonzero[name] <= counts[name])
        chosen[name] = best(scores, counts[name]) if group is None else best_of_groups(scores, group)
    return chosen


def averaged(model: nn.Module) -> dict[str, str]:
    """Return the layers that a `torch.optim.swa_utils.AveragedModel` inside of `model` averages, by name."""
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for name, average in modules.items():
        if isinstance(average, AveragedModel):
            inside = average.module
            ours = next((n for n, m in modules.items() if m is not inside and _starts_as(m, inside)), None)
            if ours is not None:
                found |= {f"{name}.module.{n}".rstrip("."): f"{ours}.{n}".strip(".") for n, _ in inside.named_modules()}
    return found


def _starts_as(module: nn.Module, other: nn.Module) -> bool:
    if type(module) is not type(other):
        return False
    mine, theirs = dict(module.named_parameters()), dict(other.named_parameters())
    return mine.keys() == theirs.keys() and all(
        p.shape == q.shape and truth((p.to(q.device) == q).all(), True)
        for p, q in zip(mine.values(), theirs.values(), strict=True)
    )


def _scores(name: str, weight: Tensor, initial: str, seed: int, is_sparse: bool) -> Tensor:
    """Return what decides who lives."""
    flat = weight.detach().reshape(-1)
    if not is_sparse and initial == "magnitude":
        return flat.abs()
    scores = drawn(flat.numel(), flat.device, seed, "initial", name)
    return scores + (flat != 0) if is_sparse else scores


def cubic(density: float, progress: float) -> float:
    """Return the density at `progress` in 0..1 of gradual pruning (Zhu and Gupta, 2017).

    >>> cubic(0.1, 0.0), round(cubic(0.1, 0.5), 4), round(cubic(0.1, 1.0), 4)
    (1.0, 0.2125, 0.1)
    """
    return density + (1 - density) * (1 - min(1.0, progress)) ** 3


def cosine(fraction: float, progress: float) -> float:
    """Return the fraction moved at `progress`, falling to zero (Evci et al., 2020).

    >>> cosine(0.3, 0.0), cosine(0.3, 0.5), cosine(0.3, 1.0)
    (0.3, 0.15, 0.0)
    """
    return round(fraction / 2 * (1 + math.cos(math.pi * min(1.0, progress))), 12)
