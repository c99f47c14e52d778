"""Statistics of the rows of a file: how many were read, left out and cut."""

from __future__ import annotations

from dataclasses import dataclass

from rewired import quantities

FILTERED = "filtered"  # by the recipe: a reason to leave a row out that is no fault of it


@dataclass
class RowStats:
    """Of the rows that this process has read of a file; rows that are read again count once."""

    name: str
    longest: int | None
    is_streamed: bool
    rows: int = 0
    tokens: int = 0
    filtered: int = 0
    bad: int = 0
    first_problem: str = ""
    cut: int = 0
    lost: int = 0  # tokens
    emptied: int = 0  # rows of which nothing is left to learn

    def count(self, index: int, problem: str, first: int, length: int) -> bool:
        """Count the row of `index` in the file, and say whether it is to be learnt.

        It has a `problem`, or so many tokens, of which the `first` that is learnt must not be cut off.
        """
        is_learnt = not problem and first < min(length, self.longest or length)
        if index < self.rows:
            return is_learnt
        self.rows = index + 1
        if problem == FILTERED:
            self.filtered += 1
        elif problem:
            self.bad, self.first_problem = self.bad + 1, self.first_problem or problem
        else:
            self.tokens, self.emptied = self.tokens + length, self.emptied + (not is_learnt)
            if self.longest and length > self.longest:
                self.cut, self.lost = self.cut + 1, self.lost + length - self.longest
        return is_learnt

    def note(self) -> str:
        """One line for users and for the card."""
        if self.is_streamed:
            note = f"{self.name}: {_rows(self.rows)} read by the first process since it was last started"
        else:
            good = self.rows - self.filtered - self.bad
            note = f"{self.name}: {_rows(good)}, {quantities.count(self.tokens, 'token')}"
        if self.filtered:
            note += f"; {_rows(self.filtered)} filtered out"
        if self.bad:
            note += f"; {quantities.count(self.bad, 'bad row')} left out, the first because {self.first_problem}"
        if self.cut and self.longest:
            note += f"; {_rows(self.cut)} cut to {quantities.count(self.longest, 'token')}, "
            note += f"{self.lost:,} fewer in all ({self.lost / self.tokens:.1%})"
        if self.emptied:
            note += f"; {_rows(self.emptied)} left out, in which nothing to learn is left"
        return note


def _rows(number: int) -> str:
    return quantities.count(number, "row")
