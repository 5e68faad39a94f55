"""Fractals: 32x32 colour images whose class is the iterated function system that drew them.

A class is a random system of 2 to 4 affine contractions of the plane; the attractor is drawn by the chaos game (start
anywhere, apply one of the maps at random, mark the point, repeat). Images of one class differ in what a photograph
differs in: the maps are jittered, the whole is rotated, scaled, moved and mirrored, the colours run between two random
ones, bright on a dark background or the reverse, and noise is laid over it. So shape is all that tells classes apart,
and the amount of noise and jitter says how hard that is.

Source: Kataoka et al., "Pre-training without Natural Images", 2020 (https://arxiv.org/abs/2101.08515), FractalDB: one
class for each system, systems that fill too little of the picture are drawn again. Anderson and Farrell, "Improving
Fractal Pre-training", 2021 (https://arxiv.org/abs/2110.03091): maps are drawn by their singular values, so that nearly
all are useful; colour and background. Different: 32x32, continuous jitter of all entries instead of six factors on one,
and noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 32
_NUM_WALKERS, _NUM_STEPS, _NUM_FORGOTTEN = 32, 60, 12
_LEAST_FILLED, _MOST_FILLED = 0.12, 0.5
_CHUNK = 2000


@dataclass(frozen=True, kw_only=True)
class FractalConfig:
    """Settings of the set."""

    num_classes: int = 10
    jitter: float = 0.04
    """Standard deviation of what is added to each entry of each map, per image."""
    noise: float = 0.1
    """Standard deviation of the noise on each pixel and colour; pixels lie between 0 and 1 before."""
    seed: int = 0
    """Of the classes. Images have a seed of their own."""


@dataclass(frozen=True)
class Systems:
    """Iterated function systems, one per class."""

    matrices: Tensor
    """[classes, maps, 2, 2]"""
    offsets: Tensor
    """[classes, maps, 2]"""
    chances: Tensor
    """[classes, maps]; a map that does not exist has none."""


def draw_systems(config: FractalConfig) -> Systems:
    """The classes: systems whose picture is neither nearly empty nor nearly full."""
    generator = torch.Generator().manual_seed(config.seed)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    while len(kept) < config.num_classes:
        system = _draw_system(generator)
        alone = Systems(*(part[None] for part in system))
        filled = float((_density(alone, torch.zeros(1, dtype=torch.long), 0.0, generator) > 0).float().mean())
        if _LEAST_FILLED < filled < _MOST_FILLED:
            kept.append(system)
    return Systems(*map(torch.stack, zip(*kept, strict=True)))


def _draw_system(generator: torch.Generator, max_maps: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    num_maps = int(torch.randint(2, max_maps + 1, (1,), generator=generator))
    scales = torch.diag_embed(uniform(0.25, 0.85, max_maps, 2))  # singular values below 1: a contraction
    mirrored = torch.diag_embed(torch.stack([torch.ones(max_maps), uniform(-1, 1, max_maps).sign()], 1))
    left, right = (_rotation(uniform(-math.pi, math.pi, max_maps)) for _ in range(2))
    matrices = left @ scales @ mirrored @ right  # [maps, 2, 2]
    chances = scales.diagonal(dim1=1, dim2=2).prod(1)  # the area that the map leaves
    chances[num_maps:] = 0
    return matrices, uniform(-1, 1, max_maps, 2), chances / chances.sum()


def _rotation(angles: Tensor) -> Tensor:
    """[n] -> [n, 2, 2]."""
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def generate(num_images: int, seed: int, config: FractalConfig | None = None) -> tuple[Tensor, Tensor]:
    """Images as uint8, [n, 3, 32, 32], and labels as int64, [n]; classes take turns.

    Args:
        num_images: how many.
        seed: of these images; another seed gives other images of the same classes.
        config: the classes, and how hard they are to tell apart.

    Example:
        >>> images, labels = generate(20, seed=1)
        >>> tuple(images.shape), images.dtype, labels.bincount().tolist()
        ((20, 3, 32, 32), torch.uint8, [2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """
    config = config or FractalConfig()
    systems = draw_systems(config)
    generator = torch.Generator().manual_seed(1_000_003 * (config.seed + 1) + seed)
    labels = torch.arange(num_images) % config.num_classes
    images = [_images(systems, part, config, generator) for part in labels.split(_CHUNK)]
    return torch.cat(images), labels


def _images(systems: Systems, labels: Tensor, config: FractalConfig, generator: torch.Generator) -> Tensor:
    density = _density(systems, labels, config.jitter, generator)  # [n, 32, 32]
    shade = (density / density.amax((1, 2), keepdim=True).clamp(min=1)).sqrt()[:, None]
    low, high, background = torch.rand(3, len(labels), 3, 1, 1, generator=generator) * 0.45
    drawn = 0.55 + low + (high - low) * shade  # bright on dark ...
    tilt = torch.rand(len(labels), 3, 2, generator=generator) - 0.5  # the background runs from one colour to another
    across = torch.linspace(-1, 1, SIZE)
    background = background + 0.4 * (tilt[:, :, :1, None] * across + tilt[:, :, 1:, None] * across[:, None])
    image = torch.where(shade > 0, drawn, background)
    inverted = torch.rand(len(labels), 1, 1, 1, generator=generator) < 0.5  # ... or the reverse
    image = torch.where(inverted, 1 - image, image)
    image = image + config.noise * torch.randn(image.shape, generator=generator)
    return (255 * image.clamp(0, 1)).round().to(torch.uint8)


def _density(systems: Systems, labels: Tensor, jitter: float, generator: torch.Generator) -> Tensor:
    """How often the chaos game met each pixel, [n, 32, 32]; each picture turned, scaled and moved as a whole."""
    matrices, offsets = systems.matrices[labels], systems.offsets[labels]  # [n, maps, 2, 2], [n, maps, 2]
    matrices = matrices + jitter * torch.randn(matrices.shape, generator=generator)
    offsets = offsets + jitter * torch.randn(offsets.shape, generator=generator)
    n = len(labels)
    points, visited = torch.zeros(n, _NUM_WALKERS, 2), []
    for step in range(_NUM_STEPS):
        which = systems.chances[labels].multinomial(_NUM_WALKERS, replacement=True, generator=generator)  # [n, W]
        maps = which[:, :, None].expand(-1, -1, 2)
        chosen = matrices.gather(1, maps[..., None].expand(-1, -1, -1, 2))  # [n, W, 2, 2]
        points = (chosen @ points[..., None])[..., 0] + offsets.gather(1, maps)
        points = points.clamp(-10, 10)  # jitter may have made a map that does not contract
        if step >= _NUM_FORGOTTEN:
            visited.append(points)
    return _histogram(_placed(torch.cat(visited, 1), jitter > 0, generator))


def _placed(points: Tensor, at_random: bool, generator: torch.Generator) -> Tensor:
    """Points, [n, k, 2], in the square from -1 to 1; `at_random`: turned, mirrored, scaled and moved as well."""
    low, high = points.quantile(0.02, 1, keepdim=True), points.quantile(0.98, 1, keepdim=True)
    points = (points - (low + high) / 2) / (high - low).amax(2, keepdim=True).clamp(min=1e-3) * 2  # the long side fits
    if not at_random:
        return points
    n = len(points)
    turn = _rotation((torch.rand(n, generator=generator) - 0.5) * math.pi / 2)
    turn[:, :, 0] *= (torch.rand(n, 1, generator=generator) - 0.5).sign()
    scale = 0.6 + 0.4 * torch.rand(n, 1, 1, generator=generator)
    shift = 0.3 * (torch.rand(n, 1, 2, generator=generator) - 0.5)
    return points @ turn * scale + shift


def _histogram(points: Tensor) -> Tensor:
    """Points in the square from -1 to 1, [n, k, 2], counted in pixels, [n, 32, 32]; what lies outside is not."""
    pixels = ((points + 1) * (SIZE / 2)).floor().long()
    inside = ((pixels >= 0) & (pixels < SIZE)).all(2)
    flat = pixels[..., 1].clamp(0, SIZE - 1) * SIZE + pixels[..., 0].clamp(0, SIZE - 1)
    counts = torch.zeros(len(points), SIZE * SIZE).scatter_add_(1, flat, inside.float())
    return counts.view(-1, SIZE, SIZE)
