"""Code that a source's JSON files point to, and that transformers would fetch and run: none of it comes along."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .rewired_config import is_ours

_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
# as transformers reads them: an implementation can be a kernel on the hub, and another configuration file names any
_ENTRIES = ("auto_map", "custom_pipelines", "configuration_files", *_IMPLEMENTATIONS)

Dropped = list[tuple[str, Any]]  # entries that pointed to code, by name


def without_foreign_code(text: str) -> tuple[Any, Dropped]:
    """The JSON in `text` without entries that point to code, and these. Raises ValueError where it is not JSON."""
    dropped: Dropped = []

    def keep(entries: dict[str, Any]) -> dict[str, Any]:
        for name in _ENTRIES:
            if name in entries and type(entries[name]) is not int:  # a number is that of a token in a vocabulary
                dropped.append((name, entries.pop(name)))
        return entries

    return json.loads(text, object_hook=keep), dropped


def copy_without_foreign_code(path: Path, copy: Path) -> Dropped:
    """Copy a file, of JSON all but the entries that point to code; returns these."""
    value, dropped = None, Dropped()
    if path.suffix == ".json":
        with suppress(ValueError, RecursionError):  # transformers cannot read such a file either
            value, dropped = without_foreign_code(path.read_text(encoding="utf-8"))
    if dropped:
        copy.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(path, copy)
    return dropped


def note_on_dropped(dropped: Mapping[str, Dropped]) -> list[str]:
    """A note for users on what was dropped of each file, apart from entries of our own."""
    entries = [
        f"{name} {json.dumps(value)} of {file}"
        for file, entries in dropped.items()
        for name, value in entries
        if not (name == "auto_map" and is_ours(value))
    ]
    if not entries:
        return []
    return [f"The source's own code does not come along, and what points to it was dropped: {'; '.join(entries)}."]
