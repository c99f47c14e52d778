"""What was read of a file: rows, and what of them is left out or cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# problems of rows that are none of the data's
FILTERED = "filtered"  # the recipe does not ask for it
NOTHING_LEFT = "nothing left"  # it is cut before there is something to learn


@dataclass
class Tally:
    """What this process has read of a streamed file; rows that are read again count once."""

    name: str
    longest: int | None
    rows: int = 0
    bad: int = 0
    first_problem: str = ""
    cut: int = 0
    lost: int = 0  # tokens
    emptied: int = 0  # rows that end before there is something to learn

    def count(self, index: int, found: Mapping[str, Any]) -> None:
        if index < self.rows:
            return
        self.rows, problem = index + 1, found["problem"]
        self.emptied += problem == NOTHING_LEFT
        if problem not in ("", FILTERED, NOTHING_LEFT):
            self.bad, self.first_problem = self.bad + 1, self.first_problem or problem
        if self.longest and found["length"] > self.longest:
            self.cut, self.lost = self.cut + 1, self.lost + found["length"] - self.longest

    def note(self) -> str:
        told = f"{self.name}: {self.rows:,} rows read by the first process since it was last started"
        if self.bad:
            told += _told_bad(self.bad, self.first_problem)
        if self.cut:
            told += _told_cut(self.cut, self.longest, self.lost)
        return told + (told_emptied(self.emptied) if self.emptied else "")


def note_on_file(name: str, problems: Sequence[str], lengths: np.ndarray, longest: int | None) -> str:
    """On a file that was read whole: each row's problem, if it has one, and the `lengths` of those kept, in tokens."""
    told = f"{name}: {len(lengths):,} rows, {int(lengths.sum()):,} tokens"
    if filtered := sum(problem == FILTERED for problem in problems):
        told += f"; {filtered:,} rows filtered out"
    if bad := [problem for problem in problems if problem not in ("", FILTERED)]:
        told += _told_bad(len(bad), bad[0])
    if longest and (longer := lengths[lengths > longest]).size:
        lost = int(longer.sum()) - longest * longer.size
        told += f"{_told_cut(longer.size, longest, lost)} ({lost / lengths.sum():.1%})"
    return told


def told_emptied(count: int) -> str:
    return f"; in {count:,} of them nothing to learn is left, and they are left out"


def _told_bad(count: int, first: str) -> str:
    return f"; {count:,} bad rows left out, the first because {first}"


def _told_cut(count: int, longest: int | None, lost: int) -> str:
    return f"; {count:,} rows are longer than {longest} tokens and lose {lost:,} in all"
