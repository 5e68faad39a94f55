"""One self-contained HTML page: a picture and a table."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

_STYLE = """
body { font: 16px system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
pre { overflow-x: auto; font-size: 0.8rem; line-height: 1.2; }
img { max-width: 100%; }
"""


def write_page(table: Table, picture: Path, path: Path, title: str) -> Path:
    """Write `path` with the picture (a PNG) inlined and the table as text; it needs no other file and no network.

    Returns:
        `path`.
    """
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(table)
    rows = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    encoded = base64.b64encode(picture.read_bytes()).decode()
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>",
        f"<body><h1>{html.escape(title)}</h1>",
        f'<img alt="Peak memory of each run, by category" src="data:image/png;base64,{encoded}">',
        f"{rows}</body></html>",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
