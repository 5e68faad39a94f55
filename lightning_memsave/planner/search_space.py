"""What a planner may choose from: for each dimension its settings, with what each does to the result and to the time.

Time factors are medians of this project's own benchmarks (`benchmarks/results`, CPU), plus a part that depends on how
much of a step goes into starting operations. They order the settings, and are no promise. A level is a set of settings
that may be used together: first the exact ones, then the approximate ones, then those that change what is optimised,
mild before severe, as far as the recipe goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_memsave.core.report import LOSS_CLASSES, LossClass
from lightning_memsave.saved_tensors.codec_names import HEAD, LOSSY
from lightning_memsave.techniques.activation_compression import ActivationCompression, with_head
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.registry import Config
from lightning_memsave.techniques.sparsity import Sparsity
from lightning_memsave.techniques.tiling import Tiling

TIERS = ("lossless", "balanced", "extreme")
"""The recipes that a plan is made under; each may also use what the ones before it may."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One setting of one dimension."""

    text: str
    """The setting as a user would write it."""
    config: Config | None = None
    """`None`: the dimension is off."""
    loss_class: LossClass = "exact"
    tier: str = "lossless"
    """The first recipe that may use it."""
    time_factor: float = 1.0
    """Factor of a step's time."""
    strength: int | None = None
    """Order by memory: a setting needs no more than one of its dimension with a lower strength; 0 needs the most.

    `None`: not known. Whole batches have none: microbatches hold gradients where whole batches do not.
    """

    @property
    def noise_bound(self) -> float | None:
        """Bound of a gradient's noise that codecs are chosen for; `None` for any other setting."""
        return self.config.max_gradient_noise if isinstance(self.config, ActivationCompression) else None

    def with_noise_bound(self, bound: float) -> Option:
        """Return the same setting with another bound."""
        assert isinstance(self.config, ActivationCompression), "it has one"
        config = replace(self.config, max_gradient_noise=bound)
        return replace(self, text=f"max_gradient_noise={bound:g}", config=config, strength=None)

    def without_noise_bound(self) -> Option:
        """Return the setting with its codecs used wherever they can be, which takes least; others as they are."""
        if self.noise_bound is None:
            return self
        assert isinstance(self.config, ActivationCompression), "it has a bound"
        config = replace(self.config, max_gradient_noise=None)
        return replace(self, text=f"activations={list(config.codecs)}", config=config, strength=_STRONGEST)

    @property
    def level(self) -> tuple[int, int]:
        """Its loss class, then the recipe that may use it."""
        return LOSS_CLASSES.index(self.loss_class), TIERS.index(self.tier)

    def is_no_stronger_than(self, other: Option) -> bool:
        """Return whether it is known to save no more than another setting of its dimension."""
        if self.strength is None:
            return False
        return self.strength == 0 or (other.strength is not None and self.strength <= other.strength)


Dimension = tuple[Option, ...]
Choice = tuple[Option, ...]
"""A setting for each dimension."""
_STRONGEST = 1000
OVERHEAD = 0.006
"""What starting operations takes of a step's time, where nothing else is known (WideResNet-28-2, batch 100)."""
_OPERATION_SECONDS = 15e-6
"""What one operation of modules and backward takes besides its kernel (CPU, from what a second microbatch adds)."""
_BLOCKS = 1.27
"""Time of a step with regions over blocks. Those for a budget, which may be the same, are never slower."""
_SQRT = 1.35
_HALVING = 0.17
"""What groups inside of groups add per halving of the blocks (chains of 64 to 1024)."""
MANY_BLOCKS = 256
"""Number of blocks where it is not known."""
_HEAD = 1.0
"""Time of a step whose loss keeps no logits of many classes: 0.72 to 1.02, as less memory is written."""
_TILES = 1.45
"""Time of a step whose modules run in two tiles; each further one starts all operations twice again."""
_CODED = 1.1
"""Time of a step with coded activations."""
_COPIED = 1.5
"""Time of a step with one copy to host memory and back: a guess, not measured, that puts it behind all else."""
_STORE_OVERHEAD = 3
"""How many times the overhead of starting operations a store adds to a step's time."""


def overhead_of(num_operations: int | None, seconds: float | None) -> float:
    """Return the part of a step's time that goes into starting operations, rounded to a power of two.

    The rounding keeps a plan the same when the measured time varies a little.
    """
    if not num_operations or not seconds:
        return OVERHEAD
    share = min(1.0, _OPERATION_SECONDS * num_operations / seconds)
    return max(OVERHEAD, 2.0 ** round(math.log2(share)))


class Tiled(NamedTuple):
    """Modules that may run in tiles."""

    modules: tuple[str, ...] = ()
    num_entries: int = 0
    """Samples, or positions, that they are given."""
    dim: int = 0
    """Along which they are cut: 0 for samples, 1 for positions."""


NOT_TILED = Tiled()
"""There are none."""


def dimensions(
    budget_bytes: int,
    plain_bytes: int,
    *,
    tier: str,
    num_samples: int | None,
    is_cut_exact: bool,
    device_type: str = "cpu",
    overhead: float = OVERHEAD,
    num_blocks: int = MANY_BLOCKS,
    has_wide_head: bool = False,
    tiled: Tiled = NOT_TILED,
    noise_bounds: Sequence[float] = (),
    own: ActivationCompression | None = None,
) -> dict[type[Config], Dimension]:
    """Return every dimension with its settings, off first.

    Args:
        budget_bytes: for regions that are chosen to fit.
        plain_bytes: what the plain step needs: the more of it has to go, the more is computed again.
        tier: one of `TIERS`.
        num_samples: of the batch; `None` when it cannot be cut.
        is_cut_exact: whether microbatches leave the model's result as it is.
        device_type: where time is spent: bfloat16 is emulated on CPU.
        overhead: the part of a plain step's time that goes into starting its operations.
        num_blocks: that the model repeats: what groups of them inside of groups cost.
        has_wide_head: whether the model ends in so many classes that a loss had better not keep logits of them.
        tiled: modules that may run in tiles.
        noise_bounds: of a gradient's noise, smaller ones first, for which the codecs of activations are chosen module
            by module; none: one codec for all.
        own: settings of activations that the user has bounded the noise of.
    """
    is_cpu, store = device_type == "cpu", _STORE_OVERHEAD * overhead
    table: dict[type[Config], Dimension] = {
        Sparsity: (
            Option(text="dense", strength=0),
            _changed("sparsity=0.9", Sparsity(sparsity=0.9), "extreme", 1.02, 1),
        ),
        LowPrecision: (
            Option(text="precision as it is", strength=0),
            _changed('precision="bf16+8"', LowPrecision(format="bf16+8"), "balanced", 19.0 if is_cpu else 1.0, 1),
            _changed('precision="bf16-sr"', LowPrecision(), "extreme", 19.0 if is_cpu else 1.0, 2),
        ),
        Microbatching: tuple(_parts(num_samples, is_cut_exact, overhead)),
        ActivationCompression: tuple(_activations(own, noise_bounds, store, has_wide_head)),
        Tiling: tuple(tiles(tiled, overhead)),
        Checkpointing: (
            Option(text="no regions", strength=0),
            regions_for(budget_bytes, min(_BLOCKS - 0.01, 1.05 + 0.35 * max(0.0, 1 - budget_bytes / plain_bytes))),
            Option(text='checkpointing="blocks"', config=Checkpointing(), time_factor=_BLOCKS),
            Option(text='checkpointing="sqrt"', config=Checkpointing(method="sqrt"), time_factor=_SQRT),
            Option(
                text='checkpointing="recursive"',
                config=Checkpointing(method="recursive"),
                time_factor=max(_SQRT, 1 + _HALVING * math.log2(max(1, num_blocks))),
            ),
        ),
        OptimizerState: _states(is_cpu, overhead),
    }
    return {
        kind: tuple(o for o in options if TIERS.index(o.tier) <= TIERS.index(tier)) for kind, options in table.items()
    }


def _states(is_cpu: bool, overhead: float) -> Dimension:
    """Return formats of optimizer state, with gradients that are kept or end in backward."""
    return (
        Option(text="optimizer as it is", strength=0),
        Option(
            text='optimizer_state=OptimizerState(first_moment="32bit", gradients="release")',
            config=OptimizerState(first_moment="32bit", gradients="release"),
            time_factor=1.035 + overhead,
        ),
        _changed('optimizer_state="8bit"', OptimizerState(), "balanced", 1.01 + overhead if is_cpu else 1.0),
        _changed(
            'optimizer_state=OptimizerState(gradients="release")',
            OptimizerState(gradients="release"),
            "balanced",
            1.03 + 2 * overhead if is_cpu else 1.035 + overhead,
        ),
        _changed(
            'optimizer_state="4bit"', OptimizerState(first_moment="4bit"), "extreme", 1.02 + overhead if is_cpu else 1.0
        ),
        _changed(
            'optimizer_state=OptimizerState(first_moment="4bit", gradients="release")',
            OptimizerState(first_moment="4bit", gradients="release"),
            "extreme",
            1.04 + 2 * overhead if is_cpu else 1.035 + overhead,
        ),
    )


def regions_for(budget_bytes: int, time_factor: float) -> Option:
    """Return the option of regions that are chosen to fit `budget_bytes`."""
    text, config = f"checkpointing=Checkpointing(budget={budget_bytes})", Checkpointing(budget=budget_bytes)
    return Option(text=text, config=config, time_factor=time_factor)


def with_regions_for(options: Sequence[Option], budget_bytes: int) -> tuple[Option, ...]:
    """Return the same settings, with regions that are chosen to fit another budget."""
    return tuple(
        regions_for(budget_bytes, option.time_factor) if isinstance(option.config, Checkpointing) else option
        for option in options
    )


def in_host_memory() -> dict[type[Config], Dimension]:
    """Return settings that keep in host memory what a device has no room for; "off" is not among them."""
    offload, released = (OptimizerState(placement="host", gradients=g) for g in ("keep", "release"))
    inputs = Checkpointing(offload=True)
    return {
        Checkpointing: (
            Option(text="checkpointing=Checkpointing(offload=True)", config=inputs, time_factor=_BLOCKS * _COPIED),
        ),
        OptimizerState: (
            Option(text='optimizer_state="offload"', config=offload, time_factor=_COPIED**2),
            Option(
                text='optimizer_state=OptimizerState(placement="host", gradients="release")',
                config=released,
                time_factor=1.035 * _COPIED**2,
            ),
        ),
    }


def _changed(text: str, config: Config, tier: str, time_factor: float, strength: int | None = None) -> Option:
    return Option(text=text, config=config, loss_class="changed", tier=tier, time_factor=time_factor, strength=strength)


def _keeping(config: ActivationCompression, **others: Any) -> Option:
    names = [f'"{codec}"' for codec in config.codecs]
    text = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    return Option(text=f"activations={text}", config=config, **others)


def _activations(
    own: ActivationCompression | None, bounds: Sequence[float], store: float, has_wide_head: bool
) -> Iterator[Option]:
    """Yield ways to keep activations: as they are, exactly, then with ever more noise.

    Args:
        own: the user's settings, whose bound of noise is the highest of `bounds`.
        bounds: of noise, for which codecs are chosen module by module.
        store: what the store adds to a step's time.
        has_wide_head: whether the model ends in many classes.
    """
    yield Option(text="activations as they are", strength=0)
    base = own or ActivationCompression(codecs=("exact", "int4"))
    others = tuple(codec for codec in base.codecs if codec not in ("exact", *LOSSY))
    exact = replace(base, max_gradient_noise=None, codecs=("exact", *others))
    if has_wide_head and HEAD not in base.written_out:
        yield _keeping(replace(exact, codecs=(*others, HEAD)), time_factor=_HEAD + store)
        yield _keeping(exact, time_factor=1.05 + store, strength=1)
        base, exact = with_head(base), with_head(exact)
    yield _keeping(exact, time_factor=1.05 + store, strength=2)
    coded: dict[str, Any] = {"loss_class": "approximate", "tier": "balanced"}
    for number, codec in enumerate(() if bounds else ("int8", "int4")):
        config = replace(exact, codecs=(*exact.codecs, codec))
        yield _keeping(config, **coded, time_factor=_CODED + 0.01 * number + store, strength=3 + number)
    for number, bound in enumerate(bounds):
        yield Option(
            text=f"max_gradient_noise={bound:g}",
            config=replace(base, max_gradient_noise=bound),
            loss_class="approximate",
            tier="balanced" if own is None else TIERS[0],
            time_factor=_CODED + store,
            strength=3 + number,
        )


def _parts(num_samples: int | None, is_exact: bool, overhead: float) -> Iterator[Option]:
    """Yield whole batches, then ever smaller microbatches: 2, 3, 4, 6, 8, 12, ... of them, down to single samples."""
    yield Option(text="whole batches")
    sizes = [] if num_samples is None else [-(-num_samples // n) for n in _counts(num_samples)]
    for size in dict.fromkeys(size for size in sizes if num_samples is not None and size < num_samples):
        num_parts = -(-(num_samples or size) // size)
        yield Option(
            text=f"microbatch={size}",
            config=Microbatching(size=size),
            loss_class="exact" if is_exact else "changed",
            tier="lossless" if is_exact else "balanced",
            time_factor=1 + overhead * (num_parts - 1),
            strength=num_parts,
        )


def tiles(tiled: Tiled, overhead: float) -> Iterator[Option]:
    """Yield no tiles, then ever smaller ones: a half of the samples, a quarter, down to a sixteenth.

    Of positions, a quarter and a sixteenth.
    """
    yield Option(text="no tiles", strength=0)
    modules, num_entries, dim = tiled
    for num_tiles in () if not modules else (2, 4, 8, 16) if dim == 0 else (4, 16):
        size = -(-num_entries // num_tiles)
        if num_tiles >= 2 * num_entries:
            break
        yield Option(
            text=f"tiling=Tiling(modules={modules}, dim={dim}, size={size})",
            config=Tiling(modules=modules, dim=dim, size=size),
            time_factor=_TILES + 2 * overhead * (min(num_tiles, num_entries) - 1),
            strength=num_tiles,
        )


def _counts(num_samples: int) -> list[int]:
    counts, power = [2, 3], 4
    while power < num_samples:
        counts += [power, power + power // 2]
        power *= 2
    return sorted({min(count, num_samples) for count in (*counts, num_samples)})


def levels(table: Mapping[type[Config], Sequence[Option]]) -> list[tuple[int, int]]:
    """Return the levels that occur, harmless first."""
    return sorted({option.level for options in table.values() for option in options})


def time_factor(choice: Sequence[Option]) -> float:
    """Return the modelled time against the plain step."""
    return math.prod(option.time_factor for option in choice)


def describe(choice: Sequence[Option]) -> str:
    """Return what is on, as a user would write it."""
    return ", ".join(option.text for option in choice if option.config is not None) or "nothing"
