from __future__ import annotations

from html.parser import HTMLParser

from lightning_memsave import MemoryReport
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.reporting.chart import draw_comparison
from lightning_memsave.reporting.console import comparison_table
from lightning_memsave.reporting.page import write_page


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.sources = [], "", []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_escapes_names(tmp_path):
    name = "<script>alert(1)</script> {x}"
    reports = {name: MemoryReport(peak_bytes=2**20, by_category={c: 2**20 // 6 for c in CATEGORIES})}
    picture = draw_comparison(reports, tmp_path / "memory.png", name)
    page = write_page(comparison_table(reports, title=name), picture, tmp_path / "index.html", name)
    reader = Reader()
    reader.feed(page.read_text("utf-8"))
    assert "script" not in reader.tags
    assert name in reader.text
    assert "1.0 MiB" in reader.text
    assert len(reader.sources) == 1
    assert reader.sources[0].startswith("data:image/png;base64,")
