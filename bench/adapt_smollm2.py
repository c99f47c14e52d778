"""What a training makes of SmolLM2-135M: SFT against distillation, with and without a refit, at equal tokens.

    .venv/bin/rewired data fetch instruct .instruct
    .venv/bin/python bench/adapt_smollm2.py              # all of them, hours; what results/adapt-smollm2 has is kept
    .venv/bin/python bench/adapt_smollm2.py "ladder 15"  # those whose names begin so

All read the same rows of ShareGPT and natural instructions, and are trained in bfloat16 with weights in float32. KL to
the original and perplexity are measured as in `bench/quality.py`, on text of which none is trained on. The trained
models stay in build/adapt-smollm2, for `evaluate`; a killed run goes on where it was.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from quality import KINDS, MODEL, WIRINGS, compare, held_out, told
from transformers.utils import logging

from rewired.adapt.recipe_file import read
from rewired.adapt.start import RECORD
from rewired.adapt.train import adapt
from rewired.convert import Request, convert

REPO = Path(__file__).parents[1]
FOLDER = REPO / "results" / "adapt-smollm2"
RESULT = FOLDER / "measured.jsonl"
MADE = REPO / "build" / "adapt-smollm2"
RECIPE = REPO / "recipes" / "smollm2-135m-ladder-distill.yaml"
ROWS = [str(REPO / ".instruct" / name) for name in ("sharegpt.jsonl", "natural_instructions.jsonl")]
SFT = {"refit": "none", "train": "all", "ce_weight": 1.0, "kd_weight": 0.0, "assistant_only_loss": True}
TRAININGS: dict[str, dict[str, Any] | None] = {
    "converted": None,
    "SFT": SFT,
    "distillation": {"refit": "none"},
    "refit + distillation": {},
}


def main() -> None:
    logging.disable_progress_bar()
    FOLDER.mkdir(parents=True, exist_ok=True)
    known = {row["name"] for row in rows()}
    with tempfile.TemporaryDirectory(prefix="rewired-adapt-") as scratch:
        standard = [{"layers": "0-", "preset": "standard"}]
        source = convert(MODEL, Path(scratch) / "source", Request(standard)).out
        texts = held_out(source)
        for name, wiring, training in runs():
            if name in known or not name.startswith(tuple(sys.argv[1:]) or ""):
                continue
            model = _made(name, wiring, training, Path(scratch))
            found = {kind: told(one) for kind, one in compare(source, model, texts).items()}
            tokens = json.loads((model / "config.json").read_text()).get(RECORD, {}).get("tokens", 0)
            row = {"name": name, "wiring": wiring, "training": training, "tokens": tokens, "on": found}
            with RESULT.open("a") as file:
                file.write(json.dumps(row) + "\n")
            (FOLDER / "measured.md").write_text(table())
            if training is not None:
                shutil.copy(model / "curves.png", FOLDER / f"{_file_name(name)}.png")
            print(name, {kind: round(one["kl"], 3) for kind, one in found.items()}, flush=True)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULT.read_text().splitlines()] if RESULT.exists() else []


def table() -> str:
    """What is measured so far, in the order of `runs`."""
    measured = {row["name"]: row for row in rows()}
    lines = [
        "| training | tokens | KL prose | chat | code | perplexity prose | chat | code |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if measured:
        on = rows()[-1]["on"]
        originals = [f"{on[kind]['perplexity_original']:.1f}" for kind in KINDS]
        lines.append(f"| {' | '.join(['original', '0', '0', '0', '0', *originals])} |")
    for name in (name for name, *_ in runs() if name in measured):
        on = [measured[name]["on"][kind] for kind in KINDS]
        kls = [f"{one['kl']:.3f} ± {one['kl_standard_error']:.3f}" for one in on]
        perplexities = [f"{one['perplexity']:.1f}" for one in on]
        lines.append(f"| {' | '.join([name, format(measured[name]['tokens'], ','), *kls, *perplexities])} |")
    return "\n".join(lines) + "\n"


def runs() -> list[tuple[str, list[dict[str, Any]], dict[str, Any] | None]]:
    """Name, wiring and training of each."""
    found: list[tuple[str, list[dict[str, Any]], dict[str, Any] | None]] = []
    for layers in ("15-30", "0-30"):
        ladder, peek = ([WIRINGS[name] | {"layers": layers}] for name in ("ladder", "ladder-peek"))
        found += [(f"ladder {layers}, {name}", ladder, training) for name, training in TRAININGS.items()]
        found.append((f"ladder-peek {layers}, refit + distillation", peek, {}))
    for name in ("desync-2x", "desync-4x", "partial-0.5"):
        found.append((f"{name} 15-30, refit + distillation", [WIRINGS[name] | {"layers": "15-30"}], {}))
    dense = [{"layers": "0-30", "preset": "standard"}]
    return [*found, ("dense, SFT", dense, SFT)]


def _made(name: str, wiring: list[dict[str, Any]], training: dict[str, Any] | None, scratch: Path) -> Path:
    """The folder of the trained model, or of the one that is converted only."""
    if training is None:
        return convert(MODEL, scratch / name, Request(wiring)).out
    keys = {"wiring": wiring, "datasets": ROWS, "output_dir": str(MADE / _file_name(name)), "bf16": True}
    flags = [part for key, value in (keys | training).items() for part in (f"--{key}", _written(value))]
    return adapt(read(RECIPE, flags), resume=True)


def _file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" + ", "-").replace(" ", "-")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    main()
