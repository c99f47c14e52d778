"""The model card of a trained model: its start's card, and a section on the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rewired import quantities
from rewired.convert.card import card_of_trained

_DIGITS = 4
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
        rows="\n".join(_rows(history)),
    )


def _read(folder: Path) -> tuple[str, str]:
    """The card in `folder`, and its sections on trainings, with which it ends."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    end = min((text.index(heading) for heading in (_EARLIER, _HEADING) if heading in text), default=len(text))
    return text[:end], text[end:]


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
_TRAINING = """{before}

## Training

{steps}, {tokens}{earlier}. Losses are means a token, `ce` and `kd` in nats, `hidden` the squared error
relative to the original's square; `held_out_kl` is KL(original || this) on rows that this training left out.{logged}

| | first | last |
|---|---|---|
{rows}

{notes}

Trained by

    adapt recipe.yaml

where recipe.yaml is:

```yaml
{recipe}
```
"""
