"""What quantised weights cost a rewired model: KL to the original of the weights alone, of the wiring alone, of both.

.venv/bin/python studies/quantised.py VENV    # VENV holds llm-compressor (docs/quantise.md)

Rows that results/quantised/measured.jsonl already has of the current refit are not measured again. The last step puts
the table into the page beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from quality import append, compare, held_out, kls_with_errors, put_tables, read
from rotations import TEXTS, WINDOWS
from transformers.utils import logging

from rewired.convert import RefitRequest, Request, convert
from rewired.model.wiring_text import parse_wiring
from rewired.refit.run import ALGORITHM_VERSION
from rewired.tables import markdown
from rewired.text.conversations import Document
from rewired.text.documents import mix

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "results" / "quantised"
ROWS, PAGE = FOLDER / "measured.jsonl", FOLDER / "README.md"
WIRINGS = ("standard@0-30", "ladder+peek@15-30", "desync-2x@0-30")
GROUP = "64"  # o_proj has 192 inputs on each of 3 shards
QUANTISED = {
    "16 bits": None,
    "int8, activations too": ["W8A8"],
    "int4, rounded": ["W4A16", "--group", GROUP],
    "int4, GPTQ": ["W4A16", "--group", GROUP, "--text"],
}
TOKENS = 32_768


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, help="an environment with llm-compressor")
    args = parser.parse_args()
    logging.disable_progress_bar()
    known = {(row["wiring"], row["weights"]) for row in read(ROWS) if row["algorithm"] == ALGORITHM_VERSION}
    with tempfile.TemporaryDirectory(prefix="rewired-quantised-") as scratch:
        folder = Path(scratch)
        text = folder / "text.txt"
        text.write_text("\n\n".join(plain(each) for documents in mix() for each in documents[:400]), "utf-8")
        source = wired("standard@0-30", folder / "source")
        texts = held_out(source, TEXTS, WINDOWS)
        for wiring in WIRINGS:
            todo = [weights for weights in QUANTISED if (wiring, weights) not in known]
            made = wired(wiring, folder / wiring) if todo else source
            for weights in todo:
                append(ROWS, measure(wiring, weights, made, source, args.venv, text, texts))
    write_table()


def plain(document: Document) -> str:
    return document if isinstance(document, str) else "\n".join(turn["content"] for turn in document)


def wired(wiring: str, out: Path) -> Path:
    refit = None if wiring.startswith("standard") else RefitRequest(tokens=TOKENS)
    return convert("smollm2-135m", out, Request(parse_wiring(wiring), tp_shards=3, refit=refit)).out


def measure(
    wiring: str, weights: str, made: Path, source: Path, venv: Path, text: Path, texts: dict[str, torch.Tensor]
) -> dict[str, Any]:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        model, options = made, QUANTISED[weights]
        if options:
            model = Path(scratch) / "quantised"
            options = [*options, str(text)] if options[-1] == "--text" else options
            command = [venv / "bin" / "python", HERE.parent / "examples" / "quantise.py", made, model, *options]
            environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
            subprocess.run(command, env=environment, check=True, capture_output=True)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        row = {"wiring": wiring, "weights": weights, "algorithm": ALGORITHM_VERSION, "bytes": size}
        row |= {"on": compare(source, model, texts), "seconds": round(time.perf_counter() - started, 1)}
    print(wiring, weights, {kind: round(on["kl"], 4) for kind, on in row["on"].items()}, row["seconds"], flush=True)
    return row


def write_table() -> None:
    rows = {(row["wiring"], row["weights"]): row for row in read(ROWS)}
    cells = []
    for wiring, weights in product(WIRINGS, QUANTISED):
        row = rows[wiring, weights]
        alone = [rows[wiring, "16 bits"]["on"], rows["standard@0-30", weights]["on"]]
        sums = [f"{sum(on[kind]['kl'] for on in alone):.3f}" for kind in TEXTS]
        is_both = weights != "16 bits" and not wiring.startswith("standard")
        kls = kls_with_errors(row["on"], TEXTS)
        cells.append([wiring, weights, f"{row['bytes'] / 1e6:.0f} MB", *kls, *(sums if is_both else ["", ""])])
    header = ["wiring", "weights", "size", "KL prose", "KL chat", "sum of both alone: prose", "chat"]
    put_tables(PAGE, markdown(header, cells))


if __name__ == "__main__":
    main()
