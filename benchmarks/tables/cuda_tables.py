"""The tables of what ran on a GPU."""

from __future__ import annotations

from benchmarks.harness.rows import MB, markdown, rows

GB = 1000 * MB


def steps() -> str:
    """Whole steps in Lightning: the allocator's peak, and wall time."""
    head = ("model", "setting", "allocated GB", "factor", "wall time", "loss after")
    lines, model = [], ""
    for row in rows("cuda_steps"):
        lines.append(
            (
                row["model"] if row["model"] != model else "",
                row["setting"],
                f"{float(row['allocated_bytes']) / GB:.2f}",
                f"{float(row['factor_allocated']):.2f}x",
                f"{float(row['wall_time_ratio']):.2f}x",
                f"{float(row['quality_value']):.3f}",
            )
        )
        model = row["model"]
    return markdown(head, lines, num_text=2)


def predictions() -> str:
    """Predicted without a device, beside what the device's allocator counted."""
    head = ("model", "setting", "predicted GB", "allocated GB", "predicted over allocated", "of reserved")
    predicted = {(row["model"], row["setting"]): row for row in rows("cuda_predictions")}
    lines, model = [], ""
    for row in rows("cuda_steps"):
        made = predicted.get((row["model"], row["setting"]))
        if made is None:
            continue
        allocated, reserved = (float(row[f"{kind}_bytes"]) for kind in ("allocated", "reserved"))
        wanted, wanted_reserved = (float(made[f"predicted_{kind}_bytes"]) for kind in ("allocated", "reserved"))
        lines.append(
            (
                row["model"] if row["model"] != model else "",
                row["setting"],
                f"{wanted / GB:.3f}",
                f"{allocated / GB:.3f}",
                f"{wanted / allocated:.3f}",
                f"{wanted_reserved / reserved:.2f}",
            )
        )
        model = row["model"]
    return markdown(head, lines, num_text=2)


def kernels() -> str:
    """Bytes read and written per second, beside a copy."""
    found = [row for row in rows("cuda_kernels") if row["gigabytes_per_second"]]
    kinds = list(dict.fromkeys(row["model"] for row in found))
    head = ("kernel", *(f"GB/s, {kind.rpartition(' ')[2]} (of a copy)" for kind in kinds))
    lines = []
    for case in dict.fromkeys(row["case"] for row in found):
        of_kind = {row["model"]: row for row in found if row["case"] == case}
        cells = [
            f"{float(row['gigabytes_per_second']):,.0f} ({float(row['part_of_copy']):.0%})" if row else ""
            for row in map(of_kind.get, kinds)
        ]
        lines.append((case, *cells))
    return markdown(head, lines)


def optimizers() -> str:
    """Updates of AdamW, in torch, here and elsewhere."""
    found = [row for row in rows("cuda_kernels") if row["microseconds_per_parameter"]]
    models = list(dict.fromkeys(row["model"] for row in found))
    head = ("update", *(f"{model}: time, temporary MB" for model in models))
    lines = []
    for case in dict.fromkeys(row["case"] for row in found):
        of_model = {row["model"]: row for row in found if row["case"] == case}
        cells = [
            f"{float(row['wall_time_ratio']):.1f}x, {float(row['temporary_bytes']) / MB:.1f}" if row else "not measured"
            for row in map(of_model.get, models)
        ]
        lines.append((case, *cells))
    return markdown(head, lines)
