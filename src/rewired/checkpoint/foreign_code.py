"""Code that a source's JSON files point to, and that transformers would fetch and run: none of it comes along."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from .rewired_config import is_ours

_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
# as transformers reads them: an implementation can be a kernel on the hub, and another configuration file names any
_ENTRIES = ("auto_map", "custom_pipelines", "configuration_files", *_IMPLEMENTATIONS)


def without_foreign_code(text: str) -> tuple[Any, list[str]]:
    """The JSON in `text` without entries that point to code; and those that are not ours, as users are told of them.

    Raises ValueError where it is not JSON.
    """
    foreign = list[str]()

    def keep(entries: dict[str, Any]) -> dict[str, Any]:
        for name in _ENTRIES:
            if name in entries and type(entries[name]) is not int:  # a number is that of a token in a vocabulary
                value = entries.pop(name)
                if not (name == "auto_map" and is_ours(value)):
                    foreign.append(f"{name} {json.dumps(value)}")
        return entries

    return json.loads(text, object_hook=keep), foreign


def copy_without_foreign_code(path: Path, copy: Path) -> list[str]:
    """Copy a file, of JSON all but the entries that point to code; returns these."""
    value, foreign = None, list[str]()
    if path.suffix == ".json":
        with suppress(ValueError, RecursionError):  # transformers cannot read such a file either
            value, foreign = without_foreign_code(path.read_text(encoding="utf-8"))
    if foreign:
        copy.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(path, copy)
    return foreign
