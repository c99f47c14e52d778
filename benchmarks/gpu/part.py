"""What the parts share: their arguments, and the section of the page that they write."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rewired.cache import write_whole

STARTED = time.monotonic()


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    made.add_argument("--section", type=Path, required=True, help="the file to write: Markdown")
    return made


def write(section: Path, *blocks: str) -> None:
    """Whole or not at all, however this process ends."""
    write_whole(section, "\n\n".join(block.strip() for block in blocks) + "\n")


def progress(line: str) -> None:
    print(f"{time.monotonic() - STARTED:4.0f} s  {line}", flush=True)
