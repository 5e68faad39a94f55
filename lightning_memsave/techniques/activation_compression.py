"""Activation compression: what autograd keeps for backward is kept in fewer bytes.

What shrinks: the activations between forward and backward, 95 % of a CNN's training memory; no module is touched.
Bytes per element of a float32 activation (4 in plain torch), and the loss class:

| codec        | B/element | loss class | what is kept                                                             |
|--------------|-----------|------------|--------------------------------------------------------------------------|
| "exact"      | 0 or 4    | exact      | nothing of a tensor that follows cheaply from what is kept anyway        |
| "bf16"       | 2         | (unbiased) | the value, stochastically rounded to bfloat16                            |
| "int8"       | 1.016     | (unbiased) | a code per element and a range per block of 256 or less, both rounded so |
| "int4"       | 0.516     | (unbiased) | that the mean of many draws is the value                                 |
| "int2"       | 0.266     | (unbiased) | the noise is large: see the page                                         |
| "int4-chain" | 0.531     | (unbiased) | "int4", and one code for the two tensors of normalisation + ReLU         |
| "offload"    | 0         | exact      | what the others leave goes to pinned host memory (CUDA) or to a file     |
| "rows-0.3"   | 1.2       | unbiased   | 30 % of the rows that a trained Linear reads (`saved_tensors.samples`)   |
| "topk-0.1"   | 0.525     | changed    | the largest tenth of what a trained Linear or convolution reads          |
| "fewbit-3"   | 0.375     | unbiased   | a level of an activation's derivative (`saved_tensors.derivative_levels`)|

(unbiased): every code is. The gradient is where each function that reads a code is linear in it, and none reads one
that another has read. With normalisations, attention and activations such as GELU (which keep a code of their
derivative, `saved_tensors.activation_derivatives`) it is *approximate*: the page says by how much. The report says
which it was, and which functions made it so. Blocks end where rows end (`saved_tensors.code_rows`), which takes 0.521
bytes instead of 0.516 in rows of 192, and 0.563 in rows of 64.

`"linear-cross-entropy"`, the one call that is rewritten, keeps no log-probabilities where the loss is a cross-entropy
on a Linear's output (`saved_tensors.linear_cross_entropy`; exact up to rounding).

With every codec, what needs less is kept in less, exactly: boolean and two-valued tensors (dropout's noise) as 1 bit, a
ReLU's output as 1 bit where nobody else needs it, a max-pool's argmax as 2 bits and its input as its shape, integers in
the narrowest type. Codecs combine: `("exact", "int4")` computes again what it can and codes the rest, and
`("rows-0.3", "int4")` codes the rows that are kept as well. Samples and levels hold where nobody else reads the values.

Only tensors of operations that bear noise are coded lossily (`saved_tensors.policy` is the table); softmax, losses,
statistics and custom functions keep every bit. What a normalisation reads has its noise bounded row by row
(`saved_tensors.norm_recompute`). The noise is measured in `benchmarks/memory_time/bench_activation_compression.py`.

Sources: Chen et al., "ActNN", 2021 (https://arxiv.org/abs/2104.14129); Liu et al., "GACT", 2022
(https://arxiv.org/abs/2206.11357) for activations of any network; Chen et al., 2016 (https://arxiv.org/abs/1604.06174),
section 4.2, for recomputing the cheap half. Different: one store for all of it, found from the autograd graph; bits per
module from a bound of the gradient's noise (`planner.codec_choice`); zeros survive coding, and which are positive.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.errors import check_unused, setting_error
from lightning_memsave.core.report import Applied, LossClass
from lightning_memsave.core.selection import is_scripted, is_selected
from lightning_memsave.core.units import format_bytes
from lightning_memsave.numerics.kbit import coded_bytes
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore, Tally
from lightning_memsave.saved_tensors.codec_names import (
    ALIASES,
    FEW_BITS,
    FIDELITIES,
    HEAD,
    KNOWN,
    LOSSY,
    explained,
    is_codec,
    sampling_of,
)
from lightning_memsave.saved_tensors.compiled_partitioner import CodePartitioner, Settings
from lightning_memsave.saved_tensors.deferred_logits import MIN_RATIO
from lightning_memsave.saved_tensors.offload import Offloader
from lightning_memsave.torch_internals.compiled_regions import NAME as COMPILED
from lightning_memsave.torch_internals.compiled_regions import call_within, compiled_regions, shield
from lightning_memsave.torch_internals.partitioning import compile_anew
from lightning_memsave.torch_internals.private_names import missing, require
from lightning_memsave.torch_internals.sharded_parameters import frees_weights


@dataclass(frozen=True, kw_only=True)
class ActivationCompression:
    """Settings of activation compression.

    Raises:
        ValueError: an unknown codec, two lossy ones, or a number out of its range.
    """

    codecs: tuple[str, ...] = ("exact",)
    """Any of `"exact"`, `"offload"`, `"linear-cross-entropy"`, and one of `"bf16"`, `"int8"`, `"int4"`, `"int2"`,
    `"int4-chain"`. Beside these or alone, one of `"topk-0.1"` and `"rows-0.3"`, with any fraction, and one of
    `"fewbit-1"` to `"fewbit-4"`. Papers' names stand for some of these: `"dropit"`, `"inplace-abn"`, `"inverted"`,
    `"mesa"`, `"tempo"`."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Codec by pattern (`*`, `?`) of a module's qualified name or class name, for what is kept inside it. The
    innermost module decides, and the first pattern that matches it: `{"head": "exact", "layers.0.*": "int8"}`."""
    operations: Mapping[str, str] = field(default_factory=dict)
    """Codec by name of a function, before the policy's table: `{"gelu": "int8", "sin": "int4"}`. The name of a custom
    autograd Function is not seen."""
    min_numel: int = 1024
    """Tensors with fewer elements are left alone."""
    seed: int = 0
    """Seed of the stochastic rounding, which never draws from torch's generators."""
    max_gradient_noise: float | None = None
    """Bound for the noise of a gradient: its root mean square over the gradient's norm. The codec of each module is
    then chosen from the first batch, down to the lossy one of `codecs`, for the fewest bytes. In a run of `MemSave`."""
    offload_folder: str | None = None
    """Folder where `"offload"` writes on CPU; the system's temporary folder by default. Not on a RAM disk."""

    def __post_init__(self) -> None:
        for codec in self.codecs:
            if not is_codec(codec):
                fractions = "with any fraction above 0, up to 1, after `topk-` and `rows-`"
                rule = f"must be among {', '.join(map(repr, KNOWN))}, {fractions}"
                raise setting_error("activations", rule, codec, _REMEDY)
        lossy = [codec for codec in self.written_out if codec in LOSSY]
        if not self.codecs or len(lossy) > 1 or len(set(self.codecs)) < len(self.codecs):
            raise setting_error("activations", "must name codecs once, and one lossy one at most", self.codecs, _REMEDY)
        for kind, names in (("`topk` and `rows`", self.samples), ("`fewbit`", self.few_bits)):
            if len(names) > 1:
                raise setting_error("activations", f"must have one codec at most of {kind}", names, _REMEDY)
        self._check_overrides()
        if self.min_numel < 1:
            raise setting_error(
                "ActivationCompression.min_numel", "must be a positive integer", self.min_numel, "The default is 1024."
            )
        self._check_noise()
        if "offload" not in self.written_out:
            check_unused(self, "offload_folder", 'the codec "offload"')
        if self.offload_folder is not None and not Path(self.offload_folder).is_dir():
            raise setting_error(
                "ActivationCompression.offload_folder", "must be an existing folder", self.offload_folder, "Create it."
            )

    def _check_noise(self) -> None:
        if (bound := self.max_gradient_noise) is None:
            return
        if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not 0 < bound < 1:
            rule = "must be above 0 and below 1: a part of the gradient's norm"
            raise setting_error("max_gradient_noise", rule, bound, "For example 0.05.")
        if not any(codec in FIDELITIES for codec in self.written_out if codec in LOSSY):
            rule = "needs one of the codecs 'bf16', 'int8', 'int4' and 'int2', down to which modules may go"
            raise setting_error("max_gradient_noise", rule, self.codecs, 'Use `activations=["exact", "int4"]`.')
        if self.modules or self.samples or self.few_bits:
            rule = "chooses the codecs of modules: nothing else may"
            chosen = self.modules or (*self.samples, *self.few_bits)
            raise setting_error("max_gradient_noise", rule, chosen, "Leave one of the two out.")

    def _check_overrides(self) -> None:
        for name in ("modules", "operations"):
            for key, codec in getattr(self, name).items():
                if codec not in FIDELITIES:
                    setting = f"ActivationCompression.{name}[{key!r}]"
                    raise setting_error(setting, f"must be one of {', '.join(map(repr, FIDELITIES))}", codec, _REMEDY)
        if unknown := [name for name in self.operations if not _is_function(name)]:
            rule = "must name functions of torch, torch.nn.functional or Tensor"
            raise setting_error("ActivationCompression.operations", rule, unknown[0], 'As in `{"gelu": "int8"}`.')

    @classmethod
    def from_shorthand(cls, value: object) -> ActivationCompression:
        """`activations="int4"`, `activations=["exact", "int4"]`; `True` means `"exact"`."""
        if value is True:
            return cls()
        names = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        return cls(codecs=names)

    @property
    def written_out(self) -> tuple[str, ...]:
        """The codecs, each once, and instead of papers' names what they stand for."""
        each = (ALIASES[codec].codecs if codec in ALIASES else (codec,) for codec in self.codecs)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(each)))

    @property
    def all_operations(self) -> dict[str, str]:
        """Codec by name of a function: what papers' names stand for, and `operations`, which go before these."""
        found: dict[str, str] = {}
        for codec in self.codecs:
            if codec in ALIASES:
                found.update(ALIASES[codec].operations)
        return {**found, **self.operations}

    @property
    def lossy(self) -> Fidelity:
        """What is enough for a tensor that may be noisy."""
        return next(
            (FIDELITIES[codec.removesuffix("-chain")] for codec in self.written_out if codec in LOSSY), Fidelity.EXACT
        )

    @property
    def samples(self) -> tuple[str, ...]:
        """Codecs that keep samples of what layers read."""
        return tuple(codec for codec in self.written_out if sampling_of(codec) is not None)

    @property
    def few_bits(self) -> tuple[str, ...]:
        """Codecs that keep levels of derivatives."""
        return tuple(codec for codec in self.written_out if codec in FEW_BITS)

    @property
    def has_codes(self) -> bool:
        """Whether values are coded, wherever that is."""
        named = (FIDELITIES[codec] for codec in (*self.modules.values(), *self.all_operations.values()))
        return min([self.lossy, *named]) < Fidelity.EXACT

    @property
    def is_exact(self) -> bool:
        """Whether no tensor is changed."""
        return not (self.has_codes or self.samples or self.few_bits)


def _is_function(name: str) -> bool:
    return any(hasattr(where, name) for where in (torch, F, Tensor))


_REMEDY = 'For example `activations="exact"` or `activations=["exact", "int4"]`.'


def estimate_activation_compression(num_elements: int, config: ActivationCompression, row: int | None = None) -> int:
    """Return bytes that a float32 activation of `num_elements` is kept in, where its operation bears noise.

    With `"topk-..."` and `"rows-..."`, where a Linear alone reads it.

    Args:
        num_elements: of the tensor.
        config: how it is kept.
        row: elements of each of its rows: its last dimension, or a plane of an image. One row by default.
    """
    if (sampling := next(map(sampling_of, config.samples), None)) is not None:
        without = replace(config, codecs=tuple(c for c in config.written_out if c not in config.samples) or ("exact",))
        if sampling.drops_small:
            num_kept = sampling.num_kept(num_elements)
            return estimate_activation_compression(num_kept, without) + -(-num_elements // 8)
        num_kept = sampling.num_kept(num_elements // (row or num_elements))
        return estimate_activation_compression(num_kept * (row or num_elements), without, row) + 4 * num_kept
    if config.lossy is Fidelity.EXACT:
        return 4 * num_elements
    if config.lossy is Fidelity.BF16:
        return 2 * num_elements
    return coded_bytes(num_elements, int(config.lossy.name.removeprefix("INT")), row=row)


# ---------------------------------------------------------------------------------------------------- on a module
_STORE = "_activation_store"


def apply_activation_compression(model: nn.Module, config: ActivationCompression) -> Applied:
    """Compress what `model`'s forward keeps for backward, in place.

    `state_dict`, types and `deepcopy` stay as they are. What the loss keeps, outside of the model, is not compressed.

    Raises:
        ValueError: applied twice, a pattern matches no module, or a codec does not work in compiled code.
    """
    if _STORE in model.__dict__:
        raise setting_error("activations", "must be applied once", type(model).__name__, "Call `.undo()` of the first.")
    store, applied = open_store(model, config)
    model.__dict__[_STORE] = scope = _Scope(store, model.__dict__.get("forward"))
    is_whole = any(module is model for _, module in compiled_regions(model))
    if is_whole:  # a scope that is opened in its `forward` would be compiled
        leave = call_within(model, store.scope)
    else:
        model.forward = types.MethodType(forward, model)
    close = applied.restore

    def restore() -> None:
        del model.__dict__[_STORE]
        if is_whole:
            leave()
        else:
            del model.forward
            if scope.previous_forward is not None:
                model.forward = scope.previous_forward
        close()

    applied.restore = restore
    return applied


class _Scope:
    """What a module with a store remembers. A copy of the module has a store of its own."""

    def __init__(self, store: SavedTensorStore, previous_forward: Callable[..., Any] | None) -> None:
        self.store, self.previous_forward = store, previous_forward


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module with a store.

    Named so that a pickled module finds its own class's method again.
    """
    scope: _Scope = self.__dict__[_STORE]
    original = scope.previous_forward or types.MethodType(type(self).forward, self)
    scope.store.weights_stay = not frees_weights(self)
    with scope.store.scope():
        return original(*args, **kwargs)


def open_store(model: nn.Module, config: ActivationCompression) -> tuple[SavedTensorStore, Applied]:
    """Return a store for what `model` computes, whose `scope()` the caller enters.

    Undoing takes its hooks off the model.

    Raises:
        ValueError: a pattern matches no module, or a codec does not work in compiled code.
    """
    require("autograd", "activations")
    if config.max_gradient_noise is not None:
        rule = "needs a run with the callback `MemSave`, whose first batch it is measured on"
        raise setting_error("max_gradient_noise", rule, config.max_gradient_noise, "Name a codec for `modules`.")
    _check_compiled(model, config)
    modules = _Modules(model, config)
    overrides = {name: FIDELITIES[codec] for name, codec in config.all_operations.items()}
    settings = Settings(config.lossy, overrides, modules.fidelities, config.min_numel)
    partitioner = None
    if config.has_codes and not missing("compiled codes"):
        partitioner = CodePartitioner(settings, modules.within, lambda: modules.region)
        compile_anew()
    store = SavedTensorStore(
        lossy=config.lossy,
        recompute="exact" in config.written_out,
        fuse="int4-chain" in config.written_out,
        chunk_loss=HEAD in config.written_out,
        overrides=overrides,
        sampling=next(map(sampling_of, config.samples), None),
        derivative_bits=next((int(codec[-1]) for codec in config.few_bits), None),
        min_numel=config.min_numel,
        seed=config.seed,
        offloader=Offloader(config.offload_folder) if "offload" in config.written_out else None,
        partitioner=partitioner,
    )

    @contextmanager
    def around(region: str) -> Iterator[None]:
        modules.region = region
        with store.unseen(COMPILED):
            yield

    removals = [*modules.add_hooks(store), *shield(model, around)]

    def restore() -> None:
        for remove in removals:
            remove()
        if partitioner is not None:
            compile_anew()

    return store, Applied(
        technique="activation_compression",
        summary=_named(config),
        loss_class=_worst_class(config),  # what it can be; `what_happened` says what it was
        reasons=() if config.is_exact else (_noise_of(config),),
        restore=restore,
    )


def _worst_class(config: ActivationCompression) -> LossClass:
    if any(codec.startswith("topk") for codec in config.samples):
        return "changed"
    return "exact" if config.is_exact else "approximate"


def _noise_of(config: ActivationCompression) -> str:
    return f"activations are kept with the noise of {_named(config)}"


def _named(config: ActivationCompression) -> str:
    return ", ".join(map(explained, config.codecs))


def what_happened(applied: Applied, config: ActivationCompression, store: SavedTensorStore) -> Applied:
    """Return `applied` as it turned out: what the latest forward pass kept, and the loss class of all of them."""
    tally, consequences = store.tally, store.consequences
    reasons = (_noise_of(config), *consequences.reasons) if consequences.is_there else ()
    summary, loss_class = summarize(config, tally), consequences.loss_class
    return replace(applied, summary=summary, loss_class=loss_class, reasons=reasons)


def summarize(config: ActivationCompression, tally: Tally) -> str:
    """Return one line on what a forward pass kept, and in how much."""
    codecs = _named(config)
    if not tally.plain_bytes:
        return codecs
    encodings = ", ".join(f"{count} {kind}" for kind, count in tally.entries.most_common())
    summary = f"{codecs}: {format_bytes(tally.plain_bytes)} kept in {format_bytes(tally.held_bytes)} ({encodings})"
    if tally.num_guarded:
        summary += (
            f"; {tally.num_guarded} of {tally.entries.total()} tensors keep more bits: a normalisation would multiply "
            "their noise"
        )
    return summary


class _Modules:
    """The codecs that hold inside of modules.

    Raises:
        ValueError: a pattern matches no module.
    """

    def __init__(self, model: nn.Module, config: ActivationCompression) -> None:
        self._model = model
        self.fidelities = {pattern: FIDELITIES[codec] for pattern, codec in config.modules.items()}
        self.region = ""
        """Name of the compiled module that is running."""
        unused = set(self.fidelities)
        for name, module in model.named_modules():
            unused.difference_update(p for p in self.fidelities if is_selected(p, name, module))
        if unused:
            known = ", ".join(sorted({type(m).__name__ for m in model.modules()}))
            raise setting_error(
                "ActivationCompression.modules",
                "must match modules",
                sorted(unused)[0],
                f"Classes in this model: {known}.",
            )

    def add_hooks(self, store: SavedTensorStore) -> list[Callable[[], None]]:
        """Tell the store of the modules of eager code; returns the ways back. Compiled code would trace hooks."""
        removals: list[Callable[[], None]] = []
        compiled = [name for name, _ in compiled_regions(self._model)]
        for name, module in self._model.named_modules():
            is_eager = not any(name == region or name.startswith(f"{region}.") or not region for region in compiled)
            fidelity = self._of(name, module)
            if fidelity is not None and is_eager and not is_scripted(module):  # which takes no hooks
                hooks = _Within(store, fidelity)
                removals.append(module.register_forward_pre_hook(hooks.enter, prepend=True).remove)
                removals.append(module.register_forward_hook(hooks.leave, always_call=True).remove)
        return removals

    def _of(self, name: str, module: nn.Module) -> Fidelity | None:
        return next((f for pattern, f in self.fidelities.items() if is_selected(pattern, name, module)), None)

    def within(self, path: str) -> Fidelity | None:
        """Return what holds in a module of the compiled region that is running, by its name there."""
        modules = dict(self._model.named_modules())
        for root in ((self.region,), (self.region, "_orig_mod")):  # `module.compile()`, `torch.compile(module)`
            name = ".".join(part for part in (*root, path) if part)
            if (module := modules.get(name)) is not None:
                return self._of(name, module)
        return None


@dataclass
class _Within:
    store: SavedTensorStore
    fidelity: Fidelity

    def enter(self, *_: object) -> None:
        self.store.within.append(self.fidelity)

    def leave(self, *_: object) -> None:
        self.store.within.pop()


def has_wide_head(model: nn.Module) -> bool:
    """Return whether `"linear-cross-entropy"` may save much: a layer in eager code has as many classes as a vocabulary.

    >>> has_wide_head(nn.Linear(64, 32_000)), has_wide_head(nn.Linear(2048, 1000))
    (True, False)
    """
    found = (m._parameters.get("weight") for m in model.modules() if isinstance(m, nn.Linear))  # none that is computed
    sizes = (weight.shape for weight in found if weight is not None and not is_lazy(weight))
    return any(n > max(MIN_RATIO * width, _FEW_CLASSES) for n, width in sizes) and not _compiled_most(model)


_FEW_CLASSES = 1000


def with_head(config: ActivationCompression, has_wide_head: bool = True) -> ActivationCompression:
    """Return settings in which a loss keeps no logits as well, where the model ends in many classes.

    >>> with_head(ActivationCompression(codecs=("exact", "int4"))).codecs
    ('exact', 'linear-cross-entropy', 'int4')
    """
    if not has_wide_head or HEAD in config.written_out:
        return config
    lossy = [codec for codec in config.codecs if codec in LOSSY]
    return replace(config, codecs=(*(codec for codec in config.codecs if codec not in LOSSY), HEAD, *lossy))


def _compiled_most(model: nn.Module) -> list[str]:
    """Return the names of compiled modules that hold most of a model's parameters."""
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    return [name for name, m in compiled_regions(model) if 2 * sum(p.numel() for p in m.parameters()) > total]


def _check_compiled(model: nn.Module, config: ActivationCompression) -> None:
    """Refuse, where most of a model is compiled, what works between calls that the compiler does not show."""
    most = _compiled_most(model)
    eager_only = {"offload", HEAD, *config.samples, *config.few_bits}
    if most and (codec := next((each for each in config.written_out if each in eager_only), None)):
        raise setting_error(
            "activations",
            f"cannot do {codec!r} in a whole model that is compiled",
            most[0] or type(model).__name__,
            'Use `activations="int8"` or "int4", or compile its blocks (`for block in blocks: block.compile()`).',
        )
