"""Every test marked `gpu`, and what became of it, as each ends."""

from __future__ import annotations

import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from part import parser, write

from rewired.tables import markdown

MOST_WORKERS = 6


class Outcomes:
    """A pytest plugin that keeps the section up to date: a line for each file, outcome and reason."""

    def __init__(self, section: Path) -> None:
        self.section = section
        self.found = Counter[tuple[str, str, str]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = report.longrepr[2] if report.skipped else report.longreprtext.strip().rpartition("\n")[2]
            self.found[report.nodeid.split("::")[0], report.outcome, why] += 1
            rows = [[file, outcome, str(tests), why] for (file, outcome, why), tests in sorted(self.found.items())]
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
