"""What a basis of the residual stream is worth: KL to the original of payloads and of partial reductions, in several.

.venv/bin/python studies/rotations.py              # every row below
.venv/bin/python studies/rotations.py ladder+int4  # only those whose names begin with this

Rows that results/quality/rotations.jsonl already has of the current refit are not measured again. The last step writes
rotations.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from quality import FOLDER, append, compare, held_out, kls_with_errors, put_tables, read, standard
from transformers.utils import logging

from rewired.checkpoint import Checkpoint
from rewired.convert import RefitRequest, Request, convert
from rewired.model.wiring_text import parse_wiring
from rewired.refit.run import ALGORITHM_VERSION
from rewired.rotate.request import KINDS
from rewired.tables import markdown

ROWS, PAGE = FOLDER / "rotations.jsonl", FOLDER / "rotations.md"
TEXTS = ("prose", "chat")
WINDOWS = 8  # of each kind of text, of quality.py's
PAYLOADS = ("int8", "int4/int8", "int4")
PRESETS = ("desync-2x", "ladder+peek", "ladder")


@dataclass(frozen=True)
class Case:
    """A wiring in a basis of `convert --rotate`, or in `none`; refitted on so many `tokens`."""

    wiring: str
    basis: str
    tokens: int = 0
    windows: int = WINDOWS

    @property
    def name(self) -> str:
        name = f"{self.wiring} {self.basis} {self.tokens}"
        return name if self.windows == WINDOWS else f"{name}, {self.windows} windows"


CASES = [
    Case("standard@0-30", "hadamard"),
    *(Case(f"standard+{payload}@0-30", basis) for payload in PAYLOADS for basis in ("none", "hadamard")),
    *(Case("standard+int6@0-30", basis) for basis in ("none", "hadamard")),
    *(Case(f"standard+{payload}@15-30", "hadamard") for payload in ("int4/int8", "int4")),
    *(
        Case(f"{preset}+{payload}@0-30", "hadamard", 32_768)
        for preset in ("standard", *PRESETS)
        for payload in PAYLOADS
    ),
    *(Case("desync-2x+int4@0-30", "hadamard", 65_536, windows) for windows in (WINDOWS, 32)),
    Case("standard+int4@0-2, desync-2x+int4@2-30", "hadamard", 32_768),
    *(Case(f"{preset}+int4@15-30", "hadamard", 32_768) for preset in PRESETS),
    *(
        Case(f"{wiring}@15-30", basis, tokens)
        for tokens in (0, 32_768)
        for wiring in ("partial-0.5", "partial-0.25")
        for basis in ("none", "missing")
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    args = parser.parse_args()
    logging.disable_progress_bar()
    known = {row["name"] for row in read(ROWS) if row["algorithm"] == ALGORITHM_VERSION}
    with tempfile.TemporaryDirectory(prefix="rewired-rotations-") as scratch:
        source = standard(Path(scratch) / "source")
        texts = held_out(source, TEXTS)
        for case in CASES:
            if case.name not in known and case.name.startswith(tuple(args.names)):
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    append(ROWS, measure(case, source, Path(folder), texts))
    _write_table(read(ROWS))


def measure(case: Case, source: Path, scratch: Path, texts: dict[str, torch.Tensor]) -> dict[str, Any]:
    started = time.perf_counter()
    rotate = case.basis if case.basis in KINDS else None
    refit = RefitRequest(tokens=case.tokens) if case.tokens else None
    done = convert(source, scratch / "model", Request(parse_wiring(case.wiring), rotate=rotate, refit=refit))
    seconds = round(time.perf_counter() - started, 1)
    config = Checkpoint.open(done.out).config
    texts = {kind: windows[:: len(windows) // case.windows] for kind, windows in texts.items()}
    row = {"name": case.name, **asdict(case), "algorithm": ALGORITHM_VERSION}
    row |= {"seconds": seconds, "shares": config.get("rotation", {}).get("shares", [])}
    row["bytes"] = round(done.plan.table.total.bytes_sent / done.plan.table.dense.bytes_sent, 4)
    row["on"] = compare(source, done.out, texts)
    print(case.name, {kind: round(on["kl"], 4) for kind, on in row["on"].items()}, f"{seconds} s", flush=True)
    return row


def fitted_on(row: dict[str, Any]) -> str:
    return f"{row['tokens'] // 1024} k" if row["tokens"] else ""


def _write_table(rows: Sequence[dict[str, Any]]) -> None:
    by_name, cells = {row["name"]: row for row in rows}, []
    for row in (by_name[case.name] for case in CASES if case.name in by_name):
        wiring = row["wiring"] + (f" ({row['windows']} windows)" if row["windows"] != WINDOWS else "")
        kls = kls_with_errors(row["on"], TEXTS, digits=4)
        cells.append([wiring, row["basis"], fitted_on(row), f"{row['bytes']:.2f}", *kls])
    table = markdown(["wiring", "basis", "refitted on", "bytes", "KL prose", "KL chat"], cells)
    put_tables(PAGE, table)


if __name__ == "__main__":
    main()
