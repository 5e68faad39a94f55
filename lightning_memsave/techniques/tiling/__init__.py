"""Tiling: run a module on slices of its input, so that what it computes inside exists for one slice at a time.

What shrinks: what a module keeps between forward and backward, and what it needs while it runs: the hidden layers of an
MLP over a long sequence, the activations of an encoder over a large batch. Each slice is a checkpointed region, whose
input alone is kept. A module that keeps s bytes inside, and whose inputs and outputs take i, holds in k tiles:

| | plain | a region | k tiles |
|---|---|---|---|
| kept between forward and backward | s + i | i | i |
| at the peak, in forward and in backward | s + i | s + i | s / k + 2 i |

Cost: one more forward pass of the module; smaller kernels. Two dimensions are useful: 1, the positions of [B, T, D] (an
MLP treats them independently), and 0, the samples. Along samples, a loss that relates them (in-batch negatives, Dice,
mixup) sees all outputs at once, and only the encoder runs in parts, which microbatches cannot do.

Loss class: `exact`. A module is cut only where a test finds that it treats the entries of the dimension independently
(`independence`): on a few entries of the first input that it is given, and again when one of another kind comes; and
where the outputs of the whole call are those of its slices, whenever one is larger than all before. Sums of weight
gradients are made in another order, those of 16-bit weights in float32. Dropout has the masks of the plain step: they
are drawn once, whole, and kept as bits. Where that is not possible (fused attention and dropout kernels of GPUs), a
module that was named is cut nevertheless, and the loss class is `changed`.

Limitations: a test cannot tell a module that mixes entries for values which neither the test nor the first input has (a
threshold that later data pass). BatchNorm in training mode mixes samples and positions: modules with it are cut only
with `batchnorm="ghost"`, by statistics of each tile (`changed`). Evaluation is not cut.

Source: Bekman et al., "Arctic Long Sequence Training", 2025 (https://arxiv.org/abs/2506.13996), along positions; Gao,
Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021
(https://arxiv.org/abs/2101.06983), along samples, with two passes of the training step instead of regions. Different:
any module, tested instead of declared; one pass of the step; dropout's own masks.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_memsave.core.errors import NoEffectWarning, NotLosslessWarning, RefusedRegionError, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.core.selection import Selector, as_selectors, is_selected, scripted_in
from lightning_memsave.core.units import counted
from lightning_memsave.saved_tensors.kept_noise import is_in_tile
from lightning_memsave.saved_tensors.region_call import ChangesAttributeError, EditsInputError
from lightning_memsave.saved_tensors.region_members import Group, Member, Membership, bind, is_bound, unbind
from lightning_memsave.saved_tensors.tiles import Cut, are_cut, extent_of, lengths_of, run_in_tiles
from lightning_memsave.techniques.batchnorm import pooled_slices, pools_statistics
from lightning_memsave.techniques.tiling.call_watch import is_hooked
from lightning_memsave.techniques.tiling.independence import (
    Independence,
    differs_at_full_size,
    sizes_of,
    test_of,
)
from lightning_memsave.torch_internals.autograd_graph import is_inside_transform, version_of
from lightning_memsave.torch_internals.compiled_regions import compiled_regions
from lightning_memsave.torch_internals.fake_tensors import is_fake
from lightning_memsave.torch_internals.private_names import require
from lightning_memsave.torch_internals.sharded_parameters import has_shards_inside

TILES = "_tiles"
"""The attribute of a module in which it is remembered how its calls are cut; its `forward` is another one as well."""

_MOST_TILES, _MOST_KINDS = 16, 64
_DIMENSIONS = {"samples": 0, "positions": 1}


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Settings of tiling.

    Raises:
        ValueError: a dimension below 0, or a size below 1. In the first forward pass: a module that was named does not
            treat entries independently; the reason is given.
    """

    modules: Selector | Sequence[Selector] | None = None
    """Modules that are cut, the outermost of them: a class, a pattern (`*`, `?`) for class names or qualified names, a
    function of (name, module), or several. `None`: the outermost that pass the test, of those with modules inside."""
    dim: int | None = None
    """Dimension of the inputs that is cut: 0 for samples, 1 for positions of [B, T, D]. `None`: of these two the
    longer one, if the module passes the test along it, else the other one."""
    size: int | Literal["auto"] = "auto"
    """Entries of a tile, at most. `"auto"`: so many that what one tile keeps inside is no more than the module's input
    and output, or its weights and their gradients, take anyway; at most 16 tiles."""
    batchnorm: Literal["ghost"] | None = None
    """What becomes of modules with active BatchNorm, which mixes entries. `None`: they are not cut. `"ghost"`: each
    tile is normalised by its own statistics, which changes the result; the running statistics are updated once per
    call, by those of all tiles together. A tile then has two entries or more (of an odd number, one has a third). Not
    cut either are SyncBatchNorm and BatchNorm that keeps no running statistics."""

    def __post_init__(self) -> None:
        if self.dim is not None and (not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 0):
            raise setting_error("Tiling.dim", "must be the number of a dimension", self.dim, "Use 0 for samples.")
        is_size = isinstance(self.size, int) and not isinstance(self.size, bool) and self.size > 0
        if not is_size and self.size != "auto":
            raise setting_error("Tiling.size", 'must be a positive integer or "auto"', self.size, "For example 256.")
        if self.batchnorm and self.size == 1:
            raise setting_error("Tiling.size", 'must be 2 or more with `batchnorm="ghost"`', 1, "One has no variance.")
        if self.batchnorm not in ("ghost", None):
            rule = 'must be "ghost" or `None`'
            raise setting_error("Tiling.batchnorm", rule, self.batchnorm, "`None` leaves such modules whole.")
        for each in () if self.modules is None else as_selectors("Tiling.modules", self.modules):
            if isinstance(each, str) and len(each.split()) != 1:
                raise setting_error("Tiling.modules", "must be a pattern without blanks", each, 'For example "*MLP".')

    @classmethod
    def from_shorthand(cls, value: object) -> Tiling:
        """Return the settings of `tiling="samples"`, `"positions"`, `True`, or a pattern for modules (`"*MLP"`)."""
        if value is True:
            return cls()
        if isinstance(value, str) and value in _DIMENSIONS:
            return cls(dim=_DIMENSIONS[value])
        return cls(modules=value)  # type: ignore[arg-type]  # checked in __post_init__


def apply_tiling(model: nn.Module, config: Tiling) -> Applied:
    """Make modules of `model` run in tiles, in place, from the first call that passes the test on.

    No wrapper is added: `state_dict` keys, types and `deepcopy` stay as they are. What was cut, or why nothing was, is
    in `Applied.summary` after the first forward pass.

    Raises:
        ValueError: nothing matches, or a match runs in tiles already. In the first forward pass: a module that was
            named fails the test.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> applied = apply_tiling(nn.Sequential(model), Tiling(dim=0, size=16))
        >>> model(torch.randn(64, 8)).sum().backward()
        >>> applied.summary
        '1 module in tiles: 1 x Sequential, at most 16 samples'
    """
    return Tiles(model, config).applied


class Tiles:
    """The modules of a model that run in tiles, and what became of each.

    Args:
        model: the model; it is changed in place.
        config: which modules, and how.
        is_asked_for: whether the user did; then no effect is worth a warning.
        apart: what modules are tested in; an error that it raises in a call is a reason not to cut that.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Tiling,
        *,
        is_asked_for: bool = True,
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        require("autograd", "tiling")
        self.apart = apart
        self.config, self._is_asked_for = config, is_asked_for
        self._modules, self._model = dict(_selected(model, config)), model
        self.applied = Applied(technique="tiling", summary="no module has run yet", restore=self._restore)
        self._cut: dict[str, str] = {}
        self.largest = self.longest = 0
        """Entries of the largest tile so far, and of the longest call that was cut."""
        self._refused: dict[str, str] = {}
        self._has_warned = False
        for name, module in self._modules.items():
            if is_bound(module, forward):
                raise setting_error("tiling", "must be applied once", name, "Call `.undo()` of the first one.")
        for name, module in self._modules.items():
            bind(module, TILES, _TiledModule(name, module, self), forward)

    def _restore(self) -> None:
        for module in self._modules.values():
            unbind(module, TILES, forward)
        self._modules.clear()

    def is_compiled(self, name: str) -> bool:
        """Return whether the module of this name, or one around it or inside of it, is compiled."""
        paths = (each.split(".") if each else [] for each, _ in compiled_regions(self._model))
        own = name.split(".") if name else []
        return any(a == b for a, b in ((path[: len(own)], own[: len(path)]) for path in paths))

    def note(self, tiled: _TiledModule, found: Independence, dim: int, size: int | None, extent: int) -> None:
        """Note what the test of a module's call has found.

        Args:
            tiled: the module.
            found: by the test.
            dim: the dimension.
            size: entries of a tile; `None` where the call is not cut.
            extent: entries of the call.
        """
        if size is None:
            self._refused.setdefault(tiled.name, found.why_not)
            if not self._cut:
                self.applied.summary = f"no module in tiles: {'; '.join(self._reasons())}"
            return
        self.largest, self.longest = max(self.largest, size), max(self.longest, extent)
        self._cut[tiled.name] = f"{tiled.kind}, at most {_sized(size, dim)}"
        kinds = "; ".join(f"{count} x {text}" for text, count in Counter(self._cut.values()).items())
        self.applied.summary = f"{counted(len(self._cut), 'module')} in tiles: {kinds}"
        if found.draws is None:
            self.change(f"{tiled.name} ({tiled.kind}: other random numbers in tiles)")

    def change(self, reason: str) -> None:
        """Note why tiles change the result."""
        if reason in self.applied.reasons:
            return
        self.applied.loss_class, self.applied.reasons = "changed", (*self.applied.reasons, reason)
        if not self._is_asked_for:
            warnings.warn(
                f"Tiles change the result of this model: {reason}. `Microbatching(strict=True)` refuses instead.",
                NotLosslessWarning,
                stacklevel=2,
            )

    def batchnorms_in(self, module: nn.Module) -> list[nn.Module]:
        """Return what normalises tiles by statistics of their own."""
        return [each for each in module.modules() if pools_statistics(each)] if self.config.batchnorm else []

    def _reasons(self) -> Iterator[str]:
        for name, why_not in itertools.islice(self._refused.items(), 3):
            yield f"`{name}`: {why_not}"

    @property
    def cut(self) -> tuple[str, ...]:
        """The names of the modules that run in tiles."""
        return tuple(self._cut)

    @property
    def is_useless(self) -> bool:
        """Whether modules were tested, and none of them can be cut; a test that memory ran out in says nothing."""
        return bool(self._refused) and not self._cut

    @property
    def is_worth_telling(self) -> bool:
        """Whether modules run in tiles, or the user waits for an answer."""
        return self._is_asked_for or bool(self._cut)

    def warn_if_unused(self) -> None:
        """Warn where modules have run and none of them can be cut."""
        if self._is_asked_for and self.is_useless and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"tiling had no effect: no module treats {_in_words(self.config.dim)} independently, "
                f"{'; '.join(self._reasons())}. Name modules: `Tiling(modules=...)`.",
                NoEffectWarning,
                stacklevel=2,
            )


def _sized(size: int, dim: int) -> str:
    noun = {0: "sample", 1: "position"}.get(dim)
    return f"{size} {_in_words(dim)}" if noun is None else counted(size, noun)


def _in_words(dim: int | None) -> str:
    return {0: "samples", 1: "positions", None: "samples or positions"}.get(dim, f"entries of dimension {dim}")


def _selected(model: nn.Module, config: Tiling) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that were named, the outermost; without names, all that have modules inside and are called.

    Raises:
        ValueError: nothing matches, or a module that was named holds one of TorchScript, or weights that are gathered.
    """
    inside: set[nn.Module] = set()
    selectors = () if config.modules is None else as_selectors("Tiling.modules", config.modules)
    unused = list(selectors)
    for name, module in model.named_modules():
        if not name or getattr(type(module), "forward", None) is nn.Module.forward:  # a `ModuleList` is never called
            continue
        if config.modules is None:
            if any(module.children()) and scripted_in(module) is None and not has_shards_inside(module):
                yield name, module
            continue
        unused = [each for each in unused if not is_selected(each, name, module)]
        if module in inside or not any(is_selected(each, name, module) for each in selectors):
            continue
        if (scripted := scripted_in(module)) is not None:
            where = f"{name}.{scripted}".removesuffix(".")
            rule = "must not name what is or holds a TorchScript module"
            raise setting_error("Tiling.modules", rule, where, "Use the module that was scripted or traced.")
        if has_shards_inside(module):
            rule = "must not name what holds modules that gather their weights themselves (FSDP2), once for each tile"
            raise setting_error("Tiling.modules", rule, name, "Name these modules, or modules inside of them.")
        inside.update(module.modules())
        yield name, module
    if unused:
        kinds = ", ".join(sorted({type(m).__name__ for n, m in model.named_modules() if n and any(m.children())}))
        remedy = f"This model has: {kinds or 'no module with children'}. Name one of them."
        raise setting_error("Tiling.modules", "must match at least one module", unused[0], remedy)


class _TiledModule(Member):
    """What a module remembers of how its calls are cut.

    Args:
        name: of the module.
        module: it.
        tiles: hears what becomes of it.
    """

    def __init__(self, name: str, module: nn.Module, tiles: Tiles) -> None:
        super().__init__(name, [Membership(Group(1), 0)], module.__dict__.get("forward"))
        self.kind = type(module).__name__
        self._tiles = tiles
        self._known: dict[Any, tuple[int, Independence, int]] = {}
        """Dimension to cut, what a test along it has found, and the largest extent of a test, by kinds of calls."""
        self._refused = set[Any]()
        """Kinds of calls that stay whole, whatever buffers are: BatchNorm changes its own in each call."""
        self._least = 1  # entries of a tile

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler has no use for what is done here
    def cut_of(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Cut, int] | None:
        """Return how a call is cut, and into how many entries; `None` where it is not.

        Raises:
            ValueError: the module was named, and the call cannot be cut.
        """
        leaves, tree = tree_flatten((args, kwargs))
        needs = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in (*leaves, *module.parameters()))
        dims = self._dimensions(leaves)
        if not needs or not dims:
            return None
        norms = self._tiles.batchnorms_in(module)
        self._least = 2 if norms else 1
        of_arguments = repr(tree), tuple(map(_kind, leaves)), *(tuple(are_cut(leaves, dim)) for dim in dims)
        kind = *map(_mode, module.modules()), tuple(dims), of_arguments
        if kind in self._refused:
            return None
        running = {id(buffer) for norm in norms for buffer in norm.buffers()}
        kind = *kind, tuple(version_of(buffer) for buffer in module.buffers() if id(buffer) not in running)
        if kind not in self._known:
            if len(self._known) > _MOST_KINDS:
                self._known.clear()
            with _testing(norms):
                self._known[kind] = self._learn(module, args, kwargs, leaves, dims)
        dim, found, tested = self._known[kind]
        extent = extent_of(leaves, dim)
        if found.why_not and len(self._refused) <= _MOST_KINDS:
            self._refused.add(kind[:-1])
        if found.why_not or (size := self._size(module, found, extent)) >= extent:
            return None
        if extent > tested:
            with _testing(norms):
                found = self._at_full_size(found, module, args, kwargs, dim, extent)
            self._known[kind] = dim, found, extent
            if found.why_not:
                return None
        if norms:
            self._tiles.change(f"{self.name} ({self.kind}: BatchNorm's statistics of each tile)")
        return Cut(dim, found.draws, found.orders), size

    def _at_full_size(
        self, found: Independence, module: nn.Module, args: Any, kwargs: Any, dim: int, extent: int
    ) -> Independence:
        """Return what was found, or why the call of all entries is another one in tiles."""
        size = self._size(module, found, extent)
        if size >= extent:
            return found
        lengths = lengths_of(extent, size)
        with self._tiles.apart():
            why_not = differs_at_full_size(self.forward_of(module), module, args, kwargs, dim, lengths)
        return replace(found, why_not=why_not)

    def _dimensions(self, leaves: list[Any]) -> list[int]:
        """Return the dimensions that may be cut, the longest first."""
        dims = [0, 1] if self._tiles.config.dim is None else [self._tiles.config.dim]
        return sorted((dim for dim in dims if extent_of(leaves, dim) > 1), key=lambda dim: -extent_of(leaves, dim))

    def _learn(
        self, module: nn.Module, args: Any, kwargs: Any, leaves: list[Any], dims: list[int]
    ) -> tuple[int, Independence, int]:
        """Test a call of a new kind.

        Raises:
            ValueError: the module was named, no call of it was cut so far, and this one cannot be.
        """
        is_named = self._tiles.config.modules is not None
        function, found = self.forward_of(module), Independence(why_not="it was not tested")
        if any(isinstance(leaf, Tensor) and is_fake(leaf) for leaf in leaves):
            if is_named and len(dims) == 1:  # it is taken at the user's word; a run would refuse it
                found, extent = sizes_of(function, module, args, kwargs, dims[0]), extent_of(leaves, dims[0])
                self._tiles.note(self, found, dims[0], self._size(module, found, extent), extent)
                return dims[0], found, extent
            next(leaf for leaf in leaves if isinstance(leaf, Tensor)).flatten()[0].item()  # raises: values are needed
        reasons: list[str] = []
        for dim in dims:
            with self._tiles.apart():
                found = test_of(function, module, args, kwargs, dim)
            if found.draws and self._tiles.is_compiled(self.name):  # its code draws by itself
                found = replace(found, draws=None)
            if not found.why_not and found.draws is None and not is_named:
                found = Independence(why_not="its random numbers would be others in tiles")
            if not found.why_not:
                found = self._at_full_size(found, module, args, kwargs, dim, extent_of(leaves, dim))
            if not found.why_not:
                extent = extent_of(leaves, dim)
                self._tiles.note(self, found, dim, self._size(module, found, extent), extent)
                return dim, found, extent
            reasons.append(found.why_not)
        was_cut = any(not known.why_not for _, known, _ in self._known.values())
        if is_named and not was_cut:
            raise setting_error(
                "Tiling.modules",
                f"must name modules that treat {_in_words(self._tiles.config.dim)} independently, and of this one "
                f"{', and '.join(dict.fromkeys(reasons))}",
                f"`{self.name}` ({self.kind})",
                "Leave it out, or name modules inside of it.",
            )
        self._tiles.note(self, found, dims[-1], None, extent_of(leaves, dims[-1]))
        return dims[-1], found, extent_of(leaves, dims[-1])

    def _size(self, module: nn.Module, found: Independence, extent: int) -> int:
        """Return entries of a tile."""
        least = -(-extent // max(1, extent // self._least))
        if self._tiles.config.size != "auto":
            return max(least, self._tiles.config.size)
        weights = [p for p in module.parameters() if p.requires_grad]
        there_anyway = max(extent * found.edge_bytes, 2.0 * sum(p.numel() * p.element_size() for p in weights), 1.0)
        num_tiles = min(-(-extent * found.inside_bytes // there_anyway), _MOST_TILES)
        return max(least, -(-extent // max(1, int(num_tiles))))


@contextlib.contextmanager
def _testing(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Have BatchNorms normalise by running statistics, with which they mix nothing.

    Under this stance, a compiled region that is met first by a test does not stay eager for ever.
    """
    for norm in norms:
        norm.training = False
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for norm in norms:
            norm.training = True


def _mode(module: nn.Module) -> tuple[bool, bool, bool]:
    """Return what decides how a layer normalises, and whether it drops out; and whether it is hooked."""
    return module.training, getattr(module, "track_running_stats", False), is_hooked(module)


def _kind(leaf: Any) -> Any:
    """Return what an argument has in common with others for which one test holds: all but its sizes."""
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, (bool, int, float, str, type(None), torch.dtype)) else type(leaf)
    return leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad, is_fake(leaf)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # what is inside may still be compiled
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module in tiles; named so that a pickled module finds its own class's method again."""
    tiled: _TiledModule = self.__dict__[TILES]
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # untyped in torch
    if not torch.is_grad_enabled() or is_traced or is_inside_transform() or is_in_tile():
        return tiled.forward_of(self)(*args, **kwargs)
    found = tiled.cut_of(self, args, kwargs)
    if found is None:
        return tiled.forward_of(self)(*args, **kwargs)
    cut, size = found
    try:
        with pooled_slices(self) as batchnorm:
            return run_in_tiles(tiled, self, args, kwargs, cut, size, batchnorm.microbatch)
    except EditsInputError as error:
        raise _refusal(tiled, "edits its input in place") from error
    except ChangesAttributeError as error:
        raise _refusal(tiled, f"changes its attribute `{error.attribute}`") from error


def _refusal(tiled: _TiledModule, what: str) -> ValueError:
    error = setting_error(
        "tiling",
        f"must not select a module that {what}, as its forward runs for every tile, and again",
        f"`{tiled.name}` ({tiled.kind})",
        "Name other modules: `Tiling(modules=...)`.",
    )
    return RefusedRegionError(*error.args)
