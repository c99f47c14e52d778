"""The report as a page: nobody's name breaks a table, leaves the page or runs code."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rewired.evaluate.report import markdown, write_report

from .made_up_results import (
    COMMAND,
    DATE,
    MMLU,
    renamed,
    results,
    section,
    shares,
    tables,
)


class Page(HTMLParser):
    """What a browser makes of it: elements, what they refer to, and text by element."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self._open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts[tag] = self.texts.get(tag, "") + data
        if {"td", "th"} & set(self._open):
            self.cells[-1] += data


def test_the_page_is_one_file(tmp_path: Path) -> None:
    """It can be sent: its pictures are in it, and it asks nobody for anything."""
    write_report(results(**shares("MMLU", "PIQA")), COMMAND, DATE, tmp_path)
    page = Page(tmp_path / "report.html")
    assert len(page.references) == 2
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    raw = (tmp_path / "report.html").read_text()
    assert "://" not in raw
    assert not re.search(r"@import|url\(", raw)
    assert {"table", "style", "title", "h1", "h2", "img"} <= set(page.elements)
    assert page.texts["title"] == page.texts["h1"] == "dense against hybrid, tuned"
    assert "73.4 ± 1.2 %" in page.cells


NAMES = {
    "a script": "<script>alert(1)</script>",
    "the end of the title": "</title><img src=x onerror=alert(1)>",
    "a cell's end": "a|b",
    "a script in a cell": "x | <script>",
    "an entity": "&lt;b&gt;",
    "a format": "{body}{0}",
    "a link": "[x](http://localhost/)",
    "a picture": "![x](http://localhost/x.png)",
    "an address": "<http://localhost/>",
    "emphasis": "a*b*c",
    "underscores": "__init__",
    "code": "`a`",
}


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_is_shown_as_it_is_whatever_it_looks_like(name: str, tmp_path: Path) -> None:
    """Folders and columns are called as users like, and results may be somebody else's."""
    write_report(renamed(name), COMMAND, DATE, tmp_path)
    page = Page(tmp_path / "report.html")
    assert page.references == []
    assert {"script", "a", "img"}.isdisjoint(page.elements)
    assert page.texts["title"] == page.texts["h1"] == f"dense against {name}, tuned"
    assert page.cells.count(name) == 6, "as task and as model, in both tables of tasks, the paper's and the text's"


@pytest.mark.usefixtures("_undrawn")
def test_what_a_suite_says_runs_no_code(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    noted = replace(MMLU, note=script)
    write_report(
        results(about=script, left_out={"HE+": script}, notes=[script], tasks=[noted]), script, script, tmp_path
    )
    page = Page(tmp_path / "report.html")
    assert "script" not in page.elements
    assert page.references == []


@pytest.mark.parametrize("name", ["a|b", "x | <script>", "a`b|c`"])
def test_a_name_moves_no_cell_of_the_markdown(name: str) -> None:
    text = markdown(renamed(name), COMMAND, DATE)
    row = tables(section(text, "Tasks"))[0][0]
    assert (row["metric"], row["relative"]) == ("acc_norm", "73.4 ± 1.2 %")
