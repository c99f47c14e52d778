"""The output folder: weights, config, model card, companions, and the model's own code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewired.checkpoint.checkpoint import inside
from rewired.checkpoint.rewired_llama import write_code
from rewired.model.regions import parse_regions
from rewired.sources.hub import COMPANION_FILES

from .card import model_card
from .job import Job
from .weights import write_weights


def write(
    job: Job,
    config: Mapping[str, Any],
    notes: Sequence[str],
    fitted: Mapping[str, Path],
    staging: Path,
    on_bytes: Callable[[int], None],
) -> None:
    """Fill `staging` with all that belongs into the output; tensors that were `fitted` come from the files named there.

    `notes` are for the model card.
    """
    write_weights(job, fitted, staging, on_bytes)
    folder = job.checkpoint.folder
    for path in _companions(folder):
        (staging / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(inside(folder, path), staging / path)
    (staging / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    card = model_card(
        job.out.name,
        job.source.base_model,
        folder,
        job.plan.table,
        notes,
        job.request.command,
        is_stock=job.request.to_llama,
        refitted=_refitted(config),
    )
    (staging / "README.md").write_text(card, encoding="utf-8")
    if not job.request.to_llama:
        write_code(staging)


def _companions(folder: Path) -> list[str]:
    """Tokenizer, chat template, generation config, licence: the small files that go along."""
    names = {
        str(path.relative_to(folder)) for pattern in COMPANION_FILES for path in folder.glob(pattern) if path.is_file()
    }
    return sorted(names)


def _refitted(config: Mapping[str, Any]) -> str:
    """The layers whose weights were fitted to what they read."""
    entries = config.get("refit", {}).get("wiring", [])
    regions = parse_regions(entries, config["num_hidden_layers"])
    return ", ".join(region.layers for region in regions if not region.is_dense)
