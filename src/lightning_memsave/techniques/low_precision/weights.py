"""The weights of a model in bfloat16: which, with what correction, and what is read and written as a whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.numerics.kbit import mix
from lightning_memsave.numerics.kernels import round_to_bfloat16
from lightning_memsave.numerics.master import join, split

CORRECTIONS: Mapping[str, torch.dtype | None] = {"bf16-sr": None, "bf16+8": torch.int8, "bf16-kahan": torch.bfloat16}
_HOW = {"bf16-sr": "rounded stochastically", "bf16+8": "rounded to 24 bits", "bf16-kahan": "compensated in bfloat16"}


def parameters_kept_32bit(model: nn.Module, keep_32bit: tuple[str | type[nn.Module], ...]) -> set[Tensor]:
    """Parameters of normalisation layers, and of modules that are named.

    Raises:
        ValueError: a selector that matches no module.
    """
    kept: set[Tensor] = set()
    matched = dict.fromkeys(keep_32bit, False)
    for name, module in model.named_modules():
        if "Norm" in type(module).__name__ and not any(module.children()):
            kept.update(module.parameters(recurse=False))
        for selector in keep_32bit:
            if _matches(selector, name, module):
                matched[selector] = True
                kept.update(module.parameters())
    for selector, has_matched in matched.items():
        if not has_matched:
            raise setting_error(
                "LowPrecision.keep_32bit",
                "must match a module",
                selector,
                "Compare it with the names in `model.named_modules()` and their classes.",
            )
    return kept


def _matches(selector: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(selector, type):
        return isinstance(module, selector)
    return fnmatchcase(name, selector) or fnmatchcase(type(module).__name__, selector)


@dataclass(frozen=True)
class _Place:
    """Where a parameter stands."""

    index: int
    """Its number, for the seed."""
    owner: nn.Module
    """Which module holds the correction, as a buffer that `state_dict` leaves out."""
    buffer: str
    was: torch.dtype


class Weights:
    """Parameters of `model` in bfloat16, from now until `restore`.

    Args:
        model: changed in place.
        weight_format: a key of `CORRECTIONS`.
        keep_32bit: see `LowPrecision`.
        seed: of the stochastic rounding.
    """

    def __init__(
        self, model: nn.Module, weight_format: str, keep_32bit: tuple[str | type[nn.Module], ...], seed: int
    ) -> None:
        self._model, self.format, self._seed = model, weight_format, seed
        self._correction_dtype = CORRECTIONS[weight_format]
        kept = parameters_kept_32bit(model, keep_32bit)
        self._places: dict[Tensor, _Place] = {}
        for owner in model.modules():
            for name, p in owner.named_parameters(recurse=False):
                # What is frozen may be moved by hand in steps that bfloat16 does not show (a target network).
                is_lowered = p.requires_grad and p.dtype in (torch.float32, torch.bfloat16) and p not in kept
                if is_lowered and p not in self._places:
                    place = _Place(len(self._places), owner, f"_{name}_correction", p.dtype)
                    self._places[p] = place
        if not self._places:
            raise setting_error(
                "precision",
                "needs float32 parameters",
                "none besides those that stay float32",
                "Use `precision=False`.",
            )
        num_all = sum(1 for _ in model.parameters())
        self.summary = f"{len(self._places)} of {num_all} parameters in {weight_format}, stepped in float32"
        self.reason = f"weights are bfloat16, {_HOW[weight_format]} after each step"
        for parameter, place in self._places.items():
            self._store(parameter, place, parameter.detach())
        self._hooks = []
        if self._correction_dtype is not None:
            self._hooks = [
                model.register_state_dict_post_hook(functools.partial(Weights._write_whole, self)),
                model.register_load_state_dict_pre_hook(functools.partial(Weights._read_whole, self)),
            ]

    def __contains__(self, p: Tensor) -> bool:
        return p in self._places

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._places)

    @torch.no_grad()
    def _store(self, p: Tensor, place: _Place, whole: Tensor) -> None:
        if self._correction_dtype is None:
            p.data = whole.bfloat16()
            return
        p.data, correction = split(whole.float(), self._correction_dtype)
        place.owner.register_buffer(place.buffer, correction, persistent=False)

    def _correction(self, p: Tensor) -> Tensor | None:
        place = self._places[p]
        return None if self._correction_dtype is None else getattr(place.owner, place.buffer)

    def whole(self, p: Tensor) -> Tensor:
        """The weights of `p` in float32, a copy."""
        return join(p.detach(), self._correction(p))

    def write(self, p: Tensor, whole: Tensor, num_steps: int) -> None:
        """Round `whole` into `p`, with the noise of step `num_steps`."""
        correction = self._correction(p)
        if correction is None:
            seed = mix(mix(mix(self._seed & 0xFFFFFFFF) ^ (num_steps & 0xFFFFFFFF)) ^ self._places[p].index)
            rounded = round_to_bfloat16(whole.reshape(-1), seed)
            p.copy_(whole if rounded is None else rounded.view(whole.shape))  # not finite: nothing to be exact about
        else:
            rounded, latest = split(whole, correction.dtype)
            p.copy_(rounded)
            correction.copy_(latest)

    # ------------------------------------------------------------------ state dicts hold what the weights are: float32
    def _named(self, prefix: str) -> Any:
        for name, p in self._model.named_parameters(remove_duplicate=False):
            if p in self._places:
                yield prefix + name, p

    def _write_whole(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
        for key, p in self._named(prefix):
            if key in state_dict:
                state_dict[key] = self.whole(p)

    def _read_whole(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for key, p in self._named(prefix):
            value, correction = state_dict.get(key), self._correction(p)
            if isinstance(value, Tensor) and correction is not None and value.shape == p.shape:
                state_dict[key], latest = split(value.to(p.device, torch.float32), correction.dtype)
                correction.copy_(latest)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their dtypes back, with the values that they have now."""
        for hook in self._hooks:
            hook.remove()
        for p, place in self._places.items():
            gradient, p.grad = p.grad, None
            p.data = self.whole(p).to(place.was)
            p.grad = None if gradient is None else gradient.to(place.was)
            if self._correction_dtype is not None:
                delattr(place.owner, place.buffer)
        self._places.clear()
