"""Fixtures of the tests of reports."""

from __future__ import annotations

import pytest

from rewired.evaluate import report


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plots, which take their time."""
    monkeypatch.setattr(report, "draw", lambda results, folder: [])
