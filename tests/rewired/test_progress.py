"""Progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from rewired import progress
from rewired.progress import Bars, Progress, announce


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(monkeypatch: pytest.MonkeyPatch, seconds: float, parts: int = 4) -> None:
    """`parts`, each of so many seconds."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress("row", parts) as told:
        for _ in range(parts):
            now += seconds
            told.advance()
    monkeypatch.undo()


def test_elsewhere_than_on_a_terminal_it_is_told_in_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work(monkeypatch, seconds=20)
    assert capsys.readouterr().err.splitlines() == ["row 1 of 4, about 60 s left", "row 3 of 4, about 20 s left"]
    work(monkeypatch, seconds=300, parts=2)
    assert capsys.readouterr().err.splitlines() == ["row 1 of 2, about 5 min left", "row 2 of 2, after 10 min"]


def test_what_is_done_at_once_is_not_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    work(monkeypatch, seconds=1)
    assert capsys.readouterr().err == ""


def test_other_ranks_tell_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    announce("Loading.")
    with Progress("row", 1) as told:
        told.advance()
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    with Progress("row", 2) as told:
        told.advance()
        assert "row" in terminal.getvalue() and "0/2" in terminal.getvalue() and "\n" not in terminal.getvalue()
    assert "1/2" in terminal.getvalue() and "row 1 of 2" not in terminal.getvalue()


def test_bytes_have_a_total_and_a_second_work_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Bars() as bars:
        told = []
        for count, total in ((10**6, 3 * 10**6), (2 * 10**6, 3 * 10**6), (10**6, 2 * 10**6)):
            bars.show_bytes("writing", count, total)
            told.append(bars.progress.tasks[0].fields["amount"])
    assert told == ["1 MB of 3 MB", "3 MB of 3 MB", "1 MB of 2 MB"]
