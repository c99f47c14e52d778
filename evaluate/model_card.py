"""A gate's verdict on the card of the model that was judged."""

from __future__ import annotations

import re
from pathlib import Path

from rewired.cache import write_whole

from .gates import verdict
from .report import checks_table, plain
from .results import Results

_TRAINING = "\n## Training\n"  # with which the card of a trained model ends


def card_in(model: str) -> Path:
    """The card of the model in a folder. Raises ValueError where `model` is something else, or has none."""
    card = Path(model) / "README.md"
    if not card.is_file():
        raise ValueError(f"--card writes on the README.md in a model's folder, and {model} has none: leave it out.")
    return card


def note_gate(card: Path, results: Results, name: str, command: str, date: str) -> None:
    """Write on the `card` of the model `name` what the gate found, in place of what it found before."""
    found, gate = results.checks[name], f"## Gate {plain(str(results.gate))}: "
    text = re.sub(rf"\n{re.escape(gate)}.*?(?=\n## |\Z)", "", card.read_text(encoding="utf-8"), flags=re.DOTALL)
    before, training, after = text.partition(_TRAINING)
    made = f"{date}, against {plain(results.original.name)} (sha256 {results.original.sha256[:12]}):"
    section = "\n\n".join([gate + verdict(found), made, f"    {command}", checks_table(found)])
    write_whole(card, f"{before.rstrip()}\n\n{section}\n{training}{after}")
