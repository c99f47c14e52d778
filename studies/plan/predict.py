"""Predictions of the Ladder paper's benchmark for the rows of a CSV, so that others can score them.

python -m studies.plan.predict FILE.csv     # fills the column predicted_speedup
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path

from rewired.checkpoint.named_shapes import named_shapes

from .ladder_benchmark import MODELS, WIRINGS, Run, predicted_speedup

COLUMNS = ("model", "batch", "tp", "nvlink", "wiring")
FILLED = "predicted_speedup"
_YES_NO = {"yes": True, "true": True, "no": False, "false": False}


def fill(file: Path) -> int:
    """Fill the column `predicted_speedup` of FILE, in place; returns how many rows there were.

    Lines that begin with # stay. Raises ValueError for columns that are missing, and for a row that says no run.
    """
    if not file.is_file():
        raise ValueError(f"There is no file {file}.")
    lines = file.read_text("utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    reader = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
        raise ValueError(f"{file} has no column {', '.join(missing)}: it needs {', '.join(COLUMNS)}.")
    rows = list(reader)
    for number, row in enumerate(rows, 1):
        row[FILLED] = f"{predicted_speedup(_run(row, f'Row {number} of {file}')):.4f}"
    written = io.StringIO()
    columns = list(dict.fromkeys([*(reader.fieldnames or ()), FILLED]))
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    file.write_text("".join(f"{line}\n" for line in comments) + written.getvalue(), "utf-8")
    return len(rows)


def _run(row: Mapping[str, str], where: str) -> Run:
    model, wiring = (str(row[name] or "").strip().lower() for name in ("model", "wiring"))
    if model not in MODELS and model not in named_shapes():
        raise ValueError(f"{where} has model '{row['model']}': it must be one of {', '.join(MODELS)}.")
    if wiring not in WIRINGS:
        raise ValueError(f"{where} has wiring '{row['wiring']}': it must be one of {', '.join(WIRINGS)}.")
    nvlink = _YES_NO.get(str(row["nvlink"]).strip().lower())
    if nvlink is None:
        raise ValueError(f"{where} has nvlink '{row['nvlink']}': it must be yes or no.")
    batch, tp = (_count(row[name], name, where) for name in ("batch", "tp"))
    shape = named_shapes()[MODELS.get(model, model)]
    if shape.num_attention_heads % tp:
        raise ValueError(f"{where} has tp {tp}, which does not divide {shape.num_attention_heads} attention heads.")
    return Run(model, batch, tp, nvlink, wiring)


def _count(text: str, name: str, where: str) -> int:
    try:
        count = int(text)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ValueError(f"{where} has {name} '{text}': it must be an integer of at least 1.")
    return count


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {fill(Path(sys.argv[1]))} rows filled.")
