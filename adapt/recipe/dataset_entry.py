"""The entries of a recipe's `datasets`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset of a mix; `path` is a dataset on the hub, a file (.json, .jsonl, .csv, .txt, .parquet), or a folder
    of such files.

    `name` is the hub's config (`7M`). `weight` is its share of the rows, relative to the others'; where no dataset has
    one, all rows of all are taken. `languages` and `sources` keep the rows whose `langdetect` and `source` are among
    them, as Infinity-Instruct's rows have them.
    """

    path: str
    name: str | None = None
    split: str = "train"
    weight: float | None = None
    languages: Sequence[str] = ()
    sources: Sequence[str] = ()

    @classmethod
    def from_recipe(cls, entry: Any) -> DatasetEntry:
        """A path, or a mapping with these fields. Raises ValueError for anything else."""
        if isinstance(entry, str) and entry:
            return cls(entry)
        known = [one.name for one in fields(cls)]
        if not isinstance(entry, Mapping) or not entry.get("path") or not isinstance(entry["path"], str):
            raise ValueError(f"In `datasets`, {entry!r} has no path: each is a path, or has {', '.join(known)}.")
        for key in entry:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f": did you mean '{near[0]}'?" if near else f": there are {', '.join(known)}."
                raise ValueError(f"In `datasets`, {entry['path']} has the unknown key '{key}'{hint}")
        for key in ("name", "split"):
            if not isinstance(entry.get(key, ""), str):  # YAML reads 0625 as a number
                raise ValueError(
                    f"In `datasets`, {entry['path']} has {key} {entry[key]!r}, which is not a string: put it in quotes."
                )
        if not isinstance(entry.get("weight", 1.0), int | float) or not 0 < entry.get("weight", 1.0) < math.inf:
            raise ValueError(f"In `datasets`, {entry['path']} has the weight {entry['weight']!r}: give one above 0.")
        for key in ("languages", "sources"):
            if not isinstance(entry.get(key, []), list):
                raise ValueError(f"In `datasets`, {entry['path']} has {key} {entry[key]!r}: give a list.")
        return cls(**entry)
