"""Rooms import only those below them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import rewired

# lowest first; rooms of one floor do not import each other
FLOORS = (
    ("model",),
    ("grid", "sources"),
    ("checkpoint", "text"),
    ("evaluate", "refit", "serve"),
    ("rotate",),
    ("convert",),
    ("adapt", "select"),
    ("comm", "plan"),
    ("bench",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SOURCE = Path(rewired.__file__).parent


@pytest.mark.parametrize("room", FLOOR_OF)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    modules = list((SOURCE / room).rglob("*.py"))
    assert modules
    for path in modules:
        for name in imported_rooms(path):
            assert name == room or FLOOR_OF[name] < FLOOR_OF[room], f"{path} imports rewired.{name}"


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a module imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("rewired.")} & set(FLOOR_OF)


def test_the_model_s_files_import_only_what_is_there_where_a_checkpoint_loads() -> None:
    """They travel in checkpoints, to where rewired is not installed; transformers takes them out of one flat folder."""
    known = {*sys.stdlib_module_names, "torch", "transformers", "huggingface_hub"}
    for path in (SOURCE / "model").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= known, path
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.level == 0 and (node.module or "").split(".")[0] in known), path
