"""The tables of docs/results.md."""

from __future__ import annotations

import statistics

from benchmarks.harness.paired import MARGINS
from benchmarks.harness.parts import compared
from benchmarks.harness.rows import MB, Row, by_setting, markdown, rows


def wrn_alone() -> str:
    """Each technique by itself at the whole batch."""
    found = [row for row in rows("wrn") if row["microbatch"] == "100"]
    head = ("technique", "tracked MB", "factor", "allocated MB", "factor", "CPU time", "loss class")
    lines = [
        (
            row["setting"],
            f"{float(row['peak_bytes']) / MB:.1f}",
            f"{float(row['factor']):.2f}x",
            f"{float(row['allocated_bytes']) / MB:.1f}",
            f"{float(row['factor_allocated']):.2f}x",
            f"{float(row['cpu_time_ratio']):.2f}x",
            row["loss_class"],
        )
        for row in found
    ]
    return markdown(head, lines)


HEADLINE = (
    ("baseline", 100),
    ("the paper's four: sparsity 0.9, bf16, blocks", 4),
    ("+ bf16", 4),
    ("sparsity 0.85, int4-chain, 8-bit momentum, into-state, bf16", 4),
    ("sparsity 0.95, int4-chain, 4-bit momentum, bf16", 2),
)


def headline() -> str:
    """A few rows of WideResNet-28-2, for the README."""
    found = {(row["setting"], int(row["microbatch"])): row for row in rows("wrn")}
    head = ("WideResNet-28-2, batch 100", "microbatch", "peak", "factor", "by the allocator", "CPU time")
    names = {"+ bf16": "sparsity 0.9, int4-chain, 8-bit momentum, bf16"}
    lines = [
        (
            names.get(setting, setting),
            str(size),
            f"{float(found[setting, size]['peak_bytes']) / MB:.1f} MB",
            f"{float(found[setting, size]['factor']):.1f}x",
            f"{float(found[setting, size]['factor_allocated']):.0f}x",
            f"{float(found[setting, size]['cpu_time_ratio']):.1f}x",
        )
        for setting, size in HEADLINE
        if (setting, size) in found
    ]
    return markdown(head, lines)


def ladder(name: str) -> str:
    """Settings against sizes of microbatch: tracked peak, factor, and the factor of what was allocated; the CPU."""
    found = rows(name)
    whole = max(int(row["microbatch"]) for row in found)
    sizes = sorted({int(row["microbatch"]) for row in found} - {whole}, reverse=True)
    lines = []
    for setting, same in by_setting([row for row in found if int(row["microbatch"]) < whole]):
        by_size = {int(row["microbatch"]): row for row in same}
        lines.append((setting, *(_cell(by_size[size]) if size in by_size else "" for size in sizes)))
    baseline = next(row for row in found if row["setting"] == "baseline")
    head = (f"baseline {float(baseline['peak_bytes']) / MB:.1f} MB", *(f"microbatch {size}" for size in sizes))
    return f"{markdown(head, lines)}\n\n{_instructions(found, sizes)}"


def _instructions(found: list[Row], sizes: list[int]) -> str:
    """Say which instructions the CPU had, by size of microbatch: kernels' workspace depends on them."""
    by_kind: dict[str, set[int]] = {}
    for row in found:
        by_kind.setdefault(row["device"].partition(", ")[2] or "not noted", set()).add(int(row["microbatch"]))
    kinds = {kind: ", ".join(str(size) for size in sizes if size in of_kind) for kind, of_kind in by_kind.items()}
    told = "; ".join(f"{kind} at microbatch {at}" for kind, at in kinds.items() if at)
    return f"Instructions of the CPU: {told}."


def _cell(row: Row) -> str:
    factor = float(row["factor"])
    shown = f"**{factor:.0f}x**" if factor >= 120 else f"{factor:.1f}x"
    return f"{float(row['peak_bytes']) / MB:.2f} MB, {shown} ({float(row['factor_allocated']):.0f}x)"


def quality(name: str, size: tuple[str, ...]) -> str:
    """Mean and range over seeds, and the paired difference from the baseline; a table for each size of the study."""
    found = rows(name)
    if not found:
        return "No run has ended yet: `make bench-quality`."
    studies = dict.fromkeys(tuple(row[column] for column in size) for row in found)
    return "\n\n".join(
        _study(name, [row for row in found if tuple(row[c] for c in size) == values], size) for values in studies
    )


def _study(name: str, found: list[Row], size: tuple[str, ...]) -> str:
    baseline = found[0]["setting"]
    comparisons = compared(found, baseline)
    margin, most_half_width = MARGINS[name]
    base_peak, digits = float(found[0]["peak_bytes"]), 2 if margin >= 0.1 else 3
    head = ("setting", "factor", "seeds", "quality", "difference", "95 % half-width", f"worse by more than {margin:g}?")
    lines = []
    for setting, same in by_setting(found):
        values = [float(row["quality_value"]) for row in same]
        c = comparisons.get(setting)
        lines.append(
            (
                setting,
                f"{base_peak / float(same[0]['peak_bytes']):.1f}x",
                str(len(values)),
                f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})",
                "" if c is None else f"{c.mean:+.{digits}f}",
                "" if c is None or c.num_pairs == 1 else f"{c.half_width:.{digits}f}",
                "" if c is None else c.verdict(margin, most_half_width),
            )
        )
    about = ", ".join(f"{found[0][column]} {column.removeprefix('num_')}" for column in size)
    about = about.removesuffix(", 1 checkpoints")
    notes = " ".join(filter(None, (_progress(found), _last_quarter(found))))
    return f"{found[0]['quality']}; {about}:{notes and f' {notes}'}\n\n{markdown(head, lines)}"


def _progress(found: list[Row]) -> str:
    """Say how much of a study that has an end is there."""
    planned = found[0].get("runs_planned")
    return f"Partial, {len(found)} of {planned} runs." if planned and len(found) < int(planned) else ""


MOST_GAIN = 0.3
"""Of the last quarter of the steps, of a baseline that has converged."""


def _last_quarter(found: list[Row]) -> str:
    """Say what the baseline gained in the last quarter of its steps, where that is known."""
    gains = [
        float(row["quality_value"]) - float(before)
        for row in found
        if row["setting"] == found[0]["setting"] and (before := row.get("quality_value_at_three_quarters"))
    ]
    if not gains:
        return ""
    gain = statistics.mean(gains)
    verdict = "it has converged" if gain < MOST_GAIN else f"{MOST_GAIN:g} would be converged"
    return f"The last quarter of the steps gained the baseline {gain:.2f}; {verdict}."


def papers() -> str:
    """Others' figures beside ours."""
    head = ("model", "setting", "GB at the paper's batch", "ours", "theirs", "check")
    lines = []
    case = ""
    for row in rows("papers"):
        is_first = row["case"] != case
        case = row["case"]
        ours = float(row[row["quantity"]] or 1)
        shown = {
            "factor": f"{ours:.2f}x less",
            "factor_beyond_lasting": f"{ours:.2f}x less, weights and momentum aside",
            "saved": f"{ours:.1%} less",
            "batch_ratio": f"batch {row['batch']} -> {row['largest_batch']} ({ours:.1f}x)",
        }
        lines.append(
            (
                f"{row['model']}, batch {row['batch']} ({row['paper']})" if is_first else "",
                row["setting"],
                f"{float(row['peak_bytes']) / 1e9:.2f}",
                "" if is_first else shown[row["quantity"]],
                row["theirs"] if is_first else "",
                f"{float(row['check']):+.1%}" if row["check"] else "",
            )
        )
    return markdown(head, lines, num_text=2)
