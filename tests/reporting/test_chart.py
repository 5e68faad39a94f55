import re
import warnings
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.image import imread

from lightning_memsave import MemoryReport
from lightning_memsave.reporting.chart import draw_comparison

MIB = 2**20
CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "temporary", "data")
ODD_NAMES = ["costs $5", "$5 and $6", r"$\frac$", "<script>alert(1)</script>", "a & b", "100 %", "12", "_hidden", r"\n"]


def report_of(sizes_mib, baseline_mib=None):
    return MemoryReport(
        peak_bytes=sum(sizes_mib) * MIB,
        by_category={c: size * MIB for c, size in zip(CATEGORIES, sizes_mib, strict=True)},
        baseline_peak_bytes=None if baseline_mib is None else baseline_mib * MIB,
    )


def texts_of(path):
    """Every text of an SVG, as its reader sees it."""
    root = ET.parse(path).getroot()
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]


def drawn(reports, path, title="A title"):
    with mpl.rc_context({"svg.fonttype": "none"}):
        assert draw_comparison(reports, path, title) == path
    return texts_of(path)


REPORTS = {
    "measure (baseline)": report_of((10, 20, 30, 40, 50, 60), 210),
    "microbatch 10 + 8-bit": report_of((10, 20, 10, 20, 5, 5), 210),
}


def test_svg_names_every_run_category_and_figure(tmp_path):
    texts = drawn(REPORTS, tmp_path / "memory.svg")
    for expected in ("A title", *REPORTS, *(c.replace("_", " ") for c in CATEGORIES)):
        assert expected in texts
    assert "210.0 MiB" in texts
    assert "70.0 MiB  3.0x less" in [re.sub("\xa0", " ", text) for text in texts]
    assert any("MiB" in text and "peak" in text for text in texts)


def test_bars_are_as_long_as_their_categories(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    bars = []
    barh = Axes.barh

    def recording(self, y, width, **options):
        container = barh(self, y, width, **options)
        bars.append((options["label"], [(patch.get_x(), patch.get_width()) for patch in container]))
        return container

    monkeypatch.setattr(Axes, "barh", recording)
    draw_comparison(REPORTS, tmp_path / "memory.svg", "")
    assert [label for label, _ in bars] == [c.replace("_", " ") for c in CATEGORIES]
    assert [[width for _, width in patches] for _, patches in bars] == [
        [10, 10],
        [20, 20],
        [30, 10],
        [40, 20],
        [50, 5],
        [60, 5],
    ]
    assert [[start for start, _ in patches] for _, patches in bars] == [
        [0, 0],
        [10, 10],
        [30, 30],
        [60, 40],
        [100, 60],
        [150, 65],
    ]


def test_png_is_a_picture(tmp_path):
    path = tmp_path / "memory.png"
    assert draw_comparison(REPORTS, path, "A title") == path
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(path)
    assert pixels.shape[1] == 9 * 150
    assert len({tuple(pixel) for pixel in pixels[::10, ::10, :3].reshape(-1, 3).round(2)}) >= len(CATEGORIES)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_drawn_as_they_are(tmp_path, name):
    texts = drawn(
        {name: report_of((1, 2, 3, 4, 5, 6)), "other": report_of((1, 1, 1, 1, 1, 1))}, tmp_path / "a.svg", name
    )
    assert texts.count(name) == 2  # as a run and as the title
    draw_comparison({name: report_of((1, 2, 3, 4, 5, 6))}, tmp_path / "a.png", name)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_run_without_measurement_has_no_figure(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = drawn({"short": MemoryReport()}, tmp_path / "a.svg")
    assert "short" in texts
    assert "n/a" in texts
    assert not any("0.0 MiB" in text for text in texts)


def test_a_run_that_takes_more_is_not_called_less(tmp_path):
    texts = drawn({"worse": report_of((1, 1, 1, 1, 1, 1), 3)}, tmp_path / "a.svg")
    assert "6.0 MiB" in texts
    assert not any("less" in text for text in texts)


def test_drawing_opens_no_window_and_keeps_no_state(tmp_path):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    draw_comparison(REPORTS, tmp_path / "a.png", "")
    assert pyplot.get_fignums() == before
