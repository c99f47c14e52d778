"""The report as a browser shows it: nobody's name breaks a table, refers to something or runs code."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from rewired.evaluate.report import markdown

from .made_up_results import (
    COMMAND,
    DATE,
    MMLU,
    renamed,
    results,
    section,
    tables,
)


class Page(HTMLParser):
    """What a browser makes of it: elements, what they refer to, and text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(MarkdownIt("commonmark").enable("table").render(text))

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


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_is_shown_as_it_is_whatever_it_looks_like(name: str) -> None:
    """Folders and columns are called as users like, and results may be somebody else's."""
    page = Page(markdown(renamed(name), COMMAND, DATE))
    assert page.references == []
    assert {"script", "a", "img"}.isdisjoint(page.elements)
    assert page.texts["h1"] == f"dense against {name}, tuned"
    assert page.cells.count(name) == 6, "as task and as model, in both tables of tasks, the paper's and the text's"


def test_what_a_suite_says_runs_no_code() -> None:
    script = "<script>alert(1)</script>"
    noted = replace(MMLU, note=script)
    page = Page(markdown(results(about=script, left_out={"HE+": script}, notes=[script], tasks=[noted]), script, DATE))
    assert "script" not in page.elements
    assert page.references == []


@pytest.mark.parametrize("name", ["a|b", "x | <script>", "a`b|c`"])
def test_a_name_moves_no_cell_of_the_markdown(name: str) -> None:
    text = markdown(renamed(name), COMMAND, DATE)
    row = tables(section(text, "Tasks"))[0][0]
    assert (row["metric"], row["relative"]) == ("acc_norm", "73.4 ± 1.2 %")
