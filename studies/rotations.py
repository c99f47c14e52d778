"""What a basis of the residual stream is worth: KL to the original of payloads and of partial reductions, in several.

.venv/bin/python studies/rotations.py              # every row below
.venv/bin/python studies/rotations.py ladder+int4  # only those whose names begin with this

Rows that results/quality/rotations.jsonl already has of the current refit are not measured again. The last step writes
rotations.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from quality import FOLDER, MODEL, as_row, compare, held_out
from transformers.utils import logging

from rewired.checkpoint import Checkpoint
from rewired.checkpoint.rewired_config import wired_config
from rewired.convert import RefitRequest, Request, convert
from rewired.model.wiring_text import parse_wiring
from rewired.refit.activation_store import ActivationStore
from rewired.refit.fitting import token_weights
from rewired.refit.run import ALGORITHM_VERSION, load_text, model_config
from rewired.refit.sweep import Sweep
from rewired.refit.weights import Weights
from rewired.rotate.fold import write_rotated
from rewired.rotate.hadamard import block_hadamard, section_widths
from rewired.rotate.missing import Missing, Read, measure, reads
from rewired.rotate.request import KINDS, TOKENS

ROWS, TABLE = FOLDER / "rotations.jsonl", FOLDER / "rotations.md"
TEXTS = ("prose", "chat")
WINDOWS = 8  # of each kind of text, of quality.py's
RIDGE = 1e-2  # of what a view predicts, as a refit's inputs often have it

PAYLOADS = ("int8", "int4/int8", "int4")
PRESETS = ("desync-2x", "ladder+peek", "ladder")
TABLES = ("8:0.25+4:0.5+0:0.25", "8:0.1+4:0.8+0:0.1")  # bits by component


@dataclass(frozen=True)
class Case:
    """A wiring in a basis of `convert --rotate` or of this study; refitted on so many `tokens`."""

    wiring: str
    basis: str
    tokens: int = 0
    windows: int = WINDOWS

    @property
    def name(self) -> str:
        name = f"{self.wiring} {self.basis} {self.tokens}"
        return name if self.windows == WINDOWS else f"{name}, {self.windows} windows"


CASES = [
    *(Case("standard@0-30", basis) for basis in ("hadamard", "random")),
    *(Case(f"standard+{payload}@0-30", basis) for payload in PAYLOADS for basis in ("none", "hadamard")),
    *(Case("standard+int6@0-30", basis) for basis in ("none", "hadamard")),
    *(Case("standard+int4@0-30", basis) for basis in ("hadamard, random signs", "random")),
    *(Case(f"standard+{payload}@15-30", "hadamard") for payload in ("int4/int8", "int4")),
    *(Case(f"partial-1+{table}@0-30", basis) for table in TABLES for basis in ("hadamard", "missing")),
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
        for basis in ("none", "missing", "unpredicted")
    ),
    Case("partial-0.5@15-30", "missing, windows only"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    args = parser.parse_args()
    logging.disable_progress_bar()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    known = {row["name"] for row in rows if row["algorithm"] == ALGORITHM_VERSION}
    with tempfile.TemporaryDirectory(prefix="rewired-rotations-") as scratch:
        source = convert(MODEL, Path(scratch) / "source", Request([{"layers": "0-", "preset": "standard"}])).out
        texts = {kind: windows for kind, windows in held_out(source).items() if kind in TEXTS}
        for case in CASES:
            if case.name not in known and case.name.startswith(tuple(args.names)):
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    row = _measure(case, source, Path(folder), texts)
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    _write_table([json.loads(line) for line in ROWS.read_text().splitlines()])


def _measure(case: Case, source: Path, scratch: Path, texts: dict[str, torch.Tensor]) -> dict[str, Any]:
    started = time.perf_counter()
    wiring = parse_wiring(case.wiring)
    start = _turned(source, scratch / "turned", wiring, BASES[case.basis]) if case.basis in BASES else source
    rotate = case.basis if case.basis in KINDS else None
    refit = RefitRequest(tokens=case.tokens) if case.tokens else None
    done = convert(start, scratch / "model", Request(wiring, rotate=rotate, refit=refit))
    seconds = round(time.perf_counter() - started, 1)
    config = Checkpoint.open(done.out).config
    texts = {kind: spaced(windows, case.windows) for kind, windows in texts.items()}
    row = {"name": case.name, **asdict(case), "algorithm": ALGORITHM_VERSION}
    row |= {"seconds": seconds, "shares": config.get("rotation", {}).get("shares", [])}
    row["bytes"] = round(done.plan.table.total.bytes_sent / done.plan.table.dense.bytes_sent, 4)
    row["on"] = {kind: as_row(found) for kind, found in compare(source, done.out, texts).items()}
    print(case.name, {kind: round(on["kl"], 4) for kind, on in row["on"].items()}, f"{seconds} s", flush=True)
    return row


def spaced(windows: torch.Tensor, count: int) -> torch.Tensor:
    """So many of all windows, equally far apart."""
    return windows[:: len(windows) // count]


# ---- Bases that `convert` does not have ----

Basis = Callable[[Sweep], torch.Tensor]


def _turned(source: Path, folder: Path, entries: Sequence[dict[str, Any]], basis: Basis) -> Path:
    """A copy of `source` in another basis."""
    checkpoint = Checkpoint.open(source)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    turned = basis(_sweep(checkpoint, entries)).float()
    return write_rotated(checkpoint, turned, folder, checkpoint.config).folder


def _sweep(checkpoint: Checkpoint, entries: Sequence[dict[str, Any]]) -> Sweep:
    wiring = checkpoint.shape.wiring(entries).to_json()
    config = wired_config(checkpoint.config, wiring, checkpoint.tp_shards or 1)
    calibration = load_text(config, checkpoint.folder, RefitRequest().text, TOKENS)
    files = {name: checkpoint.folder / info.file for name, info in checkpoint.tensors().items()}
    weights = Weights(files, torch.device("cpu"), checkpoint.shape.family)
    store = ActivationStore(None)
    return Sweep(model_config(config), weights, calibration, None, store, gains=False, matrices=False)


def _random_signs(sweep: Sweep) -> torch.Tensor:
    """The Hadamard matrix of a group, after each channel was given a random sign."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (sweep.config.hidden_size,), generator=generator).double() * 2 - 1
    return signs[:, None] * block_hadamard(section_widths(sweep.config.resolved_wiring))


def _random(sweep: Sweep) -> torch.Tensor:
    width, generator = sweep.config.hidden_size, torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]


def _without_single_tokens(sweep: Sweep) -> torch.Tensor:
    """`missing`, on windows alone."""
    calibration = sweep.calibration
    windows = calibration.windows[~torch.tensor(calibration.held_out)]
    object.__setattr__(calibration, "texts", lambda held_out: [windows] * (not held_out))
    return measure(sweep).basis


def _unpredicted(sweep: Sweep) -> torch.Tensor:
    """Principal components of what a linear map of the view leaves of what is missing: of what a refit cannot mend.

    The view is the shard's own, as if nothing were sent since the region began.
    """
    width = sweep.config.hidden_size
    covariance = torch.zeros(width, width, dtype=torch.float64)
    by_module: dict[tuple[int, bool], list[Read]] = defaultdict(list)
    for read in reads(sweep):
        module = (read.layer, read.is_mlp)
        if by_module and module not in by_module:
            covariance += _left(sweep, *by_module.values())
            by_module.clear()
        by_module[module].append(read)
    return Missing.of(covariance + _left(sweep, *by_module.values())).basis


def _left(sweep: Sweep, of_module: Sequence[Read]) -> torch.Tensor:
    total = torch.zeros(())
    for shard in range(len(of_module[0].missing)):
        x, y = [], []
        for read in of_module:
            weights = token_weights(read.total)
            view = read.total - read.missing[shard]
            x.append((token_weights(view) * view).flatten(0, 1))
            y.append((weights * read.missing[shard]).flatten(0, 1))
        inputs, targets = torch.cat(x).double(), torch.cat(y).double()
        gram = inputs.T @ inputs
        gram.diagonal().add_(RIDGE * gram.diagonal().mean())
        targets = targets - inputs @ torch.linalg.solve(gram, inputs.T @ targets)
        total = total + targets.T @ targets
    return total


BASES: dict[str, Basis] = {
    "hadamard, random signs": _random_signs,
    "random": _random,
    "missing, windows only": _without_single_tokens,
    "unpredicted": _unpredicted,
}


def _write_table(rows: Sequence[dict[str, Any]]) -> None:
    order = [case.name for case in CASES]
    lines = [
        "# Bases of the stream, measured",
        "",
        "[LOG.md](LOG.md) says what the rows are; `studies/rotations.py` makes them. KL to the original in nats",
        f"per token on {WINDOWS} windows of 512 tokens each, or on as many as a row says; and the bytes sent, of those",
        "of 16-bit all-reduces.",
        "",
        "| wiring | basis | refitted on | bytes | KL prose | KL chat |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted((row for row in rows if row["name"] in order), key=lambda row: order.index(row["name"])):
        kl = " | ".join(f"{row['on'][kind]['kl']:.4f} ± {row['on'][kind]['kl_standard_error']:.4f}" for kind in TEXTS)
        fitted = f"{row['tokens'] // 1024} k" if row["tokens"] else ""
        wiring = row["wiring"] + (f" ({row['windows']} windows)" if row["windows"] != WINDOWS else "")
        lines.append(f"| {wiring} | {row['basis']} | {fitted} | {row['bytes']:.2f} | {kl} |")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
