"""Photograph a comparison page for docs/seeing.md: `python docs/pictures.py PAGE` (needs `make browser`)."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
SIZES = {"desktop": (1280, 1000, "light"), "phone": (390, 1700, "dark")}


def photograph(address: str) -> None:
    """Write one picture for each of `SIZES`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=DOCS.parent / ".browser" / "chromium", args=["--no-sandbox", "--no-zygote"]
        )
        for name, (width, height, scheme) in SIZES.items():
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(address)
            page.wait_for_selector("#breakdown .bars")
            page.screenshot(path=DOCS / "images" / f"compare-{name}.png")
        chromium.close()


if __name__ == "__main__":
    photograph(Path(sys.argv[1]).resolve().as_uri())
