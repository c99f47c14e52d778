"""Statistics of the rows of a file: how many were read, left out and cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewired import quantities

# reasons to leave a row out that are no fault of it
FILTERED = "filtered"  # by the recipe
NOTHING_LEFT = "nothing left"  # it is cut before its first token that is learnt


@dataclass
class StreamStats:
    """Statistics of the rows that this process has read of a streamed file; rows that are read again count once."""

    name: str
    longest: int | None
    rows: int = 0
    bad: int = 0
    first_problem: str = ""
    cut: int = 0
    lost: int = 0  # tokens
    emptied: int = 0  # rows of which nothing is left to learn

    def count(self, index: int, encoded: Mapping[str, Any]) -> None:
        """Count the row `encoded`, the one of `index` in the file."""
        if index < self.rows:
            return
        self.rows, problem = index + 1, encoded["problem"]
        self.emptied += problem == NOTHING_LEFT
        if problem not in ("", FILTERED, NOTHING_LEFT):
            self.bad, self.first_problem = self.bad + 1, self.first_problem or problem
        if self.longest and encoded["length"] > self.longest:
            self.cut, self.lost = self.cut + 1, self.lost + encoded["length"] - self.longest

    def note(self) -> str:
        """One line for users and for the card."""
        note = f"{self.name}: {quantities.count(self.rows, 'row')} read by the first process since it was last started"
        if self.bad:
            note += _note_bad(self.bad, self.first_problem)
        if self.cut and self.longest:
            note += _note_cut(self.cut, self.longest, self.lost)
        return note + (note_emptied(self.emptied) if self.emptied else "")


def note_on_file(name: str, problems: Sequence[str], lengths: np.ndarray, longest: int | None) -> str:
    """One line on a file that was read whole: `problems` of all its rows, empty for good ones, whose `lengths` are in
    tokens."""
    note = f"{name}: {quantities.count(len(lengths), 'row')}, {quantities.count(int(lengths.sum()), 'token')}"
    if filtered := sum(problem == FILTERED for problem in problems):
        note += f"; {quantities.count(filtered, 'row')} filtered out"
    if bad := [problem for problem in problems if problem not in ("", FILTERED)]:
        note += _note_bad(len(bad), bad[0])
    if longest and (longer := lengths[lengths > longest]).size:
        lost = int(longer.sum()) - longest * longer.size
        note += f"{_note_cut(longer.size, longest, lost)} ({lost / lengths.sum():.1%})"
    return note


def note_emptied(count: int) -> str:
    return f"; in {count:,} of them nothing to learn is left, and {'it is' if count == 1 else 'they are'} left out"


def _note_bad(count: int, first: str) -> str:
    return f"; {quantities.count(count, 'bad row')} left out, the first because {first}"


def _note_cut(count: int, longest: int, lost: int) -> str:
    rows, tokens = quantities.count(count, "row"), quantities.count(longest, "token")
    which = f"{rows} {'is' if count == 1 else 'are'} longer than {tokens}"
    return f"; {which} and {'loses' if count == 1 else 'lose'} {lost:,} in all"
