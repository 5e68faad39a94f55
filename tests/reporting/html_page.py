"""Reads a comparison page as a browser would: tags, text, table and the figures' data."""

from __future__ import annotations

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.sources, self.rows, self.handlers = [], "", [], [], []
        self.attributes = []
        self._script, self._cell, self._figures = None, None, ""
        self.feed(text)
        self.close()
        self.figures = json.loads(self._figures)
        (self.table,) = [rows for table, rows in self.rows if table == "figures-table"]

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.attributes.append((tag, attributes))
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name in attributes if name.startswith("on")]
        if tag == "script":
            self._script = attributes.get("id", "code")
        elif tag == "table":
            self.rows.append((attributes.get("id"), []))
        elif tag == "tr":
            self.rows[-1][1].append([])
        elif tag in ("td", "th"):
            self._cell = ["", attributes.get("data-value")]
            self.rows[-1][1][-1].append(self._cell)

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None
        elif tag in ("td", "th"):
            self._cell = None

    def handle_data(self, data):
        if self._script == "figures":
            self._figures += data
        elif self._script is None:
            self.text += data
            if self._cell is not None:
                self._cell[0] += data.replace("\n", "")

    def _position(self, heading):
        return [text for text, _ in self.table[0]].index(heading)

    def column(self, heading):
        """Each run's exact value."""
        return [row[self._position(heading)][1] for row in self.table[1:]]

    def texts(self, heading):
        """Each run's text."""
        return [row[self._position(heading)][0] for row in self.table[1:]]
