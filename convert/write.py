"""The output folder: weights, config, model card, companions, and the model's own code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import inside
from rewired.checkpoint.foreign_code import (
    Dropped,
    copy_without_foreign_code,
    note_on_dropped,
    without_foreign_code,
)
from rewired.checkpoint.rewired_config import write_code
from rewired.model.regions import parse_regions
from rewired.rotate.request import RECORD
from rewired.sources.hub import COMPANION_FILES

from .card import model_card
from .job import Job, OnBytes
from .weights import write_weights


def write(
    job: Job,
    config: Mapping[str, Any],
    notes: Sequence[str],
    fitted: Mapping[str, Path],
    staging: Path,
    on_bytes: OnBytes,
) -> list[str]:
    """Fill `staging` with all that belongs into the output; tensors that were `fitted` come from the files named there.

    Returns the notes of the model card: `notes`, and one on code that did not come along.
    """
    write_weights(job, fitted, staging, on_bytes)
    folder = job.checkpoint.folder
    notes = [*notes, *note_on_dropped(_copy_companions(folder, staging))]
    (staging / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    card = model_card(
        job.out,
        job.source.base_model,
        folder,
        job.plan.table,
        notes,
        job.request.command,
        is_stock=job.request.to_stock,
        is_rotated=RECORD in config,
        refitted=_refitted(config),
    )
    (staging / "README.md").write_text(card, encoding="utf-8")
    if not job.request.to_stock:
        write_code(job.checkpoint.shape.family, staging)
    return notes


def _copy_companions(folder: Path, staging: Path) -> dict[str, Dropped]:
    """Copy the small files that go along; returns what was dropped of each, and of config.json."""
    _, of_config = without_foreign_code((folder / "config.json").read_text(encoding="utf-8"))
    dropped = {"config.json": of_config}
    for path in _companions(folder):
        (staging / path).parent.mkdir(exist_ok=True)
        dropped[path] = copy_without_foreign_code(inside(folder, path), staging / path)
    return dropped


def _companions(folder: Path) -> list[str]:
    """Tokenizer, chat template, generation config, licence."""
    names = {
        str(path.relative_to(folder)) for pattern in COMPANION_FILES for path in folder.glob(pattern) if path.is_file()
    }
    return sorted(names)


def _refitted(config: Mapping[str, Any]) -> str:
    """The layers whose weights were fitted to what they read."""
    entries = config.get("refit", {}).get("wiring", [])
    regions = parse_regions(entries, config["num_hidden_layers"])
    return ", ".join(region.layers for region in regions if not region.is_dense)
