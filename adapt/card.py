"""The model card of a trained model: its start's card, and a section on the training."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rewired import quantities
from rewired.convert.card import card_of_trained

_DIGITS = 4
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_BASE_MODEL = re.compile(r"^base_model: *[\"']?(?P<name>[^\"'\n]+?)[\"']? *\n", re.MULTILINE)  # one, not a list
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
    untrained = _read(start)
    before = _with_base_model(card_of_trained(untrained, name, original), original or "", untrained)
    if earlier is not None and earlier != start:
        before = before.rstrip() + "\n" + _trainings(_read(earlier))
    for part in (_CURVES, _LOGGED):
        before = before.replace(part, "")  # these files are the last training's
    return _TRAINING.format(
        before=before.replace(_HEADING, _EARLIER).rstrip(),
        logged=_LOGGED,
        curves=_CURVES,
        tokens=quantities.count(record["tokens"], "token"),
        steps=quantities.count(record["steps"], "step"),
        earlier=f", after {quantities.count(record['tokens_before'], 'token')} of earlier training"
        if record["tokens_before"]
        else "",
        recipe=yaml.safe_dump(dict(given), sort_keys=False).strip(),
        notes="\n".join(f"- {note}" for note in notes),
        rows="\n".join(_rows(history)),
    )


def _with_base_model(card: str, original: str, untrained: str) -> str:
    """`card` with the original's id on the hub as its `base_model` or, of an original in a folder, with the id that
    the `untrained` model's card has. Without an id it names none, since the hub would find nothing there.
    """
    front_matter = re.match(r"---\n.*?^---\n", card, re.DOTALL | re.MULTILINE)
    if front_matter is None:
        return card
    declared = _BASE_MODEL.search(untrained)
    ids = [name for name in (original, declared["name"] if declared else "") if _HUB_ID.fullmatch(name)]
    rest = _BASE_MODEL.sub("", front_matter[0], count=1).removeprefix("---\n")
    if not ids or re.search(r"^base_model:", rest, re.MULTILINE):  # or a merge's list of bases, which stays
        return f"---\n{rest}{card[front_matter.end() :]}"
    return f"---\nbase_model: {json.dumps(ids[0])}\n{rest}{card[front_matter.end() :]}"


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
