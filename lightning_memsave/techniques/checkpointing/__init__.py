"""Checkpointing: keep the inputs of a region, forget what it computed, compute it again when backward needs it.

What shrinks: of each region only its inputs stay (for a chain of residual blocks, one tensor instead of all they save);
during backward one region at a time is whole again. Peak of the activations: the sum of region inputs plus the largest
region. A chain of n equal blocks that save s bytes each, with inputs of i bytes: n s without, n i + s with a region per
block (`"blocks"`), about 2 sqrt(n s i) with the best groups (`"sqrt"`), i log2(n) + s with groups inside of groups
(`"recursive"`). Cost: one extra forward at most, about a third of the step's arithmetic; log2(n) of them for
`"recursive"`.

Loss class: `exact`. The repeated forward sees the same random numbers, buffers and autocast
(`saved_tensors.checkpoint_regions`), so results are the same bits; BatchNorm's running statistics are updated once, and
spectral norm iterates once.

Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016
(https://arxiv.org/abs/1604.06174): sections 4.1 (segments of a budget, Algorithm 3) and 4.4 (recursion). Section 4.2,
dropping what is cheap to compute, is `activations="exact"`, tensor by tensor. Different: regions are runs of module
calls instead of runs of graph nodes; which ones is found by the planner (`planner.checkpointing`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_memsave.core.errors import RefusedRegionError, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.core.selection import Selector, as_selectors, scripted_in
from lightning_memsave.core.units import counted, parse_bytes
from lightning_memsave.saved_tensors.checkpoint_regions import run
from lightning_memsave.saved_tensors.offload import Offloader
from lightning_memsave.saved_tensors.region_call import ChangesAttributeError, EditsInputError
from lightning_memsave.saved_tensors.region_inputs import keeping_inputs_in
from lightning_memsave.saved_tensors.region_members import Group, Member, Membership, bind, is_bound, unbind
from lightning_memsave.saved_tensors.store import SavedTensorStore
from lightning_memsave.techniques.checkpointing.region_selection import Region, repeated_blocks, select_regions
from lightning_memsave.torch_internals.autograd_graph import is_inside_transform
from lightning_memsave.torch_internals.private_names import require

METHODS = ("blocks", "sqrt", "recursive")
REGION = "_checkpoint_region"
"""The attribute of a module in which its place in regions is; its `forward` is another one as well."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Settings of checkpointing.

    Raises:
        ValueError: an unknown method, more than one way to choose regions, a wrong budget; at the start of training, a
            selection that matches no module.
    """

    method: Literal["blocks", "sqrt", "recursive"] | None = None
    """`"blocks"` (default): each selected module is a region of its own. `"sqrt"`: the groups of consecutive
    calls whose predicted peak is the lowest. `"recursive"`: groups inside of groups."""
    modules: Selector | Sequence[Selector] | None = None
    """Modules for `"blocks"`: a class, a pattern (`*`, `?`) for class names or qualified names, a function of
    (name, module), several of these, or `None` for the model's own repeated blocks."""
    budget: int | float | str | None = None
    """The cheapest regions with which the whole step fits: bytes (`"2GiB"`, an integer), or a fraction of the
    activations that are kept without regions (a float between 0 and 1)."""
    regions: Sequence[Sequence[str]] | None = None
    """Explicit regions, each the names of modules that are called one after the other; what the planner returns."""
    offload: bool = False
    """Whether inputs of regions wait outside of the device's memory: on CUDA pinned host memory, on CPU a file."""

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise setting_error(
                "checkpointing",
                f"must be one of {', '.join(map(repr, METHODS))}",
                self.method,
                "To name modules by class or pattern use `Checkpointing(modules=...)`; to fit a limit, "
                "`Checkpointing(budget=...)`.",
            )
        ways = {
            "method": self.method in ("sqrt", "recursive"),
            "modules": self.modules is not None,
            "budget": self.budget is not None,
            "regions": self.regions is not None,
        }
        chosen = [name for name, is_chosen in ways.items() if is_chosen]
        if len(chosen) > 1 or (self.method == "blocks" and not set(chosen) <= {"modules"}):
            raise setting_error(
                "Checkpointing",
                "must choose regions in one way",
                ", ".join(f"{name}={getattr(self, name)!r}" for name in dict.fromkeys([*chosen, "method"])),
                "Keep one of `method`, `modules` (with the method 'blocks'), `budget` and `regions`.",
            )
        self._check_budget()
        if self.modules is not None:
            selectors = as_selectors("Checkpointing.modules", self.modules)
            if not selectors:
                rule = "must name modules"
                raise setting_error("Checkpointing.modules", rule, self.modules, "Leave it out for repeated blocks.")
            object.__setattr__(self, "modules", selectors[0] if len(selectors) == 1 else selectors)
        if not chosen or self.modules is not None:
            object.__setattr__(self, "method", "blocks")  # so that both ways to say so are equal
        if self.regions is not None:
            object.__setattr__(self, "regions", tuple(map(tuple, self.regions)))  # hashable, whatever was given

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        if isinstance(self.budget, float) and not 0 < self.budget < 1:
            raise setting_error(
                "Checkpointing.budget",
                "must be between 0 and 1 as a fraction of the activations",
                self.budget,
                'For bytes use an integer or a text such as "2GiB".',
            )
        if not isinstance(self.budget, float):
            parse_bytes("Checkpointing.budget", self.budget)

    @classmethod
    def from_shorthand(cls, value: object) -> Checkpointing:
        """`checkpointing="sqrt"` is `Checkpointing(method="sqrt")`; `True` means `"blocks"`."""
        return cls(method="blocks" if value is True else value)  # type: ignore[arg-type]  # checked in __post_init__

    @property
    def needs_a_plan(self) -> bool:
        """Whether regions are found from a trace of one step."""
        return self.method in ("sqrt", "recursive") or self.budget is not None


def apply_checkpointing(model: nn.Module, config: Checkpointing) -> Applied:
    """Make modules of `model` checkpoint regions, in place.

    No wrapper is added: `state_dict` keys, types and `deepcopy` stay as they are.

    Raises:
        ValueError: nothing matches, a match is a region already, or the settings need a plan first. In a forward pass:
            a region edits its input in place, or changes attributes of its own.
    """
    require("autograd", "checkpointing")
    if config.needs_a_plan:
        raise setting_error(
            "checkpointing",
            "must be planned from a step of training before it is applied",
            config.method or f"budget={config.budget!r}",
            "Use `apply_checkpointing(model, plan_checkpointing(model, step, config))`.",
        )
    regions = select_regions(
        model, config.modules, None if config.regions is None else [tuple(r) for r in config.regions]
    )
    modules = {name: model.get_submodule(name) for region in regions for name in region}
    for name, module in modules.items():
        if is_bound(module, forward):
            raise setting_error("checkpointing", "must be applied once", name, "Call `.undo()` of the first one.")
    for name, memberships in _memberships(regions).items():
        member = Member(name, memberships, modules[name].__dict__.get("forward"))
        bind(modules[name], REGION, member, forward)
    stop_offload = _offload_inputs(model) if config.offload else None

    def restore() -> None:
        for module in modules.values():
            unbind(module, REGION, forward)
        if stop_offload is not None:
            stop_offload()

    summary = _summary(regions, modules, config.offload)
    if config.modules is None and config.regions is None:
        scripted = [name for name, block in repeated_blocks(model) if scripted_in(block) is not None]
        summary += f"; left out, as they hold TorchScript modules: {', '.join(scripted)}" if scripted else ""
    return Applied(technique="checkpointing", summary=summary, restore=restore)


def _summary(regions: Sequence[Region], modules: dict[str, nn.Module], offload: bool) -> str:
    kinds = Counter(
        type(modules[region[0]]).__name__ if len(region) == 1 else f"{len(region)} calls" for region in regions
    )
    parts = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{counted(len(regions), 'region')}: {parts}" + (", inputs offloaded" if offload else "")


# ---------------------------------------------------------------------------------------------------- modules in groups
def _memberships(regions: Sequence[Region]) -> dict[str, list[Membership]]:
    """Return the groups of each module, the outermost first."""
    found: dict[str, list[Membership]] = {}
    for region in sorted(regions, key=len, reverse=True):
        group = Group(len(region))
        for position, name in enumerate(region):
            found.setdefault(name, []).append(Membership(group, position))
    return found


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # what is inside may still be compiled
def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a region; named so that a pickled module finds its own class's method again."""
    member: Member = self.__dict__[REGION]
    if not torch.is_grad_enabled() or is_inside_transform():
        return member.forward_of(self)(*args, **kwargs)
    try:
        output = run(member.memberships, member, self, args, kwargs)
    except EditsInputError as error:
        raise _refusal(self, "edits its input in place", "its forward") from error
    except ChangesAttributeError as error:
        raise _refusal(self, "changes an attribute that is no buffer", f"`{error.attribute}`") from error
    member.num_calls += 1
    return output


def _refusal(module: nn.Module, what: str, where: str) -> ValueError:
    error = setting_error(
        "checkpointing",
        f"must not select a module that {what}, as its forward runs twice",
        f"{type(module).__name__}: {where}",
        "Leave this module out, or select modules inside of it: `Checkpointing(modules=...)`.",
    )
    return RefusedRegionError(*error.args)


# ---------------------------------------------------------------------------------------------------- offload
def input_store() -> SavedTensorStore:
    """Return a store that moves the inputs of regions out of the device's memory."""
    return SavedTensorStore(offloader=Offloader())


class _OffloadedInputs:
    """Opens a store for the inputs of regions around each forward pass of a model, unless one is open already."""

    def __init__(self) -> None:
        self._store = input_store()
        self._scopes: list[contextlib.AbstractContextManager[None]] = []

    def enter(self, *_: object) -> None:
        self._scopes.append(keeping_inputs_in(self._store))
        self._scopes[-1].__enter__()

    def leave(self, *_: object) -> None:
        self._scopes.pop().__exit__(None, None, None)


def _offload_inputs(model: nn.Module) -> Callable[[], None]:
    inputs = _OffloadedInputs()
    handles = [
        model.register_forward_pre_hook(inputs.enter, prepend=True),
        model.register_forward_hook(inputs.leave, always_call=True),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
