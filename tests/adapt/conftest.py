"""A tiny Llama that chats, and conversations for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .world import conversations, distillation, make_chat, write_rows


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat(tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", conversations())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What datasets keeps of an earlier run must not answer for this one."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))


@pytest.fixture
def keys(dense: Path, rows: Path, tmp_path: Path) -> dict[str, Any]:
    return distillation(dense, rows, tmp_path / "out")
