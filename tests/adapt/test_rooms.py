"""Rooms of `adapt` import only rooms below them, and nothing of what stands on top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewired.adapt

ADAPT = Path(str(rewired.adapt.__file__)).parent
ROOMS = ("recipe", "data", "model", "losses", "trainer")  # from the ground up


def imported(path: Path) -> Iterator[str]:
    """What a module of a room imports from outside of it, within `adapt`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rewired.adapt"):
            raise AssertionError(f"{path}: imports within adapt are relative")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    modules = list((ADAPT / room).glob("*.py"))
    assert len(modules) > 2
    for module in modules:
        assert set(imported(module)) <= set(ROOMS[: ROOMS.index(room)]), module


def test_there_are_no_other_rooms() -> None:
    assert {path.parent.name for path in ADAPT.glob("*/__init__.py")} == set(ROOMS)
