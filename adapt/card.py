"""The model card of a trained model: its start's card, and a section on the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rewired import quantities
from rewired.convert.card import card_of_trained

_DIGITS = 4
_MEANINGS = {
    "loss": "Losses are means a token.",
    "ce": "`ce` is the cross-entropy, in nats.",
    "kd": "`kd` is the divergence from the original, in nats.",
    "hidden": "`hidden` is the squared error relative to the original's square.",
    "held_out_kl": "`held_out_kl` is KL(original || this) on rows that this training left out.",
    "held_out_perplexity": "`held_out_perplexity` is on rows that this training left out.",
}
_HEADING, _EARLIER = "\n## Training\n", "\n## Earlier training\n"


def card(
    start: Path,
    earlier: Path | None,
    final: Path,
    original: str | None,
    given: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
    notes: Sequence[str],
) -> str:
    """README.md of the model in `final`, trained from the checkpoint in `start`; `given` are the recipe's keys.

    `earlier` is the trained model that `start` was rewired from, if any; `original` is the name of the original,
    None if only the start's own card knows it.
    """
    before, trainings = _read(start)
    if earlier is not None and earlier != start:
        _, trainings = _read(earlier)
    trainings = trainings.replace(_LOGGED, "").replace(_HEADING, _EARLIER)  # the file is the last training's
    rows = _rows(history)
    return _TRAINING.format(
        before=(card_of_trained(before, final.parent.name, final, original) + trainings).rstrip(),
        logged=_LOGGED,
        tokens=quantities.count(record["tokens"], "token"),
        steps=quantities.count(record["steps"], "step"),
        earlier=f", after {quantities.count(record['tokens_before'], 'token')} of earlier training"
        if record["tokens_before"]
        else "",
        recipe=yaml.safe_dump(dict(given), sort_keys=False).strip(),
        notes="\n".join(f"- {note}" for note in notes),
        rows="\n".join(rows.values()),
        meanings=" ".join(_MEANINGS[name] for name in rows),
    )


def _read(folder: Path) -> tuple[str, str]:
    """The card in `folder`, and its sections on trainings, with which it ends."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    end = min((text.index(heading) for heading in (_EARLIER, _HEADING) if heading in text), default=len(text))
    return text[:end], text[end:]


def _rows(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A table's rows by the name of the curve: its first and its last value."""
    rows = {}
    for name in _MEANINGS:
        curve = [(entry["step"], entry[name]) for entry in history if name in entry]
        if curve:
            (first, start), (last, end) = curve[0], curve[-1]
            rows[name] = f"| {name} | {start:.{_DIGITS}g} (step {first}) | {end:.{_DIGITS}g} (step {last}) |"
    return rows


_LOGGED = " All that was logged is in [training.json](training.json)."
_TRAINING = """{before}

## Training

{steps}, {tokens}{earlier}.{logged}

| | first | last |
|---|---|---|
{rows}

{meanings}

{notes}

Trained by

    adapt recipe.yaml

where recipe.yaml is:

```yaml
{recipe}
```
"""
