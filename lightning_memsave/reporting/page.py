"""One self-contained HTML page for compared runs (needs plotly, in the extra `compare`).

It needs no other file and no network: plotly's own script, the style and ours are in it, and its policy forbids the
browser to load anything. Whatever a user wrote is escaped for where it stands: as HTML, as JSON inside a script
element, as text of plotly's.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path

from lightning_memsave.core.units import format_bytes
from lightning_memsave.reporting.comparison import Comparison, ComparisonRow
from lightning_memsave.reporting.figures import RUN_COLOURS, draw

_QUESTIONS = {
    "tradeoff": (
        "How much smaller, at what cost?",
        "Each mark is a run. The line is the Pareto front of all runs: no other is both smaller and better.",
    ),
    "breakdown": (
        "Where did the bytes go?",
        "What was alive at the peak of each run, and how many times less that is than without memory saving.",
    ),
    "timeline": (
        "How does a step fill the memory?",
        "The step with the highest peak. The order is true, not the time.",
    ),
    "drift": ("Does it grow?", "The peak of each step that was measured."),
}
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(comparison: Comparison, path: Path, title: str) -> Path:
    """Write the page of a comparison.

    Returns:
        `path`.
    """
    from plotly.offline import get_plotlyjs

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_page(comparison, title, get_plotlyjs())), encoding="utf-8")
    return path


def _page(comparison: Comparison, title: str, plotly: str) -> Iterator[str]:
    here = files("lightning_memsave.reporting")
    figures = draw(comparison)
    # Plotly's own JSON, so that it is what plotly's script reads.
    drawn = ", ".join(f"{json.dumps(name)}: {figure.to_json()}" for name, figure in figures.items())
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield f"<title>{html.escape(title)}</title>"
    yield f"<style>{here.joinpath('page.css').read_text('utf-8')}</style></head><body>"
    yield f"<header><h1>{html.escape(title)}</h1><p>{html.escape(headline(comparison))}</p>"
    yield "".join(f'<p class="note">{html.escape(note)}</p>' for note in comparison.notes) + "</header><main>"
    yield from _toggles(comparison)
    for name in figures:
        question, answer = _QUESTIONS[name]
        yield f'<section><h2>{question}</h2><p>{answer}</p><div class="chart" id="{name}" role="img"'
        yield f' aria-label="{question} The figures are in the table below."></div></section>'
    yield from _table(comparison)
    yield from _settings(comparison)
    yield "</main><footer>Peaks are live tensor bytes on CPU, each storage once, and the allocator's peak on CUDA."
    yield " MiB and GiB are powers of 1024. A figure that was not measured is n/a.</footer>"
    yield f'<script type="application/json" id="figures">{_in_script(f"{{{drawn}}}")}</script>'
    yield f"<script>{plotly}</script><script>{here.joinpath('page.js').read_text('utf-8')}</script></body></html>"


def headline(comparison: Comparison) -> str:
    """Return the answer in one sentence."""
    measured = [run for run in comparison.runs if run.report.peak_bytes is not None]
    if not measured:
        return "No run has a measured peak."
    best = max(measured, key=lambda run: (run.report.factor or 0, -(run.report.peak_bytes or 0)))
    report, first, quality = best.report, comparison.runs[0], comparison.quality
    parts = [f"The smallest peak is that of {best.name}: {format_bytes(report.peak_bytes)}"]
    if report.factor is not None and report.factor > 1:
        before = format_bytes(report.baseline_peak_bytes)
        sizes = f"{format_bytes(report.peak_bytes)} instead of {before}"
        parts = [f"{report.factor:.2f}x less memory with {best.name}: {sizes}"]
    if quality is not None and (value := quality.of(best)) is not None:
        plain = quality.of(first)
        against = "" if plain is None or best is first else f" against {plain:.4g} of {first.name}"
        parts.append(f"{quality.name} {value:.4g}{against}")
    return ", ".join(parts) + "."


def _in_script(text: str) -> str:
    """Return JSON for a script element, which ends at the first `</` and changes its mind at `<!--`."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _breakable(name: str) -> str:
    """Return a name as HTML that goes on in the next line between its words."""
    return re.sub(r"(?<=[._/=])(?=\w)", "<wbr>", html.escape(name))


def _toggles(comparison: Comparison) -> Iterator[str]:
    yield "<fieldset><legend>Runs</legend>"
    for position, run in enumerate(comparison.runs):
        colour = RUN_COLOURS[position % len(RUN_COLOURS)]
        yield f'<label><input type="checkbox" checked data-run="{position}"><span class="swatch" '
        yield f'style="background:{colour}"></span>{position + 1} {_breakable(run.name)}</label>'
    yield "</fieldset>"


def _table(comparison: Comparison) -> Iterator[str]:
    yield '<section><h2>All figures</h2><div class="scroll" tabindex="0" role="region" aria-label="All figures">'
    yield '<table id="figures-table"><thead><tr>'
    for heading in ("run", *(row.heading for row in comparison.rows)):
        yield f'<th scope="col" aria-sort="none"><button type="button">{html.escape(heading)}</button></th>'
    yield "</tr></thead><tbody>"
    for position, run in enumerate(comparison.runs):
        mark = ' <span title="on the Pareto front">●</span>' if position in comparison.front else ""
        yield f'<tr data-run="{position}"><th scope="row" data-value="{position}">{position + 1} '
        yield f"{_breakable(run.name)}{mark}</th>{''.join(_cells(comparison.rows, position))}</tr>"
    yield "</tbody></table></div>"
    if comparison.quality is not None:
        yield f"<p>● on the Pareto front of peak and {html.escape(comparison.quality.name)} "
        yield f"({comparison.quality.direction}).</p>"
    yield "</section>"


def _cells(rows: Iterable[ComparisonRow], position: int) -> Iterator[str]:
    for row in rows:
        value = row.values[position]
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        exact = "" if missing else html.escape(str(value))
        yield f'<td data-value="{exact}">{html.escape(row.texts[position])}</td>'


def _settings(comparison: Comparison) -> Iterator[str]:
    yield "<section><h2>Settings that differ</h2>"
    if not comparison.differences:
        yield "<p>None that were logged.</p></section>"
        return
    yield '<div class="scroll" tabindex="0" role="region" aria-label="Settings that differ">'
    yield '<table class="settings"><thead><tr>'
    yield '<th scope="col">setting</th>'
    for position, run in enumerate(comparison.runs):
        yield f'<th scope="col" data-run="{position}">{position + 1} {_breakable(run.name)}</th>'
    yield "</tr></thead><tbody>"
    for name, values in comparison.differences.items():
        cells = (f'<td data-run="{position}">{_breakable(value)}</td>' for position, value in enumerate(values))
        yield f'<tr><th scope="row">{_breakable(name)}</th>{"".join(cells)}</tr>'
    yield "</tbody></table></div></section>"
