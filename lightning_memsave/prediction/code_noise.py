"""What codes of activations do to a gradient, site by site: measured on a copy of the module, before training.

One forward pass for each codec shows which modules share what they keep (a *site*, `planner.codec_choice`), and in how
many bytes. Then a step is taken for each site and codec in which this site alone is coded. From the same weights,
samples and random numbers its gradient differs from the exact one by the noise of the site's codes. Codes of different
samples are rounded independently, so the noise of a mean over B samples follows from that of a few: its mean square is
smaller by the ratio of the numbers. That makes the measurement cheap: the steps use so few samples that all together
take about four times as long as a whole one, where the batch has enough of them. A batch that cannot be cut is taken
whole.

Stochastic rounding between levels at a distance d has a variance in proportion to d^2. So 8 bits, with a distance of
1/17 of that of 4 bits, are not measured: their noise has 1/289 of the mean square.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.selection import is_scripted
from lightning_memsave.lightning_compat import Batch, is_compiled
from lightning_memsave.planner.codec_choice import CODECS, EXACT, Codecs, CodeSite, CodeSites, in_words
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.dry_run import DoneError
from lightning_memsave.prediction.real_run import OneStep, Trial
from lightning_memsave.prediction.simulated_process_group import with_layers
from lightning_memsave.saved_tensors import SavedTensorStore
from lightning_memsave.saved_tensors.encodings import Recompute
from lightning_memsave.saved_tensors.randomness import Randomness
from lightning_memsave.saved_tensors.saved_storage import SavedStorage, SavedTensor, kept_bytes
from lightning_memsave.techniques.activation_compression import ActivationCompression, open_store
from lightning_memsave.techniques.microbatching import UnsplittableBatchError, batch_size
from lightning_memsave.techniques.microbatching.split import even_sizes, take
from lightning_memsave.torch_internals.autograd_graph import Kept
from lightning_memsave.torch_internals.compiled_regions import compiled_regions

_FEW = 8  # samples of the first passes, and of all where normalisations take statistics over the batch
_WHOLE_STEPS = 4  # that the measurements of all sites may take as long as
_MORE, _MANY, _NUM_DRAWS = 4, 16, 3  # the noise of all codes together: times as many samples, at least these; draws
_MOST_TRIED, _LESS = 4, 0.97  # choices, each for less noise than the bound, where the one before had more
_INT8_OF_INT4 = (15 / 255) ** 2  # ratio of the mean squares of their noise
_REPEATS = 1e-3
"""Relative difference of two gradients of one step from which on they are not taken for the same step."""
_REMEDY = "Leave it out."
Loss = Callable[[int, int], Tensor]
"""Runs a forward pass of the samples from a first number up to another; returns the loss."""


class CodeNoise:
    """The noise of codes in the gradient of one module's first batch.

    Args:
        module: is copied, not changed.
        batch: its first, on the CPU.
        config: what else is set; its lossy codec is the least faithful one that may be chosen.
        trainer: whose device and precision are taken; `None`: defaults.
        stays_whole: whether the batch is not to be cut into samples.

    Raises:
        ValueError: manual optimization, or a compiled module. When asked: a step that differs when it is repeated, or
            fails, or for which there is no memory.
    """

    def __init__(
        self,
        module: L.LightningModule,
        batch: Batch,
        config: ActivationCompression,
        trainer: L.Trainer | None = None,
        stays_whole: bool = False,
    ) -> None:
        _refuse(module)
        self._module, self._batch, self._trainer = module, batch, trainer
        self._stays_whole = stays_whole
        self._config = replace(config, max_gradient_noise=None)
        self._num_samples, self._num_used = 1, _FEW
        self._gradient_squares: dict[int, float] = {}
        self._within: dict[float, BoundedCodes] = {}

    @cached_property
    def sites(self) -> CodeSites:
        """What each codec keeps and does, site by site."""
        sites: CodeSites
        sites, self._num_samples, self._num_used = self._on_copy(self._num_used, lambda meter: meter.sites())
        return sites

    def measured(self, codecs: Codecs) -> float:
        """Return the noise of a choice, all its codes together: root mean square, over the gradient's norm.

        With more samples than the sites were measured with, as many as there is memory for.
        """
        sites = self.sites
        num_used = min(self._num_samples, max(_MANY, _MORE * self._num_used))
        while True:
            try:
                return math.sqrt(self._on_copy(num_used, lambda meter: meter.noise(sites, codecs)))
            except NoRoomError:
                if num_used <= self._num_used:
                    raise
                num_used = max(self._num_used, num_used // 2)

    def within(self, max_noise: float) -> BoundedCodes:
        """Return the settings that keep the fewest bytes with at most that noise.

        Raises:
            ValueError: as `CodeNoise`; or codes have more noise together than each alone lets expect.
        """
        if max_noise not in self._within:
            self._within[max_noise] = self._found_within(max_noise)
        return self._within[max_noise]

    def expected_within(self, max_noise: float) -> ActivationCompression:
        """Return the same settings as far as the sites alone tell: the noise of all together is not measured.

        Raises:
            ValueError: as `CodeNoise`.
        """
        if max_noise in self._within:
            return self._within[max_noise].config
        return self._as_config(self.sites.fewest_bytes(max_noise))

    def _as_config(self, codecs: Codecs) -> ActivationCompression:
        classes = classes_in(with_layers(self._module, self._trainer))
        return self.sites.as_config(codecs, self._config, classes)

    def _found_within(self, max_noise: float) -> BoundedCodes:
        allowed = max_noise
        for _ in range(_MOST_TRIED):
            codecs = self.sites.fewest_bytes(allowed)
            noise = self.measured(codecs)
            if noise <= max_noise:
                return BoundedCodes(self._as_config(codecs), noise, in_words(codecs))
            allowed *= _LESS * max_noise / noise
        rule = f"is exceeded by codes that should keep it: {noise:.3g} was measured"
        raise setting_error("max_gradient_noise", rule, max_noise, 'Name a codec: `activations=["exact", "int8"]`.')

    def _on_copy(self, num_used: int, measure: Callable[[_Meter], Any]) -> Any:
        """Measure in all processes; what rank 0 finds holds, as the steps may wait for each other."""
        found: Any
        try:
            found = self._in_this_process(num_used, measure)
        except ValueError as error:
            found = error
        if self._trainer is not None and self._trainer.world_size > 1:
            found = self._trainer.strategy.broadcast(found)
        if isinstance(found, ValueError):
            raise found
        return found

    def _in_this_process(self, num_used: int, measure: Callable[[_Meter], Any]) -> Any:
        def measured(model: nn.Module, loss: Loss, num_samples: int) -> Any:
            used = min(num_used, num_samples)
            meter = _Meter(model, loss, num_samples, self._config, used, self._gradient_squares)
            return measure(meter)

        probe = _Probe(measured, self._stays_whole)
        if not Trial(self._module, self._batch, self._trainer).run(probe):
            raise NoRoomError(f"`max_gradient_noise` needs memory for {num_used} samples without codes. {_REMEDY}")
        return probe.result


def classes_in(module: nn.Module) -> dict[str, str]:
    """Return the names of all modules, parents first, with those of their classes."""
    return {name: type(each).__name__ for name, each in module.named_modules()}


class NoRoomError(ValueError):
    """Memory ran out in a measurement."""


class BoundedCodes(NamedTuple):
    """Codecs by module, chosen for a bound of noise."""

    config: ActivationCompression
    noise: float | None = None
    """Root mean square of a gradient's noise, over the gradient's norm; `None` where it was not measured."""
    codecs: str = ""
    """How many sites have which codec."""

    def __str__(self) -> str:
        """Return what was chosen, for people."""
        noise = "" if self.noise is None else f", noise of a gradient {self.noise:.1%} on the first batch"
        return f"activations in {self.codecs or self.config.codecs[-1]}{noise}"


def _refuse(module: L.LightningModule) -> None:
    why = ""
    if not isinstance(module, nn.Module) or any(map(is_lazy, module.parameters())):
        why = "a module whose parameters are there"
    elif not module.automatic_optimization:
        why = "automatic optimization: under manual optimization no step hands its gradients out"
    elif compiled := [*([""] if is_compiled(module) else []), *(name for name, _ in compiled_regions(module))]:
        why = f"eager code: nobody sees what `{compiled[0] or type(module).__name__}` keeps, which is compiled"
    if why:
        raise setting_error("max_gradient_noise", f"needs {why}", type(module).__name__, _REMEDY)


class _Probe(OneStep):
    """Measures where a fit calls `training_step` for the first time, and ends it.

    Args:
        measure: takes the model, its loss and the number of samples.
        stays_whole: whether the batch is not to be cut.
    """

    def __init__(self, measure: Callable[[nn.Module, Loss, int], Any], stays_whole: bool) -> None:
        super().__init__(Recipe("measure"))
        self._measure, self._stays_whole = measure, stays_whole
        self.result: Any = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Put the measurement in the place of the step."""
        step, device_type = pl_module.training_step, trainer.strategy.root_device.type
        for name in ("log", "log_dict"):  # of this copy
            setattr(pl_module, name, lambda *_, **__: None)

        @functools.wraps(step)  # Lightning looks at the arguments that it takes
        def measured(batch: Batch, *others: Any) -> None:
            num_samples = 1
            with contextlib.suppress(UnsplittableBatchError):
                num_samples = 1 if self._stays_whole else batch_size(batch)

            def loss(start: int, stop: int) -> Tensor:
                part = batch if stop - start == num_samples else take(batch, start, stop, num_samples)
                with trainer.precision_plugin.train_step_context():
                    found: Any = step(part, *others)
                found = found.get("loss") if isinstance(found, dict) else found
                if not isinstance(found, Tensor):
                    raise setting_error("max_gradient_noise", "needs a `training_step` with a loss", found, _REMEDY)
                return found

            with torch.autocast(device_type, enabled=False):  # in backward
                self.result = self._measure(pl_module, loss, num_samples)
            raise DoneError

        setattr(pl_module, "training_step", measured)  # noqa: B010  # mypy takes it for a method


class _Read(NamedTuple):
    """An entry of the store, and the modules that read it or what it is computed from."""

    entry: SavedStorage
    modules: set[str]

    @property
    def binds(self) -> bool:
        """Whether the codec of one of these modules is that of all of them."""
        return self.entry.is_lossy or isinstance(self.entry.encoding, Recompute)


class _Meter:
    """Takes steps with some of the sites coded.

    Args:
        model: whose parameters get gradients.
        loss: of some of its samples.
        num_samples: of the batch.
        config: as for `CodeNoise`.
        num_used: samples of a step.
        gradient_squares: squared norms of the whole batch's gradient in steps of so many samples, as far as known.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        num_samples: int,
        config: ActivationCompression,
        num_used: int,
        gradient_squares: dict[int, float],
    ) -> None:
        self._gradient_squares = gradient_squares
        self._model, self._loss, self._num_samples, self._num_used = model, loss, num_samples, num_used
        lossiest = config.lossy.name.lower()
        self._codecs = (EXACT, "bf16") if lossiest == "bf16" else tuple(c for c in CODECS if c != "bf16")
        self._codecs = self._codecs[: self._codecs.index(lossiest) + 1]
        self._config = replace(config, min_numel=max(1, config.min_numel * num_used // num_samples))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._random = Randomness({p.device for p in self._parameters})
        self._names = classes_in(model)

    def sites(self) -> tuple[CodeSites, int, int]:
        """Find the sites and measure the noise of each codec in each.

        Returns:
            The sites, the number of samples of the batch, and how many were used.
        """
        found = self._found()
        measured = [codec for codec in self._codecs[1:] if codec != "int8" or "int4" not in self._codecs]
        least = _FEW if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._model.modules()) else 1
        affordable = self._num_samples * _WHOLE_STEPS // max(1, len(found) * len(measured))
        self._num_used = min(self._num_samples, max(least, affordable))
        sites, (few, size) = CodeSites(tuple(found)), self._plain()
        for number, site in enumerate(found):
            noise = {EXACT: 0.0}
            for codec in measured:
                only = tuple(codec if i == number else EXACT for i in range(len(found)))
                noise[codec] = self._squared_distance(sites, only, few) / size
            if "int8" not in noise and "int4" in noise:
                is_same = site.kept_bytes["int8"] == site.kept_bytes["int4"]  # attention takes 8 bits in any case
                noise["int8"] = noise["int4"] * (1 if is_same else _INT8_OF_INT4)
            found[number] = replace(site, noise=noise)
        return CodeSites(tuple(found)), self._num_samples, self._num_used

    def noise(self, sites: CodeSites, codecs: Codecs) -> float:
        """Return the mean square of the noise of all codes together, over that of the gradient."""
        few, size = self._plain()
        draws = [self._squared_distance(sites, codecs, few, draw) for draw in range(_NUM_DRAWS)]
        return sum(draws) / len(draws) / size

    # ------------------------------------------------------------------------------- steps
    def _plain(self) -> tuple[list[Tensor], float]:
        """Return the gradients of the first few samples, and what the noise in them is to be divided by.

        That is the squared norm of the whole batch's gradient, times how many times as many samples it has: the noise
        of its mean is smaller by as much.
        """
        few = self._gradients(nullcontext)
        if _squared(few, self._gradients(nullcontext)) > _REPEATS**2 * _squared(few):
            rule = "needs a step that is the same when it is repeated with the same weights and random numbers"
            raise setting_error("max_gradient_noise", rule, type(self._model).__name__, _REMEDY)
        if (square := self._gradient_squares.get(self._num_used)) is None:
            total = [torch.zeros_like(gradient) for gradient in few]
            sizes = even_sizes(self._num_samples, self._num_used)
            for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True):
                torch._foreach_add_(total, self._gradients(nullcontext, stop - size, size))
            square = self._gradient_squares[self._num_used] = _squared(total) / len(sizes) ** 2
        if not 0 < square < math.inf:
            rule = "needs a first batch whose gradient is finite and not zero"
            raise setting_error("max_gradient_noise", rule, math.sqrt(square), _REMEDY)
        return few, square * self._num_samples / self._num_used

    def _squared_distance(self, sites: CodeSites, codecs: Codecs, plain: list[Tensor], draw: int = 0) -> float:
        with self._opened(sites.as_config(codecs, self._config, self._names)) as store:
            store.draw_for(draw)
            return _squared(self._gradients(store.scope), plain)

    @contextmanager
    def _opened(self, config: ActivationCompression) -> Iterator[SavedTensorStore]:
        store, applied = open_store(self._model, config)
        try:
            yield store
        finally:
            applied.undo()

    def _gradients(
        self, scope: Callable[[], AbstractContextManager[Any]], start: int = 0, size: int | None = None
    ) -> list[Tensor]:
        self._forward(scope, start, size or self._num_used).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]

    def _forward(self, scope: Callable[[], AbstractContextManager[Any]], start: int, size: int) -> Tensor:
        """Return the loss of a step that begins as every other: no gradients, the same buffers and random numbers."""
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._random.restore()
        with torch.enable_grad(), scope():
            return self._loss(start, start + size)

    # ------------------------------------------------------------------------------- sites
    def _found(self) -> list[CodeSite]:
        """Return the sites whose bytes depend on the codec, without their noise."""
        reads = {codec: self._reads(codec) for codec in self._codecs}
        binding = [read.modules for found in reads.values() for read in found if read.binds]
        groups = _joined([*binding, *({name} for name in self._names)])
        order = {name: number for number, name in enumerate(self._names)}
        sites = []
        for group in sorted(groups, key=lambda group: min(map(order.__getitem__, group))):
            sizes = {
                codec: kept_bytes([read.entry for read in found if read.modules <= group])
                for codec, found in reads.items()
            }
            if len(set(sizes.values())) > 1:
                in_order = tuple(sorted(group, key=order.__getitem__))
                whole = {codec: size * self._num_samples // self._num_used for codec, size in sizes.items()}
                sites.append(CodeSite(modules=in_order, kept_bytes=whole, noise={}))
        return sites

    def _reads(self, codec: str) -> list[_Read]:
        """Return what one forward pass keeps, with all sites in one codec."""
        others = [each for each in self._config.written_out if each not in CODECS]
        codecs, operations = tuple(dict.fromkeys([EXACT, *others, codec])), self._config.all_operations
        config = replace(self._config, codecs=codecs, modules={}, operations=operations)
        with self._opened(config) as store, _Readers(self._model, store) as readers:
            loss = self._forward(readers.scope, 0, self._num_used)
            found = {entry: set(names) for entry, names in readers.of.items()}
            del loss
        for entry, names in found.items():
            needs = entry.encoding.needs if isinstance(entry.encoding, Recompute) else ()
            for need in needs:
                if isinstance(need, SavedTensor) and need.entry in found:
                    names |= found[need.entry]
        return [_Read(entry, names) for entry, names in found.items()]


class _Readers:
    """Notes which module keeps which entries."""

    def __init__(self, model: nn.Module, store: SavedTensorStore) -> None:
        self._model, self._store = model, store
        self._running = [""]
        self.of: dict[SavedStorage, set[str]] = {}
        """The innermost modules that were running when an entry was kept, by qualified name."""

    def __enter__(self) -> _Readers:
        self._hooks = []
        for name, module in self._model.named_modules():
            if name and not is_scripted(module):  # which takes no hooks
                enter, leave = self._entering(name), self._leaving
                self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
                self._hooks.append(module.register_forward_hook(leave, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def scope(self) -> AbstractContextManager[None]:
        """Open the store."""
        return self._store.scope(self._pack)

    def _pack(self, tensor: Tensor) -> Kept:
        kept = self._store.pack(tensor)
        if isinstance(kept, SavedTensor):
            self.of.setdefault(kept.entry, set()).add(self._running[-1])
        return kept

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._running.append(name)

    def _leaving(self, *_: object) -> None:
        self._running.pop()


def _joined(groups: list[set[str]]) -> list[set[str]]:
    """Return the groups, those that share a member as one.

    >>> [sorted(group) for group in _joined([{"a", "b"}, {"c"}, {"d", "b"}])]
    [['c'], ['a', 'b', 'd']]
    """
    found: list[set[str]] = []
    for group in groups:
        touching = [each for each in found if each & group]
        found = [*(each for each in found if not each & group), group.union(*touching)]
    return found


def _squared(tensors: list[Tensor], others: list[Tensor] | None = None) -> float:
    """Return the squared norm of some tensors, or of their difference from others."""
    differences = tensors if others is None else torch._foreach_sub(tensors, others)
    return float(sum(each.double().square().sum() for each in differences))
