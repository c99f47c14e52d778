"""The gain from choosing layers: `rewired select` against the last n, as in the papers, on held-out text.

.venv/bin/python studies/select_quality.py            # every row that results/quality/selected.jsonl lacks
.venv/bin/python studies/select_quality.py ladder-8   # only those whose names begin with this

The first run takes longest: `rewired select` caches its scores and measurements.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from quality import FOLDER, MODEL, append, compare, held_out, read
from transformers.utils import logging

from rewired.convert import RefitRequest, Request, convert
from rewired.model.regions import parse_regions
from rewired.model.wiring_text import wiring_text
from rewired.refit.run import ALGORITHM_VERSION
from rewired.select.request import SelectRequest
from rewired.select.select import select
from rewired.sources import checkpoint_folder

RESULT = FOLDER / "selected.jsonl"
TOKENS = 32_768
# arguments of `rewired select`; a ladder in 15 layers leaves 30 all-reduces exposed
REQUESTS = {
    "ladder-8": SelectRequest("ladder", budget=8, measure=False),
    "ladder-15": SelectRequest("ladder", budget=15, measure=False),
    "ladder-22": SelectRequest("ladder", budget=22, measure=False),
    "desync-2x-15": SelectRequest("desync-2x", budget=15, measure=False),
}


def main() -> None:
    logging.disable_progress_bar()
    known = {tuple(row[:2]) for row in read(RESULT) if row[-1] == ALGORITHM_VERSION}
    with tempfile.TemporaryDirectory(prefix="rewired-select-") as scratch:
        source = checkpoint_folder(MODEL)
        texts = held_out(source)
        for name, request in REQUESTS.items():
            wanted = [which for which in ("chosen", "last") if (name, which) not in known]
            if not (wanted and name.startswith(tuple(sys.argv[1:]) or "")):
                continue
            selection = select(str(source), Path(scratch) / name, request)
            for which, candidate in zip(("chosen", "last"), selection.candidates, strict=False):
                if which not in wanted:
                    continue
                wiring = wiring_text(parse_regions(candidate.wiring, len(selection.choice)))
                on = measured(candidate.wiring, source, texts)
                append(RESULT, [name, which, wiring, candidate.exposed, candidate.price, on, ALGORITHM_VERSION])
                print(name, which, {kind: round(row["kl"], 3) for kind, row in on.items()}, flush=True)


def measured(wiring: list[dict[str, Any]], source: Path, texts: dict[str, torch.Tensor]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rewired-select-") as scratch:
        out = convert(source, Path(scratch) / "model", Request(wiring, refit=RefitRequest(tokens=TOKENS))).out
        return compare(source, out, texts)


if __name__ == "__main__":
    main()
