"""The pages of results/ that benchmarks write: which command measured what, where, and with what."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
_LOAD = os.getloadavg()[0]  # before anything is measured


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--write", action="store_true", help="also write the page of results/")
    return made


def publish(title: str, text: str, packages: Sequence[str], is_written: bool) -> None:
    """Print the page of the script that runs, and write results/bench-x.md if it is bench_x.py and `is_written`."""
    script = Path(sys.argv[0])
    command = shlex.join([f"benchmarks/{script.name}", *sys.argv[1:]])
    machine = f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}, load average {_LOAD:.2f} at the start"
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    where = f"{date.today()}; {machine}; Python {platform.python_version()}, {versions}"
    page = f"# {title}\n\n`python {command}`, {where}.\n\n{text}"
    print(page)
    if is_written:
        (RESULTS / f"{script.stem.replace('_', '-')}.md").write_text(page, encoding="utf-8")
