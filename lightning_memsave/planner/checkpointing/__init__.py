"""Plan of the calls that become checkpoint regions, found from one traced step: `"sqrt"`, `"recursive"`, or a budget.

A plan is data: a `Checkpointing` with explicit `regions`, which `apply_checkpointing` takes like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_memsave.core.errors import BudgetTooSmallError, setting_error
from lightning_memsave.core.units import counted, format_bytes, parse_bytes
from lightning_memsave.measuring.step_trace import Trace, trace_step
from lightning_memsave.planner.checkpointing.candidates import Candidate
from lightning_memsave.planner.checkpointing.recursive import plan_recursive
from lightning_memsave.planner.checkpointing.region_budget import fit_budget
from lightning_memsave.planner.checkpointing.replay import Replay
from lightning_memsave.planner.checkpointing.sqrt import plan_sqrt
from lightning_memsave.techniques.checkpointing import Checkpointing


@dataclass(frozen=True, kw_only=True)
class CheckpointingPlan:
    """Regions, and what the traced step says about them."""

    config: Checkpointing
    """Settings with explicit regions."""
    baseline_peak_bytes: int
    """Predicted, without regions."""
    peak_bytes: int | None
    """Predicted, with them; `None` for nested regions, which the prediction does not cover."""
    tracked_peak_bytes: int | None
    """The same without kernels' workspace, to compare with a measured peak."""
    budget_bytes: int | None = None
    """What the whole step has to fit into."""
    seconds: float = 0.0
    """Modelled time of what is computed twice in one step."""
    is_exact: bool = False
    """Whether the choice was found by the exact program."""

    def describe(self) -> str:
        """Return one line for people."""
        regions = self.config.regions or ()
        if not regions and self.peak_bytes is not None:
            return f"no region lowers the predicted peak of {format_bytes(self.baseline_peak_bytes)}"
        num_modules = len({name for region in regions for name in region})
        found = f"{counted(len(regions), 'region')} over {counted(num_modules, 'module')}"
        peak = (
            "" if self.peak_bytes is None else f", predicted peak {_change(self.baseline_peak_bytes, self.peak_bytes)}"
        )
        budget = "" if self.budget_bytes is None else f", budget {format_bytes(self.budget_bytes)} ({_MEANING})"
        return found + peak + budget


_MARGIN = 100  # of what a budget leaves for the step itself, one part is kept free
_MEANING = "on CPU: tensors and kernels' workspace; on CUDA: what the allocator reserves"


def _change(before: int, after: int) -> str:
    texts = format_bytes(before), format_bytes(after)
    return " -> ".join(texts if texts[0] != texts[1] else (f"{before:,} bytes", f"{after:,} bytes"))


def plan_checkpointing(
    model: nn.Module, step: Callable[[], object], config: Checkpointing, *, held: Iterable[Tensor] = ()
) -> Checkpointing:
    """Find the regions of `model` from one step of training.

    Args:
        model: the model.
        step: runs forward and backward, and may run on fake tensors. Gradients stay where it leaves them.
        config: with `method="sqrt"` or `"recursive"`, or a `budget`.
        held: tensors that exist besides the model's: the batch, optimizer state.

    Raises:
        ValueError: the budget cannot be met; the message says what dominates and the smallest that can.

    Example:
        >>> import torch
        >>> from lightning_memsave import apply_checkpointing
        >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> model, x = nn.Sequential(*(block() for _ in range(9))), torch.zeros(64, 8)
        >>> plan = plan_checkpointing(model, lambda: model(x).sum().backward(), Checkpointing(method="sqrt"))
        >>> applied = apply_checkpointing(model, plan)
    """
    return Planner(trace_step(model, step, held=held), config).plan().config


class Planner:
    """Finds the regions that a traced step calls for.

    Args:
        trace: of one step without regions.
        config: what is wanted.
        extra_bytes: what later steps hold besides, such as optimizer state.
    """

    def __init__(self, trace: Trace, config: Checkpointing, *, extra_bytes: int = 0) -> None:
        self._trace, self._config, self._replay = trace, config, Replay(trace, extra_bytes)

    def plan(self) -> CheckpointingPlan:
        """Return the regions.

        Raises:
            ValueError: as `plan_checkpointing`.
        """
        if self._config.method == "recursive":
            return _plan(self._config, self._replay, plan_recursive(self._trace), are_nested=True)
        if self._config.method == "sqrt":
            effects = plan_sqrt(self._trace, self._replay)
            plan = _plan(self._config, self._replay, [effect.candidate for effect in effects])
            return dataclasses.replace(plan, seconds=sum(effect.seconds for effect in effects))
        found, lowest = self._fit(self.budget_bytes)
        if found is None:
            raise self._too_small(lowest)
        return found

    def _too_small(self, lowest_bytes: int) -> BudgetTooSmallError:
        text = setting_error(
            "Checkpointing.budget",
            f"must be at least {format_bytes(lowest_bytes)} ({lowest_bytes} bytes) for this step",
            f"{self._config.budget!r} ({format_bytes(self.budget_bytes)})",
            f"{self._what_dominates()} Or choose `method='recursive'`, or a smaller microbatch.",
        )
        error = BudgetTooSmallError(str(text))
        error.lowest_bytes = lowest_bytes
        return error

    def plan_again(self, less_bytes: int) -> CheckpointingPlan | None:
        """Plan for a budget that is smaller by `less_bytes`, which a measured step took beyond what its trace showed.

        Returns `None` when no regions fit.
        """
        return self._fit(self.budget_bytes - less_bytes)[0]

    @property
    def budget_bytes(self) -> int:
        """The budget: as given, or the plain step's peak less the activations that are not to be kept."""
        budget = self._config.budget
        assert budget is not None, "nothing else needs a plan"
        if not isinstance(budget, float):
            return parse_bytes("Checkpointing.budget", budget)
        activations = sum(storage.num_bytes for storage in self._trace.storages if storage.is_kept)
        return self._replay.peak_bytes() - int((1 - budget) * activations)

    def _fit(self, limit_bytes: int) -> tuple[CheckpointingPlan | None, int]:
        """Return a plan with a little to spare, as workspace is modelled; to the byte where that is all there is."""
        spare = max(0, limit_bytes - self._replay.live_before(0)) // _MARGIN
        with_margin = limit_bytes if self._replay.peak_bytes() <= limit_bytes else limit_bytes - spare
        fit, lowest = fit_budget(self._trace, self._replay, with_margin)
        if fit is None and lowest <= limit_bytes:
            fit, lowest = fit_budget(self._trace, self._replay, limit_bytes)
        if fit is None:
            return None, lowest
        plan = _plan(self._config, self._replay, [effect.candidate for effect in fit.effects])
        return (
            dataclasses.replace(plan, budget_bytes=self.budget_bytes, seconds=fit.seconds, is_exact=fit.is_exact),
            lowest,
        )

    def _what_dominates(self) -> str:
        """Return what is there whatever becomes a region."""
        trace = self._trace
        held = format_bytes(self._replay.live_before(0))
        largest = max(trace.storages, key=lambda s: s.num_bytes if s.born >= 0 else 0)
        maker = trace.ops[largest.op].name if largest.op < len(trace.ops) else "an operation"
        inside = [c.name for c in trace.calls if c.first_op <= largest.op < c.last_op and c.name]
        where = f" in `{inside[-1]}`" if inside else ""
        return (
            f"Weights, batch and state take {held}; the largest tensor of the step takes "
            f"{format_bytes(largest.num_bytes)} ({maker}{where})."
        )


def no_plan(config: Checkpointing) -> CheckpointingPlan:
    """Return the plan without regions and without predictions."""
    return CheckpointingPlan(
        config=Checkpointing(regions=(), offload=config.offload),
        baseline_peak_bytes=0,
        peak_bytes=None,
        tracked_peak_bytes=None,
    )


def _plan(
    config: Checkpointing, replay: Replay, candidates: Sequence[Candidate], are_nested: bool = False
) -> CheckpointingPlan:
    explicit = Checkpointing(regions=tuple(c.names for c in candidates), offload=config.offload)
    effects = [replay.effect_of(candidate) for candidate in candidates] if not are_nested else []
    return CheckpointingPlan(
        config=explicit,
        baseline_peak_bytes=replay.peak_bytes(),
        peak_bytes=None if are_nested else replay.peak_bytes(effects),
        tracked_peak_bytes=None if are_nested else replay.peak_bytes(effects, workspace=False),
    )
