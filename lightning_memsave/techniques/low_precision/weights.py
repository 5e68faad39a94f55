"""The weights of a model in 16 or 8 bits: which, with what correction, and what is read and written as a whole."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.selection import Selector, is_norm, select
from lightning_memsave.numerics.kbit import mix
from lightning_memsave.numerics.kernels import round_to_bfloat16, round_to_float16
from lightning_memsave.numerics.kernels.coded_step import ShortWeights
from lightning_memsave.numerics.master_weights import join, split
from lightning_memsave.techniques.low_precision.int8_parameter import (
    Int8,
    become_int8,
    become_whole,
    parameters_for_int8,
)
from lightning_memsave.techniques.low_precision.scaling import LossScaling
from lightning_memsave.torch_internals.optimizer_class import local_of, original, shard_of, span_of, undivided
from lightning_memsave.torch_internals.private_names import require
from lightning_memsave.torch_internals.sharded_parameters import (
    as_local,
    as_sharded,
    free_gathered,
    groups_of,
    is_sharded,
    renew_groups,
    set_values,
)


class Format(NamedTuple):
    """How a weight is stored."""

    dtype: torch.dtype
    """float32: only the gradient is short, bfloat16."""
    correction: torch.dtype | None
    """Dtype of what is kept beside it; `None`: it is rounded stochastically."""
    how: str
    has_codes: bool = False
    """Whether parameters that can (`int8_parameter`) are int8 codes instead."""


FORMATS: Mapping[str, Format] = {
    "bf16-sr": Format(torch.bfloat16, None, "bfloat16, rounded stochastically"),
    "bf16+8": Format(torch.bfloat16, torch.int8, "bfloat16, rounded to 24 bits"),
    "bf16-kahan": Format(torch.bfloat16, torch.bfloat16, "bfloat16, compensated in bfloat16"),
    "int8-sr": Format(torch.bfloat16, None, "int8 or bfloat16, rounded stochastically", has_codes=True),
    "fp16-scaled": Format(torch.float16, None, "float16, rounded stochastically"),
    "bf16-gradients": Format(torch.float32, None, "float32, and their gradients bfloat16"),
}


def parameters_kept_32bit(model: nn.Module, keep_32bit: tuple[Selector, ...]) -> set[Tensor]:
    """Return parameters of modules that hold vectors alone, as normalisation layers, and of modules that are named.

    And those that are multiplied by buffers before a product reads them.

    Autocast rounds what goes into a matrix product, whatever dtype it has. A vector that stands by itself takes part in
    sums and products as it is: with 16 bits, its results would have 16 bits as well, where `bf16-mixed` gives 32.

    Raises:
        ValueError: a selector that matches no module.
    """
    kept = {p for module in select("LowPrecision.keep_32bit", keep_32bit, model) for p in module.parameters()}
    vectors = (module for module in model.modules() if is_norm(module) or _holds_vectors_alone(module))
    multiplied = (module for module in model.modules() if _multiplies_by_buffers(module))
    return kept.union(*(module.parameters(recurse=False) for module in (*vectors, *multiplied)))


def _multiplies_by_buffers(module: nn.Module) -> bool:
    """Return whether spectral normalisation multiplies its weight by buffers of 32 bits, before autocast sees it."""
    if isinstance(module, ParametrizationList):
        return any(buffer.is_floating_point() for buffer in module.buffers())
    return any(type(hook).__name__ == "SpectralNorm" for hook in module._forward_pre_hooks.values())


_OF_PRODUCTS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.ParameterList, nn.ParameterDict)


def _holds_vectors_alone(module: nn.Module) -> bool:
    """Return whether its own parameters are vectors, which no matrix product reads; a sparse layer's are weights."""
    own = list(module.parameters(recurse=False))
    return not isinstance(module, _OF_PRODUCTS) and not any(is_lazy(p) or p.dim() > 1 for p in own)


@dataclass(frozen=True)
class _Place:
    """Place of a parameter: its module and name."""

    index: int
    """Its number, for the seed."""
    owner: nn.Module
    """Module that holds the correction, as a buffer that `state_dict` leaves out."""
    buffer: str
    was: torch.dtype


class Weights:
    """Parameters of `model` in 16 bits, from now until `restore`.

    Args:
        model: changed in place.
        weight_format: a key of `FORMATS`.
        keep_32bit: see `LowPrecision`.
        seed: of the stochastic rounding.
        lower_frozen: frozen parameters too; they need no correction.
        scaling: of the loss, where gradients are float16.

    Raises:
        ValueError: a selector that matches no module, no parameter to lower, or weights beyond float16's range.
    """

    def __init__(
        self,
        model: nn.Module,
        weight_format: str,
        keep_32bit: tuple[Selector, ...],
        seed: int,
        lower_frozen: bool = False,
        scaling: LossScaling | None = None,
    ) -> None:
        self.format, self.scaling, self._seed = FORMATS[weight_format], scaling, seed
        free_gathered(model)  # by a forward pass without backward: parameters are shards again
        self._sharded: nn.Module | None = None
        """The model where this process has shards of it, until `restore`."""
        if any(map(is_sharded, model.parameters())):
            self._check_format_of_shards(weight_format)
            self._sharded = model
        self._have_memory = not any(p.is_meta for p in model.parameters())
        self._places = _places(model, self.format.dtype, weights_kept_32bit(model, keep_32bit), lower_frozen)
        to_code = self._find_those_to_code(model) if self.format.has_codes else set()
        for name, p in model.named_parameters():
            if p in self._places and p.requires_grad and self.format.dtype == torch.float16:
                _check_range(name, p)
        num_all = sum(1 for _ in model.parameters())
        in_bf16 = f" ({len(self._places) - len(to_code)} of them in bf16-sr)" if to_code else ""
        self.summary = f"{len(self._places)} of {num_all} parameters in {weight_format}{in_bf16}, stepped in float32"
        self.reason = f"weights are {self.format.how}{'' if self._is_whole else ' after each step'}"
        self._hooks: list[Any] = []
        for parameter, place in self._places.items():
            self._store(parameter, place, as_local(parameter), parameter in to_code)
        self._renew_groups()
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
                if isinstance(p, Int8):
                    self._hooks.append(module.register_state_dict_post_hook(functools.partial(_write_decoded, name)))
                elif self.format.correction is not None and p in self._places and p.requires_grad:
                    self._hooks += _on_disk_whole(module, name, self._places[p])

    def _check_format_of_shards(self, weight_format: str) -> None:
        require("sharded parameters", "precision")
        if self.scaling is not None or self._is_whole or self.format.has_codes:
            raise setting_error(
                "precision",
                "must be one of bf16-sr, bf16+8, bf16-kahan under FSDP2, which gathers weights and reduces gradients "
                "in the dtype of their parameters, and where all processes have to skip the same steps",
                weight_format,
                'Use `precision="bf16-sr"`.',
            )

    def _find_those_to_code(self, model: nn.Module) -> set[Tensor]:
        """Return the parameters that become codes.

        Raises:
            ValueError: there is none.
        """
        found = parameters_for_int8(model) & self._places.keys()
        if not found:
            rule = "needs a Linear, convolution or Embedding with a plain weight to keep as int8"
            raise setting_error("precision", rule, "none", 'Use `precision="bf16-sr"`.')
        return found

    @torch.no_grad()
    def materialized(self) -> None:
        """Make corrections anew where weights had no memory when they were lowered (device "meta"), and have it now."""
        for p in () if self._have_memory else self._places:
            local = local_of(p)
            if (correction := self._correction(local)) is not None:
                correction.copy_(split(local.detach().float(), correction.dtype)[1])
        self._have_memory = True

    def __contains__(self, p: Tensor) -> bool:
        return p in self._places

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._places)

    @property
    def are_sharded(self) -> bool:
        """Return whether this process has shards of some of them."""
        return self._sharded is not None

    @property
    def _is_whole(self) -> bool:
        return self.format.dtype == torch.float32

    @torch.no_grad()
    def _store(self, p: Tensor, place: _Place, whole: Tensor, to_code: bool) -> None:
        gradient, p.grad = p.grad, None  # of an earlier fit, perhaps
        if self._is_whole:
            p.grad_dtype = torch.bfloat16
        elif to_code:
            become_int8(p)
        elif self.format.correction is None or not p.requires_grad:
            set_values(p, whole.detach().to(self.format.dtype))
        else:
            values, correction = split(whole.detach().float(), self.format.correction)
            set_values(p, values)
            place.owner.register_buffer(place.buffer, correction, persistent=False)
        if gradient is not None:
            p.grad = gradient.to(torch.bfloat16 if self._is_whole else self.format.dtype)

    def _correction(self, p: Tensor) -> Tensor | None:
        place = self._places[original(p)]
        correction: Tensor | None = getattr(place.owner, place.buffer, None)
        return correction if correction is None or p is undivided(p) else correction.view(-1)[span_of(p)].view(p.shape)

    def whole(self, p: Tensor) -> Tensor:
        """Return the weights of `p` in float32; a copy, unless they are float32 anyway."""
        if isinstance(coded := original(p), Int8):
            return coded.whole(_rows_of(p)).view(p.shape)
        return p.detach() if p.dtype == torch.float32 else join(p.detach(), self._correction(p))

    def write(self, p: Tensor, whole: Tensor, num_steps: int) -> None:
        """Round `whole` into `p`, or what stands in for a part of it, with the noise of step `num_steps`."""
        if p.dtype == torch.float32:
            return  # it has been changed in place
        if isinstance(coded := original(p), Int8):
            coded.write(whole.view(-1, *original(p).shape[1:]), self._seed_of(p, num_steps), _rows_of(p))
            return
        correction = self._correction(p)
        if correction is None:
            p.copy_(self.rounded(p, whole, num_steps))
        else:
            rounded, latest = split(whole, correction.dtype)
            p.copy_(rounded)
            correction.copy_(latest)

    def rounded(self, p: Tensor, whole: Tensor, num_steps: int, draw: int = 0) -> Tensor:
        """Return `whole`, of the size of `p` or its gradient, in 16 bits; `draw` tells several of one step apart."""
        seed = self._seed_of(p, num_steps)
        if draw:
            seed = mix(seed ^ draw)
        to_nearby = round_to_bfloat16 if self.format.dtype == torch.bfloat16 else round_to_float16
        found = to_nearby(whole.reshape(-1), seed)
        # Not finite: nothing to be exact about.
        if found is None:
            return whole.to(self.format.dtype)
        found = found.view(whole.shape)
        return found if whole.is_contiguous() else torch.empty_like(whole, dtype=found.dtype).copy_(found)

    def _seed_of(self, p: Tensor, num_steps: int) -> int:
        seed = mix(mix(mix(self._seed & 0xFFFFFFFF) ^ (num_steps & 0xFFFFFFFF)) ^ self._places[original(p)].index)
        if shard := shard_of(p):
            seed = mix(~seed & 0xFFFFFFFF ^ shard)
        if start := span_of(p).start:
            seed = mix(seed ^ start)
        return seed

    @property
    def may_step_fused(self) -> bool:
        """Return whether `short` says how weights are written."""
        may_round = self.format.correction in (None, torch.int8) and not self.format.has_codes
        return self.format.dtype == torch.bfloat16 and may_round

    def unit(self, p: Tensor) -> int:
        """Return how many elements of `p` must be written together: a row of codes, else one."""
        return original(p).shape[1:].numel() if isinstance(original(p), Int8) else 1

    def short(self, p: Tensor, num_steps: int) -> ShortWeights:
        """Return how a kernel writes `p` in step `num_steps`, with the same result as `write`."""
        correction = self._correction(p)
        return ShortWeights(correction, self._seed_of(p, num_steps) if correction is None else 0)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_float32(self) -> Iterator[None]:
        """Let the parameters be float32 while entered, for code that loads by their dtype: 4 bytes for each element."""
        for p in self._places:
            set_values(p, self.whole(local_of(p)))
        try:
            yield
        finally:
            for p in self._places:
                local = local_of(p)
                whole, correction = local.detach(), self._correction(local)
                if correction is None:
                    set_values(p, whole.to(self.format.dtype))
                else:
                    values, latest = split(whole, correction.dtype)
                    set_values(p, values)
                    correction.copy_(latest)
            self._renew_groups()

    @property
    def scaling_now(self) -> LossScaling | None:
        """Scaling of the loss; `None` as well after `restore`, when `scaling` is there for checkpoints alone."""
        return self.scaling if self._places else None

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their dtypes back, with the values that they have now."""
        for hook in self._hooks:
            hook.remove()
        for p, place in self._places.items():
            gradient, p.grad = p.grad, None
            has_correction = self._correction(p) is not None
            if isinstance(p, Int8):
                become_whole(p)
            set_values(p, self.whole(local_of(p)).to(place.was))
            if self._is_whole or p.grad_dtype != place.was:
                p.grad_dtype = place.was
            p.grad = None if gradient is None else gradient.to(place.was)
            if has_correction:
                delattr(place.owner, place.buffer)
        self._places.clear()
        self._renew_groups()
        self._sharded = None  # who holds these weights for a checkpoint does not hold the model

    def _renew_groups(self) -> None:
        if self._sharded is not None:
            renew_groups(self._sharded)


def _rows_of(p: Tensor) -> slice:
    """Return which rows of its original `p` stands for."""
    span = span_of(p)
    if span == slice(None):
        return span
    size = original(p).shape[1:].numel()
    return slice(span.start // size, span.stop // size)


def weights_kept_32bit(model: nn.Module, keep_32bit: tuple[Selector, ...]) -> set[Tensor]:
    """Return the parameters that stay float32: under FSDP2, which gathers parameters of one dtype, whole groups.

    A layer normalisation that is gathered with matrices has 16 bits as well, which autocast on CUDA bears.

    Raises:
        ValueError: a selector that matches no module; what has to stay float32 is gathered with other parameters.
    """
    kept = parameters_kept_32bit(model, keep_32bit)
    needed = {p for module in select("LowPrecision.keep_32bit", keep_32bit, model) for p in module.parameters()}
    batchnorms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    needed.update(p for module in batchnorms for p in module.parameters())
    for group in groups_of(model):
        trained = {p for p in group if p.requires_grad}
        if trained <= kept:
            continue
        if both := trained & needed:
            raise setting_error(
                "precision",
                "can keep a module in float32 where `fully_shard` is called for it, as FSDP2 gathers one dtype",
                next(name for name, p in model.named_parameters() if p in both),
                "Call `fully_shard` for this module by itself, before the one around it.",
            )
        kept -= trained
    return kept


def _places(model: nn.Module, dtype: torch.dtype, kept: set[Tensor], lower_frozen: bool) -> dict[Tensor, _Place]:
    places: dict[Tensor, _Place] = {}
    for owner in model.modules():
        for name, p in owner.named_parameters(recurse=False):
            # What is frozen may be moved by hand in steps that 16 bits do not show (a target network).
            is_wanted = (p.requires_grad or lower_frozen) and p not in kept
            if is_wanted and p.dtype in (torch.float32, dtype) and p not in places:
                places[p] = _Place(len(places), owner, f"_{name}_correction", p.dtype)
    if not places:
        raise setting_error(
            "precision", "needs float32 parameters", "none besides those that stay float32", "Use `precision=False`."
        )
    return places


def _check_range(name: str, p: Tensor) -> None:
    largest = torch.linalg.vector_norm(p.detach(), torch.inf) if p.numel() else p.new_zeros(())
    if not largest <= torch.finfo(torch.float16).max:
        raise setting_error(
            "precision",
            "can hold weights up to 65,504 in float16",
            f"{name} with {float(largest):g}",
            'Use `precision="bf16-sr"`.',
        )


# ------------------------------------------------------------------- state dicts hold what the weights are: float32
def _on_disk_whole(module: nn.Module, name: str, place: _Place) -> list[Any]:
    """Add hooks to the module that holds a parameter: its own state dict is then right as well as the whole model's."""
    where = (name, place.owner, place.buffer)  # the module's own buffer, but for tied weights
    return [
        module.register_state_dict_post_hook(functools.partial(_write_whole, *where)),
        module.register_load_state_dict_pre_hook(functools.partial(_read_whole, *where)),
    ]


def _write_decoded(name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    value = state_dict.get(prefix + name)
    if isinstance(value, Int8) and not isinstance(value, nn.Parameter):  # else variables were asked for
        state_dict[prefix + name] = value.decoded()


def _write_whole(
    name: str, owner: nn.Module, buffer: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    p, key = module.get_parameter(name), prefix + name
    if key in state_dict and p.dtype != torch.float32:
        state_dict[key] = as_sharded(join(as_local(p).detach(), owner.get_buffer(buffer)), p)


def _read_whole(
    name: str, owner: nn.Module, buffer: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object
) -> None:
    p, value, correction = module.get_parameter(name), state_dict.get(prefix + name), owner.get_buffer(buffer)
    local = as_local(value)
    is_ours = isinstance(local, Tensor) and local.shape == correction.shape and is_sharded(value) == is_sharded(p)
    if is_ours and p.dtype != torch.float32:
        values, latest = split(local.detach().to(correction.device, torch.float32), correction.dtype)
        state_dict[prefix + name] = as_sharded(values, p)
        correction.copy_(latest)
