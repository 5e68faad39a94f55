"""Checkpointing: keep a block's input, forget what it computed, compute it again when backward needs it.

What shrinks: of each region only its inputs stay (for a residual block, one tensor instead of all it saves); during
backward one region at a time is whole again. Peak of the activations: the sum of region inputs plus the largest region.
Cost: at most one extra forward, about a third of the step's arithmetic; torch's early stop skips what follows the last
tensor that backward needs.

Loss class: `exact`. The recomputed forward sees the same random numbers (torch's own checkpoint keeps the generator
state) and the same buffers: every buffer that a region changes is cloned before its forward and put in place for the
recomputation, so BatchNorm's running statistics are updated once, and spectral norm iterates once. torch's checkpoint
alone updates them twice (https://github.com/pytorch/pytorch/issues/96136).

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016
(https://arxiv.org/abs/1604.06174); the recomputation itself is `torch.utils.checkpoint` (non-reentrant).
Different: regions are chosen by name or class, not by the paper's segmentation; buffers are handled as said.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied

METHODS = ("blocks",)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_REGION = "_checkpoint_region"


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Settings of checkpointing.

    Raises:
        ValueError: an unknown method; at the start of training, a selection that matches no module.
    """

    method: Literal["blocks"] = "blocks"
    """`"blocks"`: each selected module is a region of its own."""
    modules: str | type[nn.Module] | Callable[[str, nn.Module], bool] | None = None
    """Which modules: a class, a pattern (`*`, `?`) for class names or qualified names, a function of (name, module),
    or `None` for the model's own repeated blocks."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise setting_error(
                "checkpointing",
                f"must be one of {', '.join(map(repr, METHODS))}",
                self.method,
                "To name modules by class or pattern use `Checkpointing(modules=...)`.",
            )

    @classmethod
    def from_shorthand(cls, value: object) -> Checkpointing:
        """`checkpointing="blocks"` is `Checkpointing(method="blocks")`; `True` means the same."""
        return cls(method="blocks" if value is True else value)  # type: ignore[arg-type]  # checked in __post_init__


def apply_checkpointing(model: nn.Module, config: Checkpointing) -> Applied:
    """Make the selected modules of `model` checkpoint regions, in place.

    No wrapper is added: `state_dict` keys, types and `deepcopy` stay as they are.

    Raises:
        ValueError: nothing matches, or a match is a region already.
    """
    regions = select_regions(model, config)
    for name, module in regions:
        if _REGION in module.__dict__:
            raise setting_error("checkpointing", "must be applied once", name, "Call `.undo()` of the first one.")
    for _, module in regions:
        _make_region(module)

    def restore() -> None:
        for _, module in regions:
            _unmake_region(module)

    kinds = Counter(type(module).__name__ for _, module in regions)
    return Applied(
        technique="checkpointing",
        summary=f"{len(regions)} regions: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        restore=restore,
    )


# ---------------------------------------------------------------------------------------------------- selection
def select_regions(model: nn.Module, config: Checkpointing) -> list[tuple[str, nn.Module]]:
    """The outermost modules that `config` selects, with their names.

    Raises:
        ValueError: nothing matches; the message lists what there is.
    """
    if config.modules is None:
        regions = repeated_blocks(model)
    else:
        regions = _outermost([(n, m) for n, m in model.named_modules() if n and _matches(config.modules, n, m)])
    if not regions:
        there_is = Counter(type(m).__name__ for n, m in model.named_modules() if n and any(m.children()))
        blocks = ", ".join(f"{kind} ({count})" for kind, count in there_is.items()) or "no module with children"
        raise setting_error(
            "Checkpointing.modules" if config.modules is not None else "checkpointing",
            "must match at least one module",
            config.modules or config.method,
            f"This model has: {blocks}. Name one of them: `Checkpointing(modules=...)`.",
        )
    return regions


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The model's own blocks.

    These are modules with children whose class occurs at least twice among the members of the model's containers
    (`Sequential`, `ModuleList`, `ModuleDict`); containers themselves only when there are no others.
    """
    members = [
        (f"{name}.{child_name}" if name else child_name, child)
        for name, container in model.named_modules()
        if isinstance(container, _CONTAINERS)
        for child_name, child in container.named_children()
        if any(child.children())
    ]
    repeated = {kind for kind, count in Counter(type(child) for _, child in members).items() if count >= 2}
    members = [(name, child) for name, child in members if type(child) in repeated]
    blocks = [(name, child) for name, child in members if not isinstance(child, _CONTAINERS)]
    # A ModuleList is never called itself, so it cannot be a region.
    return _outermost(blocks or [(n, c) for n, c in members if isinstance(c, nn.Sequential)])


def _matches(wanted: Any, name: str, module: nn.Module) -> bool:
    if isinstance(wanted, str):
        return any(fnmatchcase(text, wanted) for text in (name, type(module).__name__))
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return bool(wanted(name, module))


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    chosen: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, module in found:
        if module not in inside:
            chosen.append((name, module))
            inside.update(module.modules())
    return chosen


# ---------------------------------------------------------------------------------------------------- regions
class _Region:
    """What a region remembers: which of its buffers its forward changes (learned in the first call)."""

    def __init__(self, previous_forward: Any) -> None:
        self.previous_forward = previous_forward  # an instance attribute of somebody else, or None
        self.changing: set[str] | None = None


def _make_region(module: nn.Module) -> None:
    module.__dict__[_REGION] = _Region(module.__dict__.get("forward"))
    # A bound method, not a closure: deepcopy rebinds it to the copy, so that a copy computes with its own weights.
    module.forward = types.MethodType(forward, module)


def _unmake_region(module: nn.Module) -> None:
    region = module.__dict__.pop(_REGION)
    del module.forward
    if region.previous_forward is not None:
        module.forward = region.previous_forward


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # what is inside may still be compiled
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a region; named so that a pickled module finds its own class's method again."""
    region: _Region = self.__dict__[_REGION]
    original = region.previous_forward or types.MethodType(type(self).forward, self)
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    before = _changing_buffers(self, region)

    def contexts() -> tuple[contextlib.AbstractContextManager[None], _BuffersAsBefore]:
        return contextlib.nullcontext(), _BuffersAsBefore(before)

    out = checkpoint(original, *args, use_reentrant=False, context_fn=contexts if before else noop_context_fn, **kwargs)
    if region.changing is None:
        region.changing = {
            name for name, (owner, key, value) in before.items() if not torch.equal(_get_buffer(owner, key), value)
        }
        for name in before.keys() - region.changing:
            del before[name]
    return out


_Snapshot = dict[str, tuple[nn.Module, str, Tensor]]


def _changing_buffers(module: nn.Module, region: _Region) -> _Snapshot:
    """Clones of the buffers that this forward may change.

    All of them at first, then only those that did, and those of normalisation layers.
    """
    snapshot: _Snapshot = {}
    for prefix, owner in module.named_modules():
        always = isinstance(owner, nn.modules.batchnorm._NormBase) and owner.training
        for key, value in owner._buffers.items():
            name = f"{prefix}.{key}"
            if value is not None and (always or region.changing is None or name in region.changing):
                snapshot[name] = (owner, key, value.detach().clone())
    return snapshot


def _get_buffer(owner: nn.Module, key: str) -> Tensor:
    value = owner._buffers[key]
    assert value is not None
    return value


class _BuffersAsBefore:
    """During recomputation, the region reads (and may change) clones of the buffers as they were before its forward.

    Entered once for each recomputation; a double backward recomputes twice.
    """

    def __init__(self, before: _Snapshot) -> None:
        self._before = before
        self._after: list[tuple[nn.Module, str, Tensor]] = []

    def __enter__(self) -> None:
        self._after = [(owner, key, _get_buffer(owner, key)) for owner, key, _ in self._before.values()]
        for owner, key, value in self._before.values():
            owner._buffers[key] = value.clone()

    def __exit__(self, *_: object) -> None:
        for owner, key, value in self._after:
            owner._buffers[key] = value
