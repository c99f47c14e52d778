"""The model card of a trained model: its start's card, and a section on the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rewired.convert.card import card_of_trained

from .data.counted import counted

_DIGITS = 4
_HEADING, _EARLIER = "\n## Training\n", "\n## Earlier training\n"


def card(
    start: Path,
    earlier: Path | None,
    name: str,
    original: str | None,
    given: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
    notes: Sequence[str],
) -> str:
    """README.md of the model `name`, trained from the checkpoint in `start`; `given` are the recipe's keys.

    `earlier` is the trained model that `start` was rewired from, if any; `original` is the name of the original,
    None if only the start's own card knows it.
    """
    before = card_of_trained(_read(start), name, original)
    if earlier is not None and earlier != start:
        before = before.rstrip() + "\n" + _trainings(_read(earlier))
    for part in (_CURVES, _LOGGED):
        before = before.replace(part, "")  # these files are the last training's
    return _TRAINING.format(
        before=before.replace(_HEADING, _EARLIER).rstrip(),
        logged=_LOGGED,
        curves=_CURVES,
        tokens=counted(record["tokens"], "token"),
        steps=counted(record["steps"], "step"),
        earlier=f", after {counted(record['tokens_before'], 'token')} of earlier training"
        if record["tokens_before"]
        else "",
        recipe=yaml.safe_dump(dict(given), sort_keys=False).strip(),
        notes="\n".join(f"- {note}" for note in notes),
        rows="\n".join(_rows(history)),
    )


def _trainings(text: str) -> str:
    """The sections on trainings, with which a card ends."""
    places = [text.index(heading) for heading in (_EARLIER, _HEADING) if heading in text]
    return text[min(places) :] if places else ""


def _read(folder: Path) -> str:
    path = folder / "README.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _rows(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table's rows: the first and the last value of each curve."""
    rows = []
    for name in ("loss", "ce", "kd", "hidden", "held_out_kl", "held_out_perplexity"):
        curve = [(entry["step"], entry[name]) for entry in history if name in entry]
        if curve:
            (first, start), (last, end) = curve[0], curve[-1]
            rows.append(f"| {name} | {start:.{_DIGITS}g} (step {first}) | {end:.{_DIGITS}g} (step {last}) |")
    return rows


_LOGGED = " All that was logged is in [training.json](training.json)."
_CURVES = "![The curves of the training](curves.png)\n\n"
_TRAINING = """{before}

## Training

{steps}, {tokens}{earlier}. Losses are means a token, `ce` and `kd` in nats, `hidden` the squared error
relative to the original's square; `held_out_kl` is KL(original || this) on rows that this training left out.{logged}

| | first | last |
|---|---|---|
{rows}

{curves}{notes}

```yaml
{recipe}
```
"""
