"""Every test marked `gpu`, and what became of it, as each ends."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from part import parser, save

PATHS = ["tests/gpu", "tests/adapt/losses/test_liger.py"]
MOST_WORKERS = 6


class Outcomes:
    """A pytest plugin that keeps a file of outcomes up to date."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.outcomes: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.note(report.nodeid, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.note(report.nodeid, report)

    def note(self, name: str, report: Any) -> None:
        why = ""
        if report.outcome == "skipped":
            why = report.longrepr[2].removeprefix("Skipped: ")
        elif report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = (crash.message if crash else str(report.longrepr)).strip().splitlines()[0]
        self.outcomes[name] = {"outcome": report.outcome, "why": why}
        save({"outcomes": self.outcomes}, self.file)


def main() -> None:
    args = parser(__doc__).parse_args()
    # under xdist the plugin hears of the workers' tests here
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) // 2) if find_spec("xdist") else 1
    spread = ["--numprocesses", str(workers), "--dist", "loadgroup"] if workers > 1 else []
    options = ["-m", "gpu", "--device", args.device, "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*PATHS, *options, *spread, "--durations=15", "-ra"], plugins=[Outcomes(args.data)]))


if __name__ == "__main__":
    main()
