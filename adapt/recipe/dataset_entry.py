"""The entries of a recipe's `datasets`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from huggingface_hub.dataclasses import type_validator

from .unknown import check_known


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset of a mix; `path` is a dataset on the hub, a file (.json, .jsonl, .csv, .txt, .parquet), or a folder
    of such files.

    `name` is the hub's config (`7M`). `weight` is its share of the rows, relative to the others'; where no dataset has
    one, all rows of all are taken. `languages` and `sources` keep the rows whose `langdetect` and `source` are among
    them, as Infinity-Instruct's rows have them. Raises TypeError and ValueError.
    """

    path: str
    name: str = ""
    split: str = "train"
    weight: float | int | None = None
    languages: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(DatasetEntry).items():
            type_validator(name, getattr(self, name), hint)
        if not self.path:
            raise ValueError("its path is empty")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight is {self.weight}, and has to be above 0")

    @classmethod
    def from_recipe(cls, entry: Any) -> DatasetEntry:
        """A path, or a mapping with these fields. Raises ValueError for anything else."""
        known = [key.name for key in fields(cls)]
        if isinstance(entry, Mapping):
            check_known(entry, known, f"In `datasets`, {entry.get('path')} has the unknown key")
        try:
            return cls(**entry) if isinstance(entry, Mapping) else cls(entry)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"In `datasets`, {entry!r} is no dataset ({error}): give a path, or {', '.join(known)}."
            ) from None
