"""Every test marked `gpu`, and what became of it, as each ends."""

from __future__ import annotations

import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from part import parser, write

from rewired.tables import markdown

MOST_WORKERS = 6


class Outcomes:
    """A pytest plugin that keeps the section up to date: a line for each file, and one for each failure or reason."""

    def __init__(self, section: Path) -> None:
        self.section = section
        self.found = Counter[tuple[str, str, str]]()  # a file or test, an outcome, why

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.note(report)

    def note(self, report: Any) -> None:
        name, why = report.nodeid.split("::")[0], ""
        if report.outcome == "skipped":
            why = report.longrepr[2].removeprefix("Skipped: ")
        elif report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            name, why = report.nodeid, (crash.message if crash else str(report.longrepr)).strip().splitlines()[0]
        self.found[name, report.outcome, why] += 1
        rows = [[name, outcome, str(count), why] for (name, outcome, why), count in sorted(self.found.items())]
        write(self.section, "## Tests", markdown(["file", "outcome", "tests", "why"], rows))


def main() -> None:
    args = parser(__doc__).parse_args()
    # under xdist the plugin hears of the workers' tests here
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) // 2) if find_spec("xdist") else 1
    spread = ["--numprocesses", str(workers), "--dist", "loadfile"] if workers > 1 else []
    options = ["-m", "gpu", "--device", args.device, "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    sys.exit(pytest.main(["tests/gpu", *options, *spread, "--durations=15", "-ra"], plugins=[Outcomes(args.section)]))


if __name__ == "__main__":
    main()
