"""A small model, refitted once for all tests of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewired.convert import Conversion, RefitRequest, Request, convert


@pytest.fixture(scope="module")
def request_of(text: Path) -> Request:
    return Request([{"layers": "1-4", "preset": "ladder"}], refit=RefitRequest(str(text), 6144))


@pytest.fixture(scope="module")
def refitted(dense: Path, request_of: Request, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    return convert(dense, tmp_path_factory.mktemp("refitted") / "model", request_of)
