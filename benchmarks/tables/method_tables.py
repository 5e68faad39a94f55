"""The table of papers' methods: what each is called here, what it keeps, and what is better at the same bytes.

A method that this package does not have is a `Method` without a `setting`; once it has one, its row is one line.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from benchmarks.harness.rows import MB, Row, by_setting, markdown, mean, rows

ABSENT = "not in this package"
ARXIV = "https://arxiv.org/abs/"


class Method(NamedTuple):
    """One row: a paper, and where its figures and ours come from."""

    name: str
    link: str
    here: str
    theirs: str
    when: str
    """When it is still worth choosing."""
    setting: str = ""
    """A row of `results/methods.csv`: case and setting, with a colon between; empty where nothing is kept by it."""
    better: str = ""
    """Another one, to choose instead."""
    ours: tuple[str, ...] = ()
    """Rows of `results/papers.csv`: case and setting, with a colon between; or a key of `_ELSEWHERE` and a setting."""


_ELSEWHERE = {
    "peft": ("peft", "small Llama, against training all weights:"),
    "llama": ("activation_compression_llama", "small Llama:"),
    "vit": ("activation_compression_vit", "small ViT:"),
}
"""Results of other models: their file, and what they are."""
METHODS = (
    Method(
        "[DropIT]({})",
        ARXIV + "2202.13808",
        '`"dropit"`',
        "20 % less, nine tenths dropped",
        "below 0.27 bytes, beside a code: 0.177; it changes the gradient",
        "linear:topk-0.1",
        "linear:int4",
        ("dropit-deit-s:dropit", "dropit-deit-s:exact", "dropit-deit-s:exact, int4"),
    ),
    Method(
        "[WTA-CRS]({})",
        ARXIV + "2305.15265",
        '`"rows-0.3"`; no name of its own, as norms of gradients are not known here',
        "17.66 to 8.44 GB (2.1x); 2.7x with LoRA",
        "below 0.27 bytes, beside a code: 0.156; where few rows are large",
        "linear:rows-0.3",
        "linear:int8",
        ("wta-crs-t5:rows-0.3", "wta-crs-t5:exact, int4"),
    ),
    Method(
        "[Few-Bit Backward]({})",
        ARXIV + "2202.00441",
        '`"fewbit-3"`, rounded at random',
        "11.30 to 9.75 GiB (13.8 % less)",
        "in front of a frozen layer, where a gradient must be unbiased, or in 1 or 3 bits",
        "activation:fewbit-3",
        "activation:exact",
        ("fewbit-roberta:fewbit-3", "fewbit-roberta:exact"),
    ),
    Method(
        "Few-Bit Backward, before a frozen layer",
        "",
        '`"fewbit-2"`',
        "",
        "its error is that of a code of 2 bits; 3 bits lie between codes",
        "frozen:fewbit-2",
        "frozen:int2",
    ),
    Method(
        "[Inverted Activations]({})",
        ARXIV + "2407.15545",
        '`"inverted"`, which is `"exact"`',
        "23.1 % less of activations",
        "never: it keeps a bit more per element, with an error",
        "activation:exact",
        "",
        ("inverted-bert:inverted", "inverted-bert:exact, int4"),
    ),
    Method(
        "[Tempo]({})",
        ARXIV + "2210.10246",
        '`"tempo"`, which is `"exact"`',
        "batch 8 to 13 (1.6x; up to 2x)",
        "never: the same bytes, and a mask; fused attention needs less than both",
        "dropped:exact",
        "dropped:exact+mesa",
        ("tempo-bert:exact", "tempo-bert:exact, int4"),
    ),
    Method(
        "[In-place ABN]({})",
        ARXIV + "1712.02616",
        '`"inplace-abn"`, which is `"exact"`',
        "up to 50 % less; batch 256 to 512",
        "never: weights of BatchNorm stay as they are here",
        "norm:exact",
        "norm:int4-chain",
        ("inplace-abn-resnet:exact", "inplace-abn-resnet:int4-chain"),
    ),
    Method(
        "[Mesa]({})",
        ARXIV + "2111.11124",
        '`"mesa"`; `["exact", "mesa"]` keeps less',
        "DeiT-S 8459 to 3840 MB (2.2x)",
        "with eager attention, whose softmax other codecs keep whole",
        "dropped:mesa",
        "dropped:exact+mesa",
        ("mesa-deit-s:int8", "mesa-deit-s:exact, int8"),
    ),
    Method(
        "Mesa, scores that scatter by 4",
        "",
        '`"mesa"`',
        "",
        "",
        "attention-4:mesa",
    ),
    Method(
        "[ActNN]({})",
        ARXIV + "2104.14129",
        '`"int4"`, `"int2"`; no bits by layer',
        "batch 160 to 1056 (6.6x, 2 bits)",
        "bits by layer: no measurement here says that they beat equal ones",
        "norm:int4-chain",
        "",
        ("gact-resnet:int4-chain",),
    ),
    Method(
        "[GACT]({})",
        ARXIV + "2206.11357",
        '`"int4"`, with `modules` and `operations`',
        "batch 112 to 632 (5.6x), Swin-T; up to 8.1x less of activations",
        "bits by sensitivity, as ActNN",
        "activation:int4",
        "activation:exact+int4",
        ("gact-swin:exact, int4",),
    ),
    Method(
        "[AC-GC]({})",
        "https://proceedings.neurips.cc/paper_files/paper/2021/hash/e655c7716a4b3ea67f48c6322fc42ed6-Abstract.html",
        ABSENT,
        "15.1x of activations at 0.1 % accuracy, bits from a bound on the loss",
        "where bits should follow from a bound",
        ours=("kept-by-resnet:int4-chain",),
    ),
    Method(
        "[HyC-LoRA]({})",
        "https://mlsys.org/virtual/2025/poster/2975",
        ABSENT,
        "almost 2 bits for all that is kept, with LoRA",
        "LoRA at 2 bits: outliers apart, errors made up for by the adapter",
        ours=("peft:QLoRA, exact activations",),
    ),
    Method(
        "[COAT]({})",
        ARXIV + "2410.19313",
        ABSENT,
        "1.54x end to end, at 1.43x speed",
        "where a GPU multiplies in 8 bits: it is faster as well",
        ours=("llama:exact+int8",),
    ),
    Method(
        "[HOT]({})",
        ARXIV + "2503.21261",
        ABSENT,
        "up to 75 % less, at 2.6x speed",
        "as COAT; a Hadamard transform before 4 or 2 bits was tried here, and was never better",
        ours=("vit:exact+int8", "vit:exact+int4"),
    ),
    Method(
        "[Training under 256 KB]({})",
        ARXIV + "2206.15472",
        '`sparse_update="256KiB"`, by squared gradients; `precision="int8-sr"`',
        "141 KB, 2300x less",
        "on microcontrollers, with its own compiler",
    ),
    Method(
        "[Low-rank training, automatic rank]({})",
        ARXIV + "1905.10478",
        "`low_rank=16`, a rank that does not change",
        "7.4x to 137x fewer parameters",
        "for tensors of several factors; ranks that fall reached less here",
    ),
    Method(
        "[NeuroFlux]({})",
        ARXIV + "2402.14139",
        ABSENT,
        "2.3x to 6.1x faster in little memory",
        "it takes next to no time; each part has a loss of its own: another model",
        ours=("local:local, 4 parts", "local:exact", "local:int4-chain, microbatch 16"),
    ),
    Method(
        "[Coop]({})",
        ARXIV + "2311.00591",
        "predictions for CUDA say reserved over allocated bytes, and name `expandable_segments`",
        "up to 2x, with an allocator of its own",
        "inside of an allocator; a plan cannot move tensors",
        ours=("fragmentation",),
    ),
    Method(
        "[Integer-only networks, bounded ReLU]({})",
        ARXIV + "2006.11823",
        "`relu6`, `hardtanh`: a bit for each element, always",
        "a quarter of the memory, in inference",
        "inference in 8 bits, which is not what this package does",
        "bounded:exact",
    ),
)


def methods() -> str:
    """Every method, with figures of its row and of the one to choose instead."""
    head = (
        *("method", "here", "bytes per element", "error", "bias", "class"),
        *("instead", "the paper's figure", "ours on such a model", "when it still wins"),
    )
    measured = {f"{row['case']}:{row['setting']}": row for row in rows("methods")}
    lines = []
    for method in METHODS:
        row = measured.get(method.setting)
        figures = ("", "", "", "") if row is None else _figures(row)
        better = f"`{method.better.partition(':')[2]}`: {_short(measured[method.better])}" if method.better else ""
        name = method.name.format(method.link)
        lines.append((name, method.here, *figures, better, method.theirs, _ours(method), method.when))
    return markdown(head, lines, num_text=len(head))


def operators() -> str:
    """Every row that the table of methods may take its figures from."""
    lines, model = [], ""
    for row in rows("methods"):
        if row["case"] != "fragmentation":
            is_first, model = row["model"] != model, row["model"]
            lines.append((model if is_first else "", f"`{row['setting']}`", *_figures(row)))
    return markdown(("kept of", "setting", "bytes per element", "error", "bias", "class"), lines, num_text=2)


def local_learning() -> str:
    """Parts with losses of their own, beside techniques that leave the model as it is."""
    head = ("setting", "peak MB", "activations MB", "factor", "test accuracy", "of seeds", "CPU time")
    lines = []
    for setting, runs in by_setting(rows("local_learning")):
        first, values = runs[0], sorted(float(run["quality_value"]) for run in runs)
        lines.append(
            (
                setting,
                *(f"{float(first[f'{kind}_bytes']) / MB:.1f}" for kind in ("peak", "activations")),
                f"{float(first['factor']):.2f}x",
                f"{statistics.mean(values):.1%}",
                f"{values[0]:.1%} to {values[-1]:.1%}",
                f"{mean(runs, 'cpu_time_ratio'):.2f}x",
            )
        )
    return markdown(head, lines)


def fragmentation() -> str:
    """What is allocated and reserved on CUDA, by a replay."""
    found = [row for row in rows("methods") if row["case"] == "fragmentation"]
    lines = [
        (
            row["setting"],
            *(f"{float(row[f'{kind}_bytes']) / MB:.1f}" for kind in ("allocated", "reserved")),
            f"{float(row['quality_value']):.2f}x",
        )
        for row in found
    ]
    return markdown((found[0]["model"], "allocated MB", "reserved MB", "reserved over allocated"), lines)


def _figures(row: Row) -> tuple[str, str, str, str]:
    numbers = (float(row[name]) for name in ("quality_value", "bias"))
    return (f"{float(row['bytes_per_element']):.3f}", *(f"{n:.2g}" if n else "0" for n in numbers), row["loss_class"])


def _short(row: Row) -> str:
    size, error, *_ = _figures(row)
    return f"{size}, error {error}"


def _ours(method: Method) -> str:
    told = []
    for key in method.ours:
        case, _, setting = key.partition(":")
        if case == "fragmentation":
            found = [float(row["quality_value"]) for row in rows("methods") if row["case"] == case]
            told.append(f"{min(found):.2f} to {max(found):.2f} reserved over allocated, by a replay")
        elif case == "kept-by-resnet":
            kept = {
                row["setting"]: float(row["activations_bytes"])
                for row in rows("papers")
                if row["case"] == "gact-resnet"
            }
            told.append(f"`{setting}` {kept['plain'] / kept[setting]:.1f}x of activations at the peak, ResNet-50")
        elif case == "local":
            runs = dict(by_setting(rows("local_learning")))[setting]
            told.append(f"`{setting}` {float(runs[0]['factor']):.2f}x at {mean(runs, 'quality_value'):.1%}")
        elif case in _ELSEWHERE:
            file, model = _ELSEWHERE[case]
            (row,) = (row for row in rows(file) if row["setting"] == setting)
            told.append(f"{model} `{setting}` {float(row['factor']):.2f}x")
        else:
            (row,) = (row for row in rows("papers") if (row["case"], row["setting"]) == (case, setting))
            told.append(f"`{setting}` {_saving(row)}")
    return "; ".join(told)


def _saving(row: Row) -> str:
    ours = float(row[row["quantity"]])
    if row["quantity"] == "batch_ratio":
        return f"batch {row['batch']} to {row['largest_batch']} ({ours:.1f}x)"
    return f"{ours:.1%} less" if row["quantity"] == "saved" else f"{ours:.2f}x"
