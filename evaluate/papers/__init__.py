"""Tables that the papers published, printed beside our measurements. One YAML file a table, under `papers/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def row(self, name: str) -> dict[str, float]:
        """The values of a row by column."""
        return dict(zip(self.columns, self.rows[name], strict=True))

    def average(self, values: Mapping[str, float]) -> float | None:
        """Over those of `values`, by column, that are shares in the table."""
        shares = [values[column] for column in self.columns if column in values and column not in self.lower_is_better]
        return sum(shares) / len(shares) if shares else None


def load_paper(name: str) -> Paper:
    return Paper(**yaml.safe_load((PAPERS / f"{name}.yaml").read_text()))
