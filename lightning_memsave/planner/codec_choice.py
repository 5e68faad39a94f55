"""Codecs by module: the fewest bytes at a bounded noise of the gradient, or the least noise in given bytes.

A *site* is a set of modules that share what they keep, so that one codec holds for all of them: a linear layer's input
that three layers read, or a normalisation's input, from which the next convolution's is computed again. Codes of
different sites are rounded independently, so the mean squares of their noise add up, as do their bytes; both are known
for each site and codec (`prediction.code_noise` measures them). Choosing is then a knapsack with one codec per site,
which dynamic programming over bytes solves: exactly, but for bytes that are rounded up to 1/65536 of their range.

Sources: Chen et al., "ActNN", 2021 (https://arxiv.org/abs/2104.14129) and Liu et al., "GACT", 2022
(https://arxiv.org/abs/2206.11357) choose bits per tensor to a mean number of bits; Evans and Aamodt, "AC-GC", 2021
(https://arxiv.org/abs/2107.10606), to a bound on the gradient's error. Different here: sites are found from what a step
keeps, keeping and computing again are among the choices, and noise is measured on the module, not modelled.
"""

from __future__ import annotations

import glob
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightning_memsave.techniques.activation_compression import ActivationCompression

EXACT = "exact"
CODECS = (EXACT, "bf16", "int8", "int4", "int2")
"""Codecs of values, more faithful ones first."""
_NUM_UNITS = 2**16  # that bytes are counted in
Codecs = tuple[str, ...]
"""A codec for each site."""


@dataclass(frozen=True, kw_only=True)
class CodeSite:
    """Modules that share what they keep."""

    modules: tuple[str, ...]
    """Their qualified names; `""` is the module whose step it is."""
    kept_bytes: Mapping[str, int]
    """What they keep, by codec, more faithful ones first."""
    noise: Mapping[str, float]
    """Mean square of the noise that each codec brings into a gradient, over the square of the gradient's norm."""


@dataclass(frozen=True)
class CodeSites:
    """The sites of a model.

    Example:
        >>> first = CodeSite(modules=("a",), kept_bytes={"exact": 8, "int4": 1}, noise={"exact": 0.0, "int4": 0.01})
        >>> second = CodeSite(modules=("b",), kept_bytes={"exact": 8, "int4": 1}, noise={"exact": 0.0, "int4": 0.04})
        >>> sites = CodeSites((first, second))
        >>> sites.fewest_bytes(0.1), sites.least_noise(9), round(sites.noise_of(("int4", "int4")), 3)
        (('int4', 'exact'), ('int4', 'exact'), 0.224)
    """

    sites: tuple[CodeSite, ...]

    def bytes_of(self, codecs: Codecs) -> int:
        """Return what all sites keep."""
        return sum(site.kept_bytes[codec] for site, codec in zip(self.sites, codecs, strict=True))

    def noise_of(self, codecs: Codecs) -> float:
        """Return the root mean square of the gradient's noise, over the gradient's norm."""
        return math.sqrt(sum(site.noise[codec] for site, codec in zip(self.sites, codecs, strict=True)))

    def fewest_bytes(self, max_noise: float) -> Codecs:
        """Return the codecs that keep the fewest bytes with at most that noise; as little noise as there is, if more.

        Args:
            max_noise: as `noise_of`.
        """
        least, _ = self._table
        within = (least <= max_noise**2).nonzero()
        return self._codecs_in(int(within[0]) if len(within) else len(least) - 1)

    def least_noise(self, max_bytes: int) -> Codecs:
        """Return the codecs with the least noise in at most that many bytes; the fewest bytes there are, if more."""
        most = len(self._table[0]) - 1
        return self._codecs_in(max(0, min(most, int((max_bytes - self._fewest) / self._unit))))

    @property
    def _fewest(self) -> int:
        return sum(min(site.kept_bytes.values()) for site in self.sites)

    @property
    def _unit(self) -> float:
        return max(1, sum(max(site.kept_bytes.values()) for site in self.sites) - self._fewest) / _NUM_UNITS

    def _units(self, site: CodeSite) -> list[int]:
        """Return what each codec keeps above the fewest bytes of the site, in units, rounded up."""
        fewest = min(site.kept_bytes.values())
        return [math.ceil((size - fewest) / self._unit) for size in site.kept_bytes.values()]

    @cached_property
    def _table(self) -> tuple[Tensor, list[Tensor]]:
        """Return the least mean square of noise by units above the fewest bytes, and each site's codec then.

        [units], and for each site the numbers of its codecs, [units].
        """
        length = _NUM_UNITS + len(self.sites) + 1  # as bytes of each site are rounded up
        least, chosen = torch.zeros(length, dtype=torch.float64, device="cpu"), []
        for site in self.sites:
            with_codec = torch.full((len(site.kept_bytes), length), math.inf, dtype=torch.float64, device="cpu")
            for row, units, codec in zip(with_codec, self._units(site), site.kept_bytes, strict=True):
                row[units:] = least[: length - units] + site.noise[codec]
            least, number = with_codec.min(0)
            chosen.append(number.to(torch.uint8))
        return least, chosen

    def _codecs_in(self, units: int) -> Codecs:
        codecs: list[str] = []
        for site, chosen in zip(reversed(self.sites), reversed(self._table[1]), strict=True):
            number = int(chosen[units])
            units -= self._units(site)[number]
            codecs.insert(0, list(site.kept_bytes)[number])
        return tuple(codecs)

    def as_config(
        self, codecs: Codecs, config: ActivationCompression, classes: Mapping[str, str]
    ) -> ActivationCompression:
        """Return settings with these codecs by module, everything else as in `config`.

        Args:
            codecs: a codec for each site.
            config: with any codecs of values.
            classes: the qualified names of all modules, parents before their children, and those of their classes.
        """
        codec_of = {name: codec for site, codec in zip(self.sites, codecs, strict=True) for name in site.modules}
        base = codec_of.get("") or next(iter(Counter(codec_of.values()).most_common(1)), (EXACT,))[0]
        inherited, chosen = {"": base}, dict[str, str]()
        for name in filter(None, classes):
            above = inherited.get(name.rpartition(".")[0], base)
            inherited[name] = codec_of.get(name, above)
            if inherited[name] != above:
                chosen[name] = inherited[name]
        # A name is a pattern, which means classes as well: who has such a class is named before.
        ambiguous = {name: codec for name, codec in chosen.items() if name in classes.values()}
        named = {name: inherited[name] for name, kind in classes.items() if kind in ambiguous and name}
        apart = {name: codec for name, codec in {**named, **chosen}.items() if name not in ambiguous}
        others = [codec for codec in config.written_out if codec not in CODECS]
        return replace(
            config,
            codecs=tuple(dict.fromkeys([EXACT, *others, base])),
            modules={glob.escape(name): codec for name, codec in {**apart, **ambiguous}.items()},
            operations=config.all_operations,
            max_gradient_noise=None,
        )


def in_words(codecs: Iterable[str]) -> str:
    """Return how many sites have which codec.

    >>> in_words(["int8", "int4", "int4"])
    '1 x int8, 2 x int4'
    """
    counts = Counter(codecs)
    return ", ".join(f"{counts[codec]} x {codec}" for codec in CODECS if codec in counts)
