"""A saved W&B workspace for memory runs (needs wandb-workspaces, in the extra `dashboard`).

Its sections ask what the comparison page asks. W&B's own panels draw it: bars of several figures stand side by side
there, not on top of each other, and the front is the running best of the scatter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.reporting.comparison import is_better_when_lower
from lightning_memsave.reporting.wandb_run import STEP_METRIC

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

PEAK = "memsave/peak_bytes"
_BY_CATEGORY = [f"memsave/peak_{category}_bytes" for category in CATEGORIES]


def build_workspace(target: str, metric: str | None = "test/accuracy") -> Workspace:
    """Return the workspace of a project, without asking anybody.

    Args:
        target: `ENTITY/PROJECT`.
        metric: what quality is, as it was logged; `None` shows only what every run has, memory and time.

    Raises:
        ValueError: `target` is of another form.
    """
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", target):
        raise setting_error("target", "must be ENTITY/PROJECT", target, "Both are in your project's URL.")
    from wandb_workspaces import workspaces

    entity, project = target.split("/")
    pinned = [PEAK, "memsave/factor", "memsave/loss_class", *([] if metric is None else [metric])]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="Memory and quality",
        sections=[
            workspaces.Section(name=question, panels=panels, is_open=True)
            for question, panels in _panels(metric).items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP_METRIC),
        runset_settings=workspaces.RunsetSettings(
            order=[workspaces.Ordering(workspaces.Summary(PEAK), ascending=True)],
            pinned_columns=[f"summary:{name}" for name in pinned],
        ),
    )


def _panels(metric: str | None) -> dict[str, list[Any]]:
    from wandb_workspaces.reports import v2

    panels: Any = v2  # exports without saying so
    costs = [("memsave/step_seconds", "seconds per step", True)]
    if metric is not None:
        costs.insert(0, (metric, metric, is_better_when_lower(metric)))
    return {
        "Which run is the smallest?": [
            panels.BarPlot(title="Peak, bytes", metrics=[PEAK]),
            panels.BarPlot(title="Times smaller than the baseline", metrics=["memsave/factor"]),
        ],
        "What did it cost?": [
            panels.ScatterPlot(
                title=f"Peak against {name}; the line is the Pareto front",
                x=panels.SummaryMetric(PEAK),
                y=panels.SummaryMetric(key),
                running_ymin=lower,
                running_ymax=not lower,
            )
            for key, name, lower in costs
        ],
        "Where did the bytes go?": [
            panels.BarPlot(title="Peak by category, bytes", metrics=list(_BY_CATEGORY)),
            panels.LinePlot(
                title="Measured steps by category, bytes", x=STEP_METRIC, y=list(_BY_CATEGORY), plot_type="stacked-area"
            ),
        ],
        "Does it grow?": [panels.LinePlot(title="Peak of each measured step, bytes", x=STEP_METRIC, y=[PEAK])],
        "Which settings?": [panels.RunComparer(diff_only=True)],
    }


def write_workspace(workspace: Workspace, path: Path) -> Path:
    """Write the specification as JSON, as it would be sent; needs no account and no network.

    Returns:
        `path`.
    """
    # Private name of wandb-workspaces, seen in 0.4.13: the only way to the specification without sending it.
    specification = workspace._to_model().model_dump(by_alias=True, mode="json", exclude_none=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(specification, indent=1), encoding="utf-8")
    return path


def save_workspace(workspace: Workspace) -> str:
    """Save the workspace at W&B, or wherever `wandb` is logged in; returns its address.

    Raises:
        ValueError: there is no account or no network.
    """
    import wandb

    try:
        workspace.save()  # type: ignore[no-untyped-call]  # untyped in wandb-workspaces
        return str(workspace.url)
    except (wandb.errors.UsageError, wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
        reason = str(error).partition("\n")[0]
        target = f"{workspace.entity}/{workspace.project}"
        raise setting_error(
            "target", f"must be reachable ({reason})", target, "Or write it with --json FILE."
        ) from error
