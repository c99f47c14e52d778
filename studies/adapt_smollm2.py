"""Trainings of SmolLM2-135M compared: SFT against distillation, with and without a refit, at equal tokens.

    .venv/bin/rewired data fetch instruct .instruct
    .venv/bin/python studies/adapt_smollm2.py              # all that results/adapt-smollm2 lacks; hours
    .venv/bin/python studies/adapt_smollm2.py ladder@15  # only those whose names begin with this

All read the same rows of ShareGPT and Natural Instructions, and are trained in bfloat16 with weights in float32. KL to
the original and perplexity are measured as in quality.py, on held-out text. The trained models stay in
build/adapt-smollm2 for `evaluate`, and a killed run resumes.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import quality
from transformers.utils import logging

from rewired.adapt.recipe.reading import read
from rewired.adapt.run import adapt
from rewired.adapt.start import RECORD
from rewired.convert import Request, convert
from rewired.model.wiring_text import parse_wiring

REPO = Path(__file__).resolve().parents[1]
RESULT = REPO / "results" / "adapt-smollm2" / "measured.jsonl"
MADE = REPO / "build" / "adapt-smollm2"
RECIPE = REPO / "recipes" / "smollm2-135m-ladder-distill.yaml"
ROWS: list[dict[str, Any]] = [{"path": f".instruct/{name}.jsonl"} for name in ("sharegpt", "natural_instructions")]
TEXTS = {"path": "build/adapt-smollm2/texts.jsonl"}
AND_TEXTS = {"datasets": [*(row | {"weight": 1} for row in ROWS), TEXTS | {"weight": 2}]}
REFIT = {"max_steps": 0}  # what "refit + distillation" begins with
SFT = {"refit": "none", "train": "all", "ce_weight": 1.0, "kd_weight": 0.0, "assistant_only_loss": True}
Run = tuple[str, str, dict[str, Any] | None]  # name, wiring and training
TRAININGS: dict[str, dict[str, Any] | None] = {
    "converted": None,
    "SFT": SFT,
    "distillation": {"refit": "none"},
    "refit": REFIT,
    "refit + distillation": {},
    "refit + distillation, half of it plain texts": AND_TEXTS,
}
WITH_REFIT = {name: TRAININGS[name] for name in ("refit", "refit + distillation")}
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "15-30": {"refit + distillation, three times as long": {"max_steps": 900}},
    "0-30": {"refit + distillation, half of it plain texts, three times as long": AND_TEXTS | {"max_steps": 900}},
}
STAGED: list[Run] = [
    ("ladder@15-30, refit + distillation, in three stages", "ladder@15-30", {"recipe": "ladder-progressive"}),
    ("partial-1@15-30, raised from 0.5 in three stages", "partial-1@15-30", {"recipe": "partial-raised"}),
]


def main() -> None:
    logging.disable_progress_bar()
    known = {row["name"] for row in quality.read(RESULT)}
    with tempfile.TemporaryDirectory(prefix="rewired-adapt-") as scratch:
        source = quality.standard(Path(scratch) / "source")
        texts = quality.held_out(source)
        for name, wiring, training in runs():
            if name in known or not name.startswith(tuple(sys.argv[1:]) or ""):
                continue
            model = _made(name, wiring, training, Path(scratch))
            on = quality.compare(source, model, texts)
            tokens = json.loads((model / "config.json").read_text()).get(RECORD, {}).get("tokens", 0)
            row = {"name": name, "wiring": wiring, "training": training, "tokens": tokens, "on": on}
            quality.append(RESULT, row)
            print(name, {kind: round(measured["kl"], 3) for kind, measured in on.items()}, flush=True)


def write_texts(out: Path) -> None:
    """Plain texts that begin with any word: the longest turn of each conversation without its first third."""
    with (REPO / ROWS[0]["path"]).open() as chats:
        turns = [[turn["value"] for turn in json.loads(chat)["conversations"]] for chat in chats]
    longest = [max(chat, key=len, default="").split(" ") for chat in turns]
    texts = [json.dumps({"text": " ".join(words[len(words) // 3 :])}) + "\n" for words in longest]
    out.write_text("".join(texts))


def runs() -> list[Run]:
    every = list[Run]()
    for layers in ("15-30", "0-30"):
        every += _of(f"ladder@{layers}", TRAININGS | MORE[layers]) + _of(f"ladder+peek@{layers}", WITH_REFIT)
    for name in ("desync-2x", "desync-4x", "partial-0.5"):
        every += _of(f"{name}@15-30", WITH_REFIT)
    return [*every, ("dense, SFT", "standard", SFT), *STAGED]


def _of(wiring: str, trainings: Mapping[str, dict[str, Any] | None]) -> list[Run]:
    return [(f"{wiring}, {name}", wiring, training) for name, training in trainings.items()]


def _made(name: str, wiring: str, training: dict[str, Any] | None, scratch: Path) -> Path:
    """Make the model of a run; its folder."""
    if training is None:
        return convert(quality.MODEL, scratch / name, Request(parse_wiring(wiring))).out
    if training is REFIT:
        return _made(f"{name} + distillation", wiring, {}, scratch).parent / "start"
    if TEXTS["path"] in [entry["path"] for entry in training.get("datasets", ())]:
        MADE.mkdir(parents=True, exist_ok=True)
        write_texts(REPO / TEXTS["path"])
    folder = MADE / re.sub(r"[^\w.-]+", "-", name)
    keys = {"wiring": wiring, "datasets": ROWS, "output_dir": str(folder), "bf16": True} | training
    keys["datasets"] = [entry | {"path": str(REPO / entry["path"])} for entry in keys["datasets"]]
    recipe = RECIPE
    if "recipe" in keys:
        recipe = RECIPE.with_name(f"smollm2-135m-{keys.pop('recipe')}.yaml")
        del keys["wiring"]  # its stages have their own
    return adapt(read(recipe, as_flags(keys)), resume=True)


def as_flags(keys: Mapping[str, Any]) -> list[str]:
    """Keys of a recipe, as the command takes them."""
    written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    return [part for key, value in written.items() for part in (f"--{key}", value)]


if __name__ == "__main__":
    main()
