"""The tables of checkpointing, predictions, plans and recovery."""

from __future__ import annotations

import re
import statistics

from benchmarks.harness.rows import MB, Row, by_setting, factor_and_time, markdown, mean, rows


def checkpointing_blocks() -> str:
    """Blocks as regions, beside torch's checkpoint."""
    head = ("model", "setting", "peak MB", "factor", "CPU time", "tensors that differ from a plain step")
    lines = []
    for name in ("checkpointing", "checkpointing_gpt"):
        for i, row in enumerate(rows(name)):
            lines.append(
                (
                    row["model"] if i == 0 else "",
                    row["setting"],
                    f"{float(row['peak_bytes']) / MB:.1f}",
                    *factor_and_time(row),
                    row["quality_value"],
                )
            )
    return markdown(head, lines, num_text=2)


def checkpointing_depth() -> str:
    """Peak without weights and gradients against depth, its exponent, and the time at the largest depth."""
    found = rows("checkpointing_depth")
    depths = list(dict.fromkeys(row["n"] for row in found))
    head = ("setting", *(f"n = {n}" for n in depths), "exponent", "CPU time, all n", "plan s", "tensors that differ")
    lines = []
    for setting, same in by_setting(found):
        times = [float(row["cpu_time_ratio"]) for row in same]
        plans = [row["plan_seconds"] for row in same if row["plan_seconds"]]
        lines.append(
            (
                setting,
                *(f"{float(row['beyond_gradients_bytes']) / MB:.1f} MB" for row in same),
                f"{float(same[0]['exponent']):.2f}",
                f"{min(times):.2f}x to {max(times):.2f}x",
                f"{float(plans[0]):.1f} to {float(plans[-1]):.1f}" if plans else "",
                str(sum(int(row["quality_value"]) for row in same)),
            )
        )
    return markdown(head, lines)


def checkpointing_resnet1000() -> str:
    """Feature maps of the network of Chen et al., scaled down and run, and at full size on fake tensors."""
    head = ("network", "setting", "feature maps GB", "factor", "paper GB", "CPU time", "tensors that differ")
    lines = []
    network = ""
    for row in rows("checkpointing_resnet1000"):
        lines.append(
            (
                row["model"] if row["model"] != network else "",
                row["setting"],
                f"{float(row['beyond_gradients_bytes']) / 1e9:.3f}",
                f"{float(row['factor']):.1f}x",
                f"{float(row['paper_bytes']) / 1e9:.0f}" if row["paper_bytes"] else "",
                f"{float(row['cpu_time_ratio']):.2f}x" if row["cpu_time_ratio"] else "",
                row["quality_value"],
            )
        )
        network = row["model"]
    return markdown(head, lines, num_text=2)


def checkpointing_budget() -> str:
    """Ten budgets, torch's ways, and compiled blocks."""
    head = ("setting", "tensors MB", "allocated MB", "factor", "CPU time", "tensors that differ", "smaller and faster")
    lines = []
    for row in rows("checkpointing_budget"):
        budget = row["budget_bytes"]
        better = "; ".join(filter(None, (row["dominated_by_eager"], row["dominated_by_compiled"])))
        lines.append(
            (
                f"budget {float(budget) / MB:.1f} MB" if budget else row["setting"],
                f"{float(row['peak_bytes']) / MB:.1f}" if row["peak_bytes"] else "",
                f"{float(row['allocation_bytes']) / MB:.1f}",
                *factor_and_time(row),
                row["quality_value"],
                better,
            )
        )
    return markdown(head, lines)


def checkpointing_codecs() -> str:
    """Regions and compressed activations together."""
    head = ("model", "setting", "kept MB", "factor", "peak MB", "factor", "CPU time", "noise")
    lines = []
    model = ""
    for row in rows("checkpointing_codecs"):
        noise = float(row["quality_value"])
        lines.append(
            (
                row["model"] if row["model"] != model else "",
                row["setting"],
                f"{float(row['kept_bytes']) / MB:.1f}",
                f"{float(row['kept_factor']):.2f}x",
                f"{float(row['peak_bytes']) / MB:.1f}",
                *factor_and_time(row),
                f"{noise:.2g}" if noise else "0",
            )
        )
        model = row["model"]
    return markdown(head, lines, num_text=2)


def prediction() -> str:
    """The error of each prediction, in per cent of what was measured."""
    all_rows = rows("prediction")
    settings = list(dict.fromkeys(row["setting"] for row in all_rows))
    lines = []
    for model in dict.fromkeys(row["model"] for row in all_rows):
        of_model = {row["setting"]: row for row in all_rows if row["model"] == model}
        lines.append((model, *(_error(of_model.get(setting)) for setting in settings)))
    num_right = sum(abs(float(row["error_percent"])) <= 1 for row in all_rows)
    table = markdown(("predicted - measured", *settings), lines)
    return f"{table}\n\nWithin 1 %: {num_right} of {len(all_rows)}. A * stands for a step that had to be measured."


def large() -> str:
    """Of a step that no machine at hand could take: what each process needs, and what predicting that took."""
    head = (
        "model",
        "run",
        "peak",
        "weights",
        "gradients",
        "optimizer state",
        "activations",
        "CPU time",
        "memory of the prediction",
    )
    columns = ("peak_bytes", "weights_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes")
    lines = [
        (
            row["model"].partition(",")[0],
            row["setting"],
            *(f"{int(row[column]) / 2**30:.1f} GiB" for column in columns),
            f"{float(row['prediction_cpu_seconds']):.0f} s",
            f"{int(row['prediction_rss_mib'])} MiB",
        )
        for row in rows("large")
    ]
    return markdown(head, lines)


def sequence() -> str:
    """Of one sample on a device of 80 GB: the longest one whose step fits."""
    found = rows("sequence")
    models = list(dict.fromkeys(row["model"] for row in found))
    lengths = {(row["model"], row["setting"]): int(row["num_positions"]) for row in found}
    settings = dict.fromkeys(row["setting"] for row in found)
    lines = [(setting, *(f"{lengths[model, setting]:,}" for model in models)) for setting in settings]
    return markdown(("setting", *(model.partition(", bfloat16")[0] for model in models)), lines)


def _error(row: Row | None) -> str:
    if row is None:
        return ""
    difference = int(row["predicted_peak_bytes"]) - int(row["measured_peak_bytes"])
    text = "0 B" if difference == 0 else f"{float(row['error_percent']):+.2f} %"
    return text + "*" * (row["source"] == "measured")


def planning_time() -> str:
    """CPU seconds of plans beside those of ten plain steps and five seconds more."""
    head = ("model", "budget", "plan", "predictions", "plain step s", "planning s", "ten steps and 5 s")
    lines, model = [], ""
    for row in rows("planning_time"):
        is_made, plain = row["feasible"] == "True", float(row["plain_cpu_seconds"])
        lines.append(
            (
                row["model"] if row["model"] != model else "",
                row["setting"],
                row["plan"].replace("|", "") if is_made else "refused",
                row["num_predictions"] if is_made else "",
                f"{plain:.2f}",
                f"{float(row['plan_cpu_seconds']):.1f}",
                f"{10 * plain + 5:.1f}",
            )
        )
        model = row["model"]
    return markdown(head, lines, num_text=3)


def budget_quality() -> str:
    """What plans for a budget, and int4 for every tensor, do to a validation loss: mean over seeds, and the worst."""
    head = ("setting", "peak MB", "factor", "noise of the plan", "loss against plain, mean", "worst seed", "seeds")
    lines = []
    for setting, same in by_setting(rows("budget_quality")):
        differences = [100 * float(row["relative_difference"]) for row in same]
        noise = [float(row["gradient_noise"]) for row in same if row["gradient_noise"]]
        lines.append(
            (
                setting,
                f"{mean(same, 'peak_bytes') / MB:.1f}",
                f"{mean(same, 'factor'):.2f}x",
                f"{100 * statistics.mean(noise):.1f} %" if noise else "",
                f"{statistics.mean(differences):+.3f} %",
                f"{max(differences, key=abs):+.3f} %",
                str(len(same)),
            )
        )
    return markdown(head, lines)


def planner() -> str:
    """Budgets kept and refused, and time against other settings that fit, for each model and recipe."""
    head = (
        "model",
        "recipe",
        "budgets",
        "feasible",
        "within the budget",
        "smallest named is enough",
        "predictions",
        "time against the fastest of others",
    )
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows("planner")):
        for recipe in ("lossless", "balanced"):
            asked = [row for row in rows("planner") if (row["model"], row["setting"]) == (model, recipe)]
            if not asked:
                continue
            feasible = [row for row in asked if row["feasible"] == "True"]
            refused = [row for row in asked if row["feasible"] == "False"]
            enough = sum(row.get("smallest_is_enough") == "True" for row in refused)
            kept = sum(row["within_budget"] == "True" for row in feasible)
            most = max((int(row["num_predictions"]) for row in feasible), default=0)
            cells = (
                f"{len(asked)}",
                f"{len(feasible)}",
                f"{kept}",
                f"{enough} of {len(refused)}" if refused else "none refused",
                f"up to {most}",
                _against_others(feasible),
            )
            lines.append((model, recipe, *cells))
    return markdown(head, lines, num_text=2)


def _against_others(feasible: list[Row]) -> str:
    """The plans' times over that of the fastest other setting, and how many others there were."""
    timed = [row for row in feasible if row.get("time_against_fastest")]
    if not timed:
        return ""
    ratios = sorted(float(row["time_against_fastest"]) for row in timed)
    num_others = sum(int(row["num_rivals"]) for row in timed)
    return f"{ratios[0]:.2f}x to {ratios[-1]:.2f}x, {num_others} others"


def relating_recovery() -> str:
    """What the default did where a batch could not be cut and memory was too small."""
    head = ("", "memory", "taken", "loss class", "peak MB", "factor", "distance of the weights")
    lines = []
    for row in rows("relating_recovery"):
        sizes = re.findall(r"at most (\d+) samples", row["taken"])
        taken = f"tiles of {sizes[0]} samples" if sizes else "regions" if "region" in row["taken"] else ""
        is_plain, distance = row["setting"] == "plain", float(row["quality_value"] or 0)
        lines.append(
            (
                row["model"].removesuffix(", batch 64") if is_plain else "",
                "all" if is_plain else row["setting"].removeprefix("limit of "),
                taken,
                row["loss_class"],
                f"{float(row['peak_bytes']) / MB:.1f}" if row["peak_bytes"] else "ends in the error",
                f"{float(row['factor']):.1f}x" if row["factor"] else "",
                (f"{distance:.0e}" if distance else "0") if row["peak_bytes"] else "",
            )
        )
    return markdown(head, lines, num_text=4)
