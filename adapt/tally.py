"""What was read of a file: rows, and what of them is left out or cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FILTERED = "filtered"  # the problem of a row that the recipe does not ask for


@dataclass
class Tally:
    """What this process has read of a streamed file, by numbers of rows: some are read again, and count once."""

    name: str
    longest: int | None
    rows: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    cut: dict[int, int] = field(default_factory=dict)  # tokens lost

    def count(self, index: int, found: Mapping[str, Any]) -> None:
        self.rows = max(self.rows, index + 1)
        if found["problem"] not in ("", FILTERED):
            self.bad[index] = found["problem"]
        if self.longest and found["length"] > self.longest:
            self.cut[index] = found["length"] - self.longest

    def note(self) -> str:
        told = f"{self.name}: {self.rows:,} rows read by the first process since it was last started"
        if self.bad:
            told += _told_bad(list(self.bad.values()))
        if self.cut:
            told += _told_cut(len(self.cut), self.longest, sum(self.cut.values()))
        return told


def note_on_file(name: str, problems: Sequence[str], lengths: np.ndarray, longest: int | None) -> str:
    """On a file that was read whole: each row's problem, if it has one, and the `lengths` of those kept, in tokens."""
    told = f"{name}: {len(lengths):,} rows, {int(lengths.sum()):,} tokens"
    if filtered := sum(problem == FILTERED for problem in problems):
        told += f"; {filtered:,} rows filtered out"
    if bad := [problem for problem in problems if problem not in ("", FILTERED)]:
        told += _told_bad(bad)
    if longest and (longer := lengths[lengths > longest]).size:
        lost = int(longer.sum()) - longest * longer.size
        told += f"{_told_cut(longer.size, longest, lost)} ({lost / lengths.sum():.1%})"
    return told


def _told_bad(problems: Sequence[str]) -> str:
    return f"; {len(problems):,} bad rows left out, the first because {problems[0]}"


def _told_cut(count: int, longest: int | None, lost: int) -> str:
    return f"; {count:,} rows are longer than {longest} tokens and lose {lost:,} in all"
