"""What `comm` costs in quality: SmolLM2-135M distilled by four ranks of two nodes, in every way of communication.

    .venv/bin/python studies/comm_smollm2.py             # all that results/comm-smollm2 lacks; hours, resumable
    .venv/bin/python studies/comm_smollm2.py --rounds 1 plain zero++     # only these, for 100 steps

The rewired layers are trained, by `torchrun -m rewired.adapt`, on the same rows in the same order, from the same start.
The KL of each model to the original is measured on the same held-out windows, one by one, so that differences have a
paired standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from adapt_smollm2 import RECIPE, REPO, as_flags
from quality import KINDS, append, compare, held_out, put_tables, read, standard
from transformers import AutoTokenizer
from transformers.utils import logging

from rewired.comm.options import PRESETS, Comm
from rewired.tables import markdown
from rewired.text import MIX
from rewired.text.documents import sources
from rewired.text.windows import Cutter

FOLDER = REPO / "results" / "comm-smollm2"
RESULT, LOSSES = FOLDER / "measured.jsonl", FOLDER / "losses.jsonl"
MADE = REPO / "build" / "comm-smollm2"
RANKS, RANKS_PER_NODE, STEPS, ROUNDS = 4, 2, 100, 3  # all ways take so many steps, are judged, and go on
ROW = 64  # tokens; a rank has one row a step
ROWS_OF_A_FILE = 512  # of each of the four files of the packaged mix, of the part that is not held out
EVERY = 4  # of quality.py's held-out windows, one of so many judges
PLAIN = "plain"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # memory that is given back after each layer is fetched again in pages: a quarter of a step
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736",
}
WAYS: dict[str, Comm | None] = {PLAIN: None, "slow-link": PRESETS["slow-link"], "zero++": PRESETS["zero++"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(WAYS), help=", ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    logging.disable_progress_bar()
    prepare()
    for steps in range(STEPS, args.rounds * STEPS + 1, STEPS):
        for way in args.ways:
            if (way, steps) not in measured():
                train(way, steps)
        for way in args.ways:
            judge(way, steps, MADE / way / "final")
    put_tables(FOLDER / "README.md", losses_table(), kl_table())


def prepare() -> None:
    """The original in float32, so that no rounding of what is saved hides a difference, and the rows to train on."""
    if not (MADE / "original").exists():
        standard(MADE / "original", dtype="float32")
    if not (MADE / "rows.jsonl").exists():
        tokenizer = AutoTokenizer.from_pretrained(MADE / "original")
        windows = [w for documents in sources(MIX) for w in Cutter(tokenizer, ROW).in_order(documents, ROWS_OF_A_FILE)]
        rows = [json.dumps({"text": tokenizer.decode(window)}) + "\n" for window in windows]
        (MADE / "rows.jsonl").write_text("".join(rows))


def train(way: str, steps: int) -> None:
    """Train so many steps in all: a training that was shorter, or was killed, goes on."""
    keys = {
        "model": str(MADE / "original"),
        "refit": "none",
        "datasets": [str(MADE / "rows.jsonl")],
        "held_out": 1,  # for the log; `judge` measures on more
        "eval_steps": STEPS,
        "packing": False,
        "max_length": ROW,
        "per_device_train_batch_size": 1,
        "train": "rewired",
        "bf16": True,
        "lr_scheduler_type": "constant_with_warmup",  # longer trainings begin as shorter ones do
        "max_steps": steps,
        "save_total_limit": 1,
        "fsdp_size": RANKS,
        "output_dir": str(MADE / way),
    }
    if comm := WAYS[way]:
        keys["comm"] = asdict(replace(comm, ranks_per_node=RANKS_PER_NODE))
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*torchrun, "-m", "rewired.adapt", str(RECIPE), "--resume", *as_flags(keys)]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True)
    history = json.loads((MADE / way / "final" / "training.json").read_text())
    losses = {entry["step"]: entry["kd"] for entry in history if "kd" in entry}
    append(LOSSES, {"way": way, "steps": steps, "kd": losses})


def judge(way: str, steps: int, model: Path) -> None:
    """Add the model's row to what is measured: its KL to the original on each window."""
    if (way, steps) in measured():
        return
    kinds = held_out(MADE / "original")
    windows = {f"{kind} {n}": texts[n : n + 1] for kind, texts in kinds.items() for n in range(0, len(texts), EVERY)}
    found = {name: one["kl"] for name, one in compare(MADE / "original", model, windows).items()}
    kls = {kind: [round(kl, 6) for name, kl in found.items() if name.startswith(kind)] for kind in kinds}
    append(RESULT, {"way": way, "steps": steps, "kl": kls})
    print(way, {kind: round(mean(each), 4) for kind, each in kls.items()}, flush=True)


def measured(path: Path = RESULT) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["way"], row["steps"]): row for row in read(path)}


def kl_table() -> str:
    rows, cells = measured(), []
    for (way, steps), row in sorted(rows.items(), key=lambda item: (item[0][1], item[0][0] != PLAIN)):
        kls = [f"{mean(each):.4f}" for each in (*row["kl"].values(), _joined(row))]
        plain = rows.get((PLAIN, steps))
        cells.append([way, str(steps), *kls, _against(_joined(row), _joined(plain)) if plain and way != PLAIN else ""])
    return markdown(["way", "steps", *(f"KL {kind}" for kind in (*KINDS, "all")), f"all, against {PLAIN}"], cells)


def losses_table() -> str:
    """The loss of the ten steps before each fiftieth, and how far it is from plain FSDP2's."""
    longest = {
        way: {step: kd for step, kd in row["kd"].items() if int(step) % 50 == 0}
        for (way, _), row in sorted(measured(LOSSES).items(), key=lambda item: item[0][1])
    }
    plain = longest[PLAIN]
    rows = []
    for way, kds in longest.items():
        changes = ("" if way == PLAIN else f" ({kds[step] / plain[step] - 1:+.1%})" for step in kds)
        cells = [f"{kd:.4f}{change}" for kd, change in zip(kds.values(), changes, strict=True)]
        rows.append([way, *cells, *[""] * (len(plain) - len(cells))])
    return markdown(["way", *(f"step {step}" for step in plain)], rows)


def _joined(row: dict[str, Any]) -> list[float]:
    return [kl for kls in row["kl"].values() for kl in kls]


def _against(kls: Sequence[float], plain: Sequence[float]) -> str:
    """The mean of the differences and its standard error, window by window, in % of the plain KL."""
    differences = [one - other for one, other in zip(kls, plain, strict=True)]
    error = stdev(differences) / len(differences) ** 0.5
    return f"{mean(differences) / mean(plain):+.2%} ± {error / mean(plain):.2%}"


if __name__ == "__main__":
    main()
