"""What is found goes into tables, under build/fake-gpu/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

OUT = Path("build") / "fake-gpu"


class Report:
    """Rows of tables, by their names."""

    def __init__(self) -> None:
        self.tables: dict[str, list[str]] = {}

    def add(self, table: str, *row: object) -> None:
        self.tables.setdefault(table, []).append(f"| {' | '.join(map(str, row))} |")


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    made = Report()
    yield made
    OUT.mkdir(parents=True, exist_ok=True)
    for table, rows in made.tables.items():
        (OUT / f"{table}.md").write_text("\n".join(rows) + "\n")
