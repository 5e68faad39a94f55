"""The tables of the recipes and of the techniques' pages, checkpointing aside."""

from __future__ import annotations

import statistics

from benchmarks.harness.rows import MB, MIB, Row, by_setting, factor_and_time, markdown, mean, rows, standard_error


def recipes_quality() -> str:
    """Peak and accuracy of the recipes, over seeds."""
    head = ("run", "peak", "less", "test accuracy", "seeds")
    found = dict(by_setting(rows("recipes_quality")))
    plain = mean(found["measure"], "peak_bytes")
    lines = []
    for setting, runs in found.items():
        accuracies = [float(row["quality_value"]) for row in runs]
        lines.append(
            (
                "plain Lightning" if setting == "measure" else f'`MemSave("{setting}")`',
                f"{mean(runs, 'peak_bytes') / MIB:.1f} MiB",
                f"{plain / mean(runs, 'peak_bytes'):.2f}x",
                f"{statistics.mean(accuracies):.1%}",
                str(len(runs)),
            )
        )
    return markdown(head, lines)


def recipes() -> str:
    """What one word saves: a row for each model, a column for each word."""
    words = ("exact", "balanced", "extreme")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows("recipes")):
        found = {row["setting"]: row for row in rows("recipes") if row["model"] == model}
        lines.append((model, _size(found["measure"]), *(_saving(found[word]) for word in words)))
    return markdown(("model", "plain", *(f'`MemSave("{word}")`' for word in words)), lines)


def _size(row: Row) -> str:
    return f"{float(row['peak_bytes']) / MIB:.1f} MiB"


def _saving(row: Row) -> str:
    return f"{_size(row)}, **{float(row['factor']):.1f}x**, time {float(row['cpu_time_ratio']):.1f}x"


def activations() -> str:
    """Kept bytes, peak, time and noise, for each model."""
    head = ("model", "setting", "kept MB", "factor", "peak MB", "factor", "CPU time", "noise")
    lines = []
    for name in ("wrn", "gpt", "gpt_wide", "llama", "vocabulary", "head", "vit"):
        for i, row in enumerate(rows(f"activation_compression_{name}")):
            noise = float(row["quality_value"])
            lines.append(
                (
                    row["model"] if i == 0 else "",
                    row["setting"],
                    f"{float(row['kept_bytes']) / MB:.1f}",
                    f"{float(row['kept_factor']):.2f}x" if float(row["kept_factor"]) < 1000 else "all",
                    f"{float(row['peak_bytes']) / MB:.1f}",
                    f"{float(row['factor']):.2f}x",
                    f"{float(row['cpu_time_ratio']):.2f}x",
                    f"{noise:.2g}" if noise else "0",
                )
            )
    return markdown(head, lines, num_text=2)


def codecs() -> str:
    head = ("codec", "implementation", "B/element", "encode GB/s", "decode GB/s", "error on N(0, 1)")
    lines = [
        (
            row["setting"],
            row["implementation"],
            f"{float(row['bytes_per_element']):.3f}",
            f"{float(row['encode_gb_per_s']):.2f}",
            f"{float(row['decode_gb_per_s']):.2f}",
            f"{float(row['quality_value']):.4f}",
        )
        for row in rows("codecs")
    ]
    return markdown(head, lines, num_text=2)


def compiled() -> str:
    """Peak, noise and time of compiled code with codes, beside the compiler's own budget."""
    lines, model, plain_bytes = [], "", 0
    for row in rows("compiled"):
        is_first, model = row["model"] != model, row["model"]
        num_bytes = int(row["allocation_bytes"])
        plain_bytes = num_bytes if is_first else plain_bytes
        has_noise = int(row["num_draws"]) > 1
        lines.append(
            (
                *(model if is_first else "", row["setting"], f"{num_bytes / MB:.1f}"),
                f"{plain_bytes / num_bytes:.2f}x",
                f"{float(row['cpu_time_ratio']):.2f}x",
                f"{float(row['error']):.4f}" if has_noise else "",
                f"{float(row['error_of_mean']):.4f}" if has_noise else "",
            )
        )
    head = ("model", "setting", "peak, MB", "less", "CPU time", "noise", "mean of 8")
    return markdown(head, lines, num_text=2)


def launch_bound() -> str:
    """Times of steps whose kernels take microseconds."""
    lines, model = [], ""
    for row in rows("launch_bound"):
        if row["setting"] != "baseline":
            is_first, model = row["model"] != model, row["model"]
            lines.append((model if is_first else "", row["setting"], f"{float(row['cpu_time_ratio']):.2f}x"))
    return markdown(("model", "setting", "CPU time of a step"), lines, num_text=2)


def quality() -> str:
    """Accuracy of three seeds, and validation loss, after equal steps."""
    head = ("training", "setting", "quality", "against the baseline")
    lines = []
    runs_of_digits = [row for row in rows("activation_compression_digits") if row["seed"] != "mean"]
    digits = list(by_setting(runs_of_digits))
    base = [float(row["test_accuracy"]) for row in digits[0][1]]
    for i, (setting, runs) in enumerate(digits):
        values = [float(row["test_accuracy"]) for row in runs]
        error = ((statistics.variance(values) + statistics.variance(base)) / len(values)) ** 0.5
        difference = statistics.mean(values) - statistics.mean(base)
        lines.append(
            (
                "WideResNet-28-2, digits, test accuracy" if i == 0 else "",
                setting,
                f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})",
                f"{difference * 100:+.1f} points ± {error * 100:.1f}" if i else "",
            )
        )
    for i, (setting, runs) in enumerate(by_setting(rows("activation_compression_bytes"))):
        values = [float(row["quality_value"]) for row in runs]
        excess = [100 * float(row["relative_difference"]) for row in runs]
        lines.append(
            (
                "GPT on Python's source text, validation loss" if i == 0 else "",
                setting,
                f"{statistics.mean(values):.4f}",
                f"{statistics.mean(excess):+.2f} % ± {standard_error(excess):.2f}" if i else "",
            )
        )
    return markdown(head, lines, num_text=2)


def low_precision() -> str:
    """Bytes per parameter by kind, peak, time of the update."""
    head = ("setting", "weights", "gradients", "state", "together", "peak MB", "update s / 10M")
    lines = []
    for row in rows("low_precision"):
        kinds = [f"{kind}bytes_per_parameter" for kind in ("weights_", "gradients_", "state_", "")]
        lines.append(
            (
                row["setting"],
                *(f"{float(row[kind]):.2f}" for kind in kinds),
                f"{float(row['peak_bytes']) / MB:.1f}",
                f"{float(row['update_cpu_seconds_per_10M']):.2f}",
            )
        )
    return markdown(head, lines)


def optimizer_state() -> str:
    """The peak of a whole step, its time, and where the parameters go."""
    head = ("setting", "factor", "CPU time of a step", "parameters' relative difference, 100 steps of fixed gradients")
    found = rows("optimizer_state")[1:]
    return markdown(
        head, [(row["setting"], *factor_and_time(row), f"{float(row['quality_value']):.2g}") for row in found]
    )


def state_errors() -> str:
    """Errors, time and temporaries of the optimizer's step."""
    head = ("state", "bytes per parameter", "even", "uneven", "wide", "CPU time")
    head += ("us per small parameter", "temporary bytes per element")
    lines = []
    for row in rows("optimizer_state_error"):
        errors = (f"{float(row[f'{kind}_relative_error']):.2g}" for kind in ("even", "uneven", "wide"))
        time = f"{float(row['cpu_time_ratio']):.1f}x" if row["cpu_time_ratio"] else ""
        small, most = row["cpu_us_per_parameter"], row["transient_bytes_per_element"]
        each = (f"{float(small):.0f}" if small else "", f"{float(most):.1f}" if most else "")
        lines.append((row["setting"], f"{float(row['state_bytes_per_parameter']):.3f}", *errors, time, *each))
    return markdown(head, lines)


def second_moments() -> str:
    """What a step divides by, over plain Adam's, after some steps."""
    found = list(by_setting(rows("into_state")))
    steps = [f"step {row['n']}, {row['num_microbatches']} microbatches" for row in found[0][1]]
    lines = []
    for setting, each in found:
        roots = (f"{float(r['p50']):.2f} ({float(r['p05']):.2f} to {float(r['p95']):.2f})" for r in each)
        lines.append((setting, *roots, f"{float(each[-1]['relative_difference']):.2f}"))
    return markdown(("gradients", *steps, f"first moment's error, step {found[0][1][-1]['n']}"), lines)


def distributed() -> str:
    """Bytes of one of several processes, and time and distance over plain training."""
    head = ("processes", "setting", "peak MB", "gradients MB", "state MB", "less", "CPU time", "distance of weights")
    lines = []
    for row in rows("distributed"):
        sizes = (f"{float(row[f'{name}_bytes']) / MB:.2f}" for name in ("peak", "gradients", "optimizer_state"))
        distance = f"{float(row['quality_value']):.1e}" if float(row["quality_value"]) else "0"
        lines.append((row["n"], row["setting"], *sizes, *factor_and_time(row), distance))
    return markdown(head, lines)


def low_precision_quality(model: str) -> str:
    """What three seeds reach, and how far it is from float32 with the same seed; of rows whose model starts so."""
    found = [row for row in rows("low_precision_quality") if row["model"].startswith(model)]
    if not found:
        return "No run has ended yet: `python -m benchmarks.quality.quality_low_precision`."
    is_loss = "loss" in found[0]["quality"]
    column, scale, unit = ("relative_difference", 100, " %") if is_loss else ("difference", 1, " points")
    head = ("setting", found[0]["quality"].partition(",")[0], "against float32", "CPU time of training")
    lines = []
    seconds = 0.0
    for setting, runs in by_setting(found):
        values = [float(run["quality_value"]) for run in runs]
        differences = [scale * float(run[column]) for run in runs]
        error = standard_error(differences)
        seconds = seconds or mean(runs, "cpu_seconds_run")
        lines.append(
            (
                setting,
                f"{statistics.mean(values):.{4 if is_loss else 2}f}",
                f"{statistics.mean(differences):+.2f}{unit} ± {error:.2f}" if lines else "",
                f"{mean(runs, 'cpu_seconds_run') / seconds:.1f}x",
            )
        )
    return markdown(head, lines)


def peft() -> str:
    """Bytes of a step of LoRA, by kind."""
    head = (
        "setting",
        "weights MB",
        "gradients",
        "state",
        "activations",
        "peak MB",
        "factor",
        "CPU time",
        "gradients differ",
    )
    kinds = ("weights", "gradients", "optimizer_state", "activations", "peak")
    lines = []
    for row in rows("peft"):
        held = {kind: float(row[f"{kind}_bytes"]) / MB for kind in kinds}
        difference = row["quality_value"] and f"{float(row['quality_value']):.0e}".replace("0e+00", "0")
        lines.append((row["setting"], *(f"{held[kind]:.2f}" for kind in kinds), *factor_and_time(row), difference))
    return markdown(head, lines)


def tiling() -> str:
    """Tiles along samples and positions, beside regions and microbatches."""
    head = ("", "setting", "peak MB", "factor", "CPU time", "error of the gradient")
    lines = []
    for row in rows("tiling"):
        error = float(row["quality_value"])
        lines.append(
            (
                row["model"] if row["setting"] == "plain" else "",
                row["setting"],
                f"{float(row['peak_bytes']) / MB:.1f}",
                *factor_and_time(row),
                f"{error:.0e}" if error else "0",
            )
        )
    return markdown(head, lines, num_text=2)


def microbatching() -> str:
    """Peak and time against the size of the microbatch."""
    head = ("model", "setting", "peak MB", "factor", "CPU time", "gradients' relative difference")
    lines = [
        (
            row["model"] if i == 0 else "",
            row["setting"],
            f"{float(row['peak_bytes']) / MB:.1f}",
            *factor_and_time(row),
            f"{float(row['quality_value']):.0e}" if float(row["quality_value"]) else "0",
        )
        for name in ("microbatching", "microbatching_gpt")
        for i, row in enumerate(rows(name))
    ]
    return markdown(head, lines, num_text=2)


def recovery() -> str:
    """A run that never runs out of memory, and the guards alone."""
    head = ("WideResNet-28-2, batch 100", "CPU time", "ms per batch")
    lines = [
        (row["setting"], f"{float(row['cpu_time_ratio']):.4f}x", f"{1000 * float(row['cpu_seconds_p50']):.2f}")
        for row in rows("recovery")
    ]
    return markdown(head, lines)


def loop() -> str:
    """A batch in Lightning's loop in which nothing is cut and nothing measured."""
    head = ("model", "callback", "CPU time", "us more than plain")
    lines, model, plain = [], "", 0.0
    for row in rows("launch_bound_loop"):
        seconds = float(row["cpu_seconds_p50"])
        if row["setting"] == "baseline":
            plain = seconds
        else:
            is_first, model = row["model"] != model, row["model"]
            ratio, more = f"{float(row['cpu_time_ratio']):.2f}x", f"{1e6 * (seconds - plain):.0f}"
            lines.append((model if is_first else "", row["setting"], ratio, more))
    return markdown(head, lines, num_text=2)


def batchnorm() -> str:
    """Accuracy against the size of the microbatch, for each way to normalise."""
    found = dict(by_setting(rows("microbatching_batchnorm")))

    def cell(runs: list[Row]) -> str:
        values = [float(row["quality_value"]) for row in runs]
        return f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})"

    sizes = list(dict.fromkeys(name.split()[-1] for name in found if "microbatch" in name))
    lines = [
        (
            size,
            *(
                cell(found[f"{mode}, microbatch {size}"]) if f"{mode}, microbatch {size}" in found else whole
                for mode, whole in (("ghost", cell(found["whole batches"])), ("running", ""))
            ),
        )
        for size in sizes
    ]
    return markdown(("microbatch", '`"ghost"`', '`"running"`'), lines)


def sparsity_steps() -> str:
    """What is held between steps, and the step itself."""
    head = ("model", "setting", "held MB", "factor", "peak MB", "factor", "CPU time", "differs from masked dense")
    lines = []
    for name in ("sparsity", "sparsity_bert"):
        dense: Row = {}
        for row in rows(name):
            is_first = row["model"] != dense.get("model")
            dense = row if is_first else dense
            lines.append(
                (
                    row["model"] if is_first else "",
                    row["setting"],
                    f"{float(row['held_bytes']) / MB:.2f}",
                    f"{float(dense['held_bytes']) / float(row['held_bytes']):.2f}x",
                    f"{float(row['peak_bytes']) / MB:.1f}",
                    *factor_and_time(row),
                    f"{float(row['quality_value']):.0f} tensors" if name == "sparsity" else "",
                )
            )
    return markdown(head, lines, num_text=2)


def sparsity_digits() -> str:
    """Mean and standard error of three seeds, a method in each row; the bytes held at most during a run."""
    found = rows("sparsity_digits")
    sparsities = [s for s in dict.fromkeys(row["sparsity"] for row in found) if float(s)]
    head = ("method", *(f"{float(s):.0%} zero" for s in sparsities), "held MB at 90 %")
    lines = []
    for setting, runs in by_setting(found):
        cells = [[r for r in runs if r["sparsity"] in (s, "0.0")] for s in sparsities]
        held = [r for r in runs if r["sparsity"] in ("0.9", "0.0")]
        accuracies = (_mean_and_error([float(r["quality_value"]) for r in cell]) for cell in cells)
        lines.append((setting, *accuracies, f"{mean(held, 'held_bytes') / MB:.2f}"))
    return markdown(head, lines)


def sparsity_text() -> str:
    """Mean and standard error of three seeds, a method in each row."""
    found = rows("sparsity_text")
    sparsities = [s for s in sorted({row["sparsity"] for row in found}, key=float) if float(s)]
    head = ("method", *(f"{float(s):.0%} zero" for s in sparsities), "held MB at 90 %")
    lines = []
    for setting, runs in by_setting(found):
        cells = [[float(r["quality_value"]) for r in runs if r["sparsity"] in (s, "0.0")] for s in sparsities]
        losses = (f"{statistics.mean(c):.3f} ± {standard_error(c):.3f}" for c in cells)
        held = [r for r in runs if r["sparsity"] in ("0.9", "0.0")]
        lines.append((setting, *losses, f"{mean(held, 'held_bytes') / MB:.2f}"))
    return markdown(head, lines)


def code_noise() -> str:
    """Codecs by module beside one codec for all: bytes, and noise as predicted and as the whole batch has it."""
    head = ("model", "codecs", "kept MB", "noise predicted", "noise", "sites in exact, int8, int4, int2", "measuring")
    lines, before = [], ""
    for row in rows("code_noise"):
        counts = dict(reversed(part.split(" x ")) for part in row["plan"].split(", "))
        lines.append(
            (
                row["model"] if row["model"] != before else "",
                row["setting"],
                f"{float(row['kept_bytes']) / MB:.1f}",
                f"{float(row['predicted']):.4f}",
                f"{float(row['quality_value']):.4f}",
                ", ".join(counts.get(codec, "0") for codec in ("exact", "int8", "int4", "int2")),
                f"{float(row['measuring_steps']):.0f} steps" if row["model"] != before else "",
            )
        )
        before = row["model"]
    return markdown(head, lines, num_text=2)


def low_rank_steps() -> str:
    """What is held between steps, and the step itself."""
    return _held_and_steps("low_rank")


def sparse_update_steps() -> str:
    """What is held between steps, and the step itself."""
    return _held_and_steps("sparse_update")


def sparse_update_digits() -> str:
    """Means of five seeds, and the standard error of the accuracy."""
    head = ("setting", "numbers trained", "training takes kB", "peak MB", "accuracy", "CPU time")
    lines = []
    for setting, runs in by_setting(rows("sparse_update_digits")):
        lines.append(
            (
                setting,
                f"{mean(runs, 'num_trained'):,.0f}",
                f"{mean(runs, 'training_bytes') / 1e3:,.0f}",
                f"{mean(runs, 'peak_bytes') / MB:.2f}",
                _mean_and_error([float(row["quality_value"]) for row in runs]),
                f"{mean(runs, 'cpu_time_ratio'):.2f}x",
            )
        )
    return markdown(head, lines)


def _held_and_steps(name: str) -> str:
    head = ("model", "setting", "held MB", "factor", "activations MB", "peak MB", "factor", "CPU time")
    lines = []
    dense: Row = {}
    for row in rows(name):
        is_first = row["model"] != dense.get("model")
        dense = row if is_first else dense
        lines.append(
            (
                row["model"] if is_first else "",
                row["setting"],
                f"{float(row['held_bytes']) / MB:.2f}",
                f"{float(dense['held_bytes']) / float(row['held_bytes']):.2f}x",
                f"{float(row['activations_bytes']) / MB:.1f}",
                f"{float(row['peak_bytes']) / MB:.1f}",
                *factor_and_time(row),
            )
        )
    return markdown(head, lines, num_text=2)


def low_rank_text() -> str:
    """Mean and standard error of three seeds, for each number of parameters."""
    found = dict(by_setting(rows("low_rank_text")))
    head = ("as many numbers as", "parameters", "low rank", "static sparsity", "RigL", "CPU time: low rank, RigL")
    lines = [("dense", f"{mean(found['dense'], 'num_parameters'):,.0f}", _loss(found["dense"]), "", "", "")]
    for rank in (name for name in found if name.startswith("rank ")):
        low, static, rigl = found[rank], found[f"static, as {rank}"], found[f"rigl, as {rank}"]
        times = ", ".join(f"{mean(runs, 'cpu_time_ratio'):.1f}x" for runs in (low, rigl))
        lines.append((rank, f"{mean(low, 'num_parameters'):,.0f}", *map(_loss, (low, static, rigl)), times))
    return markdown(head, lines)


def _loss(runs: list[Row]) -> str:
    values = [float(row["quality_value"]) for row in runs]
    return f"{statistics.mean(values):.3f} ± {standard_error(values):.3f}"


def _mean_and_error(values: list[float]) -> str:
    error = standard_error(values)
    return f"{statistics.mean(values):.1%} ± {error * 100:.1f}"
