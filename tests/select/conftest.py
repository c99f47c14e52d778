"""Each test keeps its scores for itself, and draws no picture of them unless it looks at one."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewired.select.select.draw", lambda scores, choice, path: None)
