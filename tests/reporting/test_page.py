"""The page: stands alone, escapes what users wrote, and works in a browser where there is one."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from lightning_memsave import MemoryReport
from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.planner.recipes import resolve
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.page import write_page
from lightning_memsave.reporting.runs import Run
from tests.reporting.html_page import Page

MIB = 2**20
EVIL = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    "<!-- <script>",
    "<img src=x onerror='window.hacked = 3'>",
    '" onmouseover="window.hacked = 4',
    "<a href='javascript:window.hacked=5'>x</a>",
    "%{customdata} & &lt; <b>bold</b>",
    "line \u2028 separator",
]


def run(name, mib, accuracy=None, **values):
    report = MemoryReport(
        peak_bytes=None if mib is None else 6 * mib * MIB,
        by_category={} if mib is None else dict.fromkeys(CATEGORIES, mib * MIB),
        timeline=Timeline(events=(0, 1), by_category=dict.fromkeys(CATEGORIES, (0, (mib or 0) * MIB))),
    )
    metrics = {} if accuracy is None else {"test/accuracy": accuracy}
    return Run(name=name, report=report, metrics=metrics, peaks=((1, 2 * MIB), (2, 3 * MIB)), **values)


def page_of(runs, path, title="A title"):
    return Page(write_page(compare(runs), path, title).read_text("utf-8"))


def test_the_page_stands_alone(tmp_path):
    page = page_of([run("a", 3, 0.5), run("b", 1, 0.4)], tmp_path / "page.html")
    assert page.sources == []
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    text = (tmp_path / "page.html").read_text("utf-8")
    assert get_plotlyjs() in text
    policy = next(a["content"] for tag, a in page.attributes if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "http" not in policy
    own = text.replace(get_plotlyjs(), "")
    assert not re.findall(r"https?:", own), "nothing of ours names a server"


def test_it_can_be_read_on_a_phone_and_with_a_keyboard(tmp_path):
    page = page_of([run("a", 3, 0.5), run("b", 1, 0.4)], tmp_path / "page.html")
    viewport = next(a["content"] for _, a in page.attributes if a.get("name") == "viewport")
    assert viewport == "width=device-width, initial-scale=1"
    assert page.tags.count("button") == len(page.table[0])
    assert [a["data-run"] for tag, a in page.attributes if tag == "input"] == ["0", "1"]
    regions = [a for _, a in page.attributes if a.get("class") == "scroll"]
    assert regions
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in regions)


def test_charts_are_there_when_their_figures_are(tmp_path):
    everything = page_of([run("a", 3, 0.5), run("b", 1, 0.4)], tmp_path / "1.html")
    assert list(everything.figures) == ["tradeoff", "breakdown", "timeline", "drift"]
    bare = dataclasses.replace(run("a", 3), report=MemoryReport(), peaks=())
    nothing = page_of([bare], tmp_path / "2.html")
    assert nothing.figures == {}
    assert "No run has a measured peak." in nothing.text
    assert set(nothing.texts("peak")) == {"n/a"}


def test_the_first_line_is_the_answer(tmp_path):
    page = page_of([run("first", 4, 0.9), run("second", 1, 0.8)], tmp_path / "page.html")
    expected = "4.00x less memory with second: 6.0 MiB instead of 24.0 MiB, test/accuracy 0.8 against 0.9 of first."
    assert expected in page.text


def test_where_no_run_takes_less_the_first_line_says_no_factor(tmp_path):
    page = page_of([run("first", 1, 0.9), run("second", 4, 0.8)], tmp_path / "page.html")
    assert "The smallest peak is that of first: 6.0 MiB, test/accuracy 0.9." in page.text
    assert "less memory with" not in page.text


def test_what_has_to_be_known_stands_under_the_first_line(tmp_path):
    runs = [run("plain", None, 0.9), run("a", 1, 0.8)]
    page, notes = page_of(runs, tmp_path / "page.html"), compare(runs).notes
    assert len(notes) == 2
    assert all(page.text.index(note) < page.text.index("How much smaller") for note in notes)
    assert "factor" not in [text for text, _ in page.table[0]]


def test_settings_that_nobody_has_set_are_not_in_the_page(tmp_path):
    configs = [{"memsave": resolve(*each).as_dict()} for each in (("measure", {}), ("lossless", {"microbatch": 10}))]
    page = page_of([run(f"r{i}", 3 - i, config=config) for i, config in enumerate(configs)], tmp_path / "page.html")
    ((_, rows),) = [each for each in page.rows if each[0] is None]
    assert [[text for text, _ in row] for row in rows] == [
        ["setting", "1 r0", "2 r1"],
        ["memsave.recipe", "measure", "lossless, microbatch=10"],
        ["memsave.microbatching.size", "", "10"],
    ]


@pytest.mark.parametrize("name", EVIL)
def test_names_are_text_wherever_they_stand(tmp_path, name):
    runs = [run(name, 3, 0.5, config={name: name}, applied=(name,), loss_class=name), run("b", 1, 0.4)]
    runs = [dataclasses.replace(each, metrics={f"acc {name}": 0.5}) for each in runs]
    page = page_of(runs, tmp_path / "page.html", title=name)
    assert page.tags.count("script") == 3  # the data, plotly, ours
    assert not {"img", "a", "b"} & set(page.tags)
    assert page.handlers == []
    assert page.text.count(name) >= 8
    assert page.texts("run")[0].startswith(f"1 {name}")
    drawn = next(trace for trace in page.figures["tradeoff"]["data"] if trace["meta"] == {"run": 0})
    (shown,) = drawn["customdata"]
    assert re.sub(r"<br>", "", shown).count("<") == 0


# ------------------------------------------------------------------ in a browser (`make browser` gets one)
ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    (
        str(found)
        for found in (
            ROOT / ".browser" / "chromium",
            *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
        )
        if found and Path(found).is_file()
    ),
    None,
)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: `make browser`")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--no-zygote"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, tmp_path):
    """A page that fails the test on any message, error or request beside its own file."""
    noise, contexts = [], []

    def open_page(runs, **options):
        path = write_page(compare(runs), tmp_path / "page.html", "A title")
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: noise.append(message.text))
        tab.on("pageerror", lambda error: noise.append(str(error)))
        tab.on("request", lambda request: noise.append(request.url) if request.url != path.as_uri() else None)
        tab.goto(path.as_uri())
        tab.wait_for_selector(".chart .main-svg")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert noise == []


RUNS = [run("baseline", 4, 0.9), run("small", 1, 0.8), run("bad", 2, 0.1), run("unknown", None)]


@in_browser
def test_it_loads_draws_and_hovers(opened):
    tab = opened(RUNS)
    assert tab.locator(".chart .main-svg").count() >= 4
    assert tab.locator("#breakdown .bars .point").count() == 3 * len(CATEGORIES)
    tab.locator("#tradeoff .scatterlayer .point").nth(0).hover(force=True)  # the smallest is drawn first
    hover = tab.locator("#tradeoff .hoverlayer").text_content()
    assert "small" in hover
    assert f"{6 * MIB} bytes" in hover


@in_browser
def test_it_sorts_by_figure_and_leaves_what_is_missing_last(opened):
    tab = opened(RUNS)
    names = tab.locator("#figures-table tbody th")
    tab.get_by_role("button", name="peak bytes").click()
    assert [text.split()[1] for text in names.all_text_contents()] == ["small", "bad", "baseline", "unknown"]
    tab.get_by_role("button", name="peak bytes").press("Enter")  # the keyboard does the same
    assert [text.split()[1] for text in names.all_text_contents()] == ["baseline", "bad", "small", "unknown"]
    assert tab.locator("th[aria-sort=descending]").count() == 1


@in_browser
def test_runs_can_be_hidden_and_come_back(opened):
    tab = opened(RUNS)
    box = tab.get_by_label("2 small")
    box.focus()
    box.press("Space")
    assert tab.locator("#figures-table tbody tr:visible").count() == 3
    assert tab.locator("#breakdown .bars .point").count() == 2 * len(CATEGORIES)
    assert tab.locator("#tradeoff .scatterlayer .point").count() == 2
    assert "small" not in tab.locator("#breakdown").text_content()
    box.press("Space")
    assert tab.locator("#figures-table tbody tr:visible").count() == 4
    assert tab.locator("#breakdown .bars .point").count() == 3 * len(CATEGORIES)


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_system_and_its_text_can_be_read(opened, scheme):
    tab = opened(RUNS, color_scheme=scheme)
    luminance = """(selector) => {
        const found = document.querySelector(selector);
        const style = getComputedStyle(found);
        const colour = found instanceof SVGElement ? style.fill : style.color;
        const part = (text) => text.match(/\\d+/g).slice(0, 3).map((c) => c / 255)
            .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
        const both = [part(colour), part(getComputedStyle(document.body).backgroundColor)].map(light);
        return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    }"""
    for selector in ("h1", "section p", "td", "#breakdown .xtick text"):
        assert tab.evaluate(luminance, selector) >= 4.5, selector  # WCAG AA
    tab.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    tab.wait_for_timeout(300)
    assert tab.evaluate(luminance, "#breakdown .xtick text") >= 4.5


@in_browser
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_screen(opened, width):
    tab = opened(
        [*RUNS, run("a name that is much too long " * 4 + "x" * 60, 3, 0.5)], viewport={"width": width, "height": 800}
    )
    assert tab.evaluate("document.documentElement.scrollWidth") == width


LONG = "microbatch=10, activations=[exact, int4], checkpointing=blocks, optimizer_state=4bit"


@in_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_no_text_of_a_picture_is_cut(opened, width):
    tab = opened([*RUNS[:3], run(LONG, 3, 0.5)], viewport={"width": width, "height": 800})
    outside = """(width) => [...document.querySelectorAll(".chart text")].filter((text) => {
        const at = text.getBoundingClientRect(), chart = text.closest(".chart").getBoundingClientRect();
        return at.width && (at.left < 0 || at.right > width || at.top < chart.top || at.bottom > chart.bottom);
    }).map((text) => text.textContent)"""
    assert tab.evaluate(outside, width) == []
    lines = tab.locator("#breakdown .textpoint").nth(3).locator("tspan.line").all_text_contents()
    assert " ".join(line for line in lines if line.strip()) == f"4 {LONG}: 18.0\u00a0MiB,\u00a01.3x\u00a0less"


@in_browser
def test_axes_fit_what_is_drawn(opened):
    tab = opened(RUNS)
    axes = """(name) => {
        const {xaxis, yaxis} = document.getElementById(name)._fullLayout;
        return [xaxis.range, yaxis.range];
    }"""
    (first, last), _ = tab.evaluate(axes, "breakdown")
    assert first == 0
    assert 24 <= last <= 1.1 * 24, "the longest bar reaches the end"
    for (low, high), values in zip(tab.evaluate(axes, "tradeoff"), ((6, 24), (0.1, 0.9)), strict=True):
        assert low < values[0] < values[1] < high
        assert high - low < 1.4 * (values[1] - values[0]), "most of the picture is what the runs span"


@in_browser
def test_evil_names_do_nothing_but_show(opened):
    tab = opened([run(name, i + 1, i / 10, config={name: i}) for i, name in enumerate(EVIL)])
    for point in range(len(EVIL)):
        tab.locator("#tradeoff .scatterlayer .point").nth(point).hover(force=True)
    assert tab.evaluate("window.hacked") is None
    assert "<b>bold</b>" in tab.locator("#breakdown").text_content()
