"""What benchmarks print for their pages in results/: what was measured, by which command, where, and with what."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from datetime import date
from importlib.metadata import version

_LOAD = os.getloadavg()[0]  # before anything is measured


def parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def show(text: str, *packages: str) -> None:
    """Print Markdown, and before it how it came about; `packages` took part."""
    machine = f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}, load average {_LOAD:.2f} at the start"
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    where = f"{date.today()}; {machine}; Python {platform.python_version()}, {versions}"
    print(f"`{shlex.join(['python', *sys.argv])}`, {where}.\n\n{text}")
