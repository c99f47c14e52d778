"""Tables that the papers published, printed beside our measurements. One YAML file a table, under `papers/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from ..suites import PAPERS


@dataclass(frozen=True)
class Paper:
    source: str
    model: str
    columns: Sequence[str]
    rows: dict[str, Sequence[float]]  # per cent, but for perplexities
    lower_is_better: Sequence[str] = ()

    @property
    def averaged(self) -> tuple[str, ...]:
        """The columns that are shares, and count in an average."""
        return tuple(column for column in self.columns if column not in self.lower_is_better)

    def value(self, row: str, column: str) -> float | None:
        return self.rows[row][self.columns.index(column)] if column in self.columns else None

    def average(self, row: str, columns: Sequence[str]) -> float | None:
        """Over those of `columns` that the table has and that are shares."""
        values = [
            value for column in self.averaged if column in columns and (value := self.value(row, column)) is not None
        ]
        return sum(values) / len(values) if values else None


def load_paper(name: str) -> Paper:
    return Paper(**yaml.safe_load((PAPERS / f"{name}.yaml").read_text()))
