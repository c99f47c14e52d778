"""Other families' code on weights that are at hand: KL to the original, as converted and after a refit.

.venv/bin/python studies/families.py                  # SmolLM2-135M as Llama, and written as Mistral and as Qwen2
.venv/bin/python studies/families.py --small OUT      # the small Qwen3 that studies/small_model.py trained

Rows that results/families/measured.jsonl already has of the current refit are not measured again. The last step puts
the table into the page beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from quality import append, held_out, kls_with_errors, put_tables, read
from rotations import TEXTS, Case, fitted_on, measure
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from rewired.checkpoint.shape import Shape
from rewired.families import FAMILIES
from rewired.refit.run import ALGORITHM_VERSION
from rewired.sources import checkpoint_folder
from rewired.tables import markdown
from rewired.text.tokenizer import load_tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "results" / "families"
ROWS, PAGE = FOLDER / "measured.jsonl", FOLDER / "README.md"
WRITTEN_AS = ("llama", "mistral", "qwen2")
SMALL_QWEN3 = "small qwen3"
TOKENS = (0, 32_768)  # without a refit, and fitted on so many
SMOLLM2 = [
    Case("standard+int4@0-30", "hadamard"),
    *(Case(wiring, "none", tokens) for wiring in ("ladder@15-30", "desync-2x@0-30") for tokens in TOKENS),
]
SMALL = [
    Case("standard+int4@0-12", "hadamard"),
    *(
        Case(wiring, "none", tokens)
        for wiring in ("ladder@6-12", "ladder+peek@6-12", "desync-2x@0-12")
        for tokens in TOKENS
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path)
    args = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="rewired-families-") as scratch:
        if args.small:
            measure_all(SMALL_QWEN3, args.small, SMALL, args.small)
        else:
            source = checkpoint_folder("smollm2-135m")
            for model_type in WRITTEN_AS:
                measure_all(model_type, rewritten(source, model_type, Path(scratch)), SMOLLM2, source)
    write_table()


def measure_all(model: str, folder: Path, cases: list[Case], source: Path) -> None:
    """All of it on the tokens of `source`: with a family, transformers changes how words are split."""
    known = {(row["model"], row["name"]) for row in read(ROWS) if row["algorithm"] == ALGORITHM_VERSION}
    texts = held_out(source, TEXTS)
    tokenizer = load_tokenizer(source)
    for case in cases:
        if (model, case.name) not in known:
            with (
                tempfile.TemporaryDirectory() as scratch,
                patch("rewired.refit.run.load_tokenizer", lambda *_, **__: tokenizer),
            ):
                append(ROWS, {"model": model} | measure(case, folder, Path(scratch), texts))


def rewritten(source: Path, model_type: str, scratch: Path) -> Path:
    """The Llama at `source` as another family's checkpoint that computes the same."""
    folder = scratch / model_type
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture], "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    biases = {name: size for name, size in Shape.from_config(config).tensors().items() if name not in tensors}
    tensors |= {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in biases.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_table() -> None:
    rows = sorted(read(ROWS), key=lambda row: [*WRITTEN_AS, SMALL_QWEN3].index(row["model"]))
    alike: dict[tuple[str, ...], list[str]] = {}  # models by what their rows say
    for row in rows:
        cells = (row["wiring"], row["basis"], fitted_on(row), *kls_with_errors(row["on"], TEXTS, digits=4))
        alike.setdefault(cells, []).append(row["model"])
    lines = [[", ".join(models), *cells] for cells, models in alike.items()]
    table = markdown(["models", "wiring", "basis", "refitted on", "KL prose", "KL chat"], lines)
    put_tables(PAGE, table)


if __name__ == "__main__":
    main()
