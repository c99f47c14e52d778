"""Texts that look something up: sentences that come again, and lists whose entries are asked for again.

Calibration text without such loses what attends to earlier tokens (results/quality/gates.md). None has the words of
`evaluate --retrieval`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from .conversations import Document

_NAMES = "Anna Ben Clara David Elena Farid Greta Hugo Iris Jonas Karim Lena Marco Nadia Oscar Petra Rosa Samir Vera Zoe"
_MONTHS = "January February March April May June July August"
_BETWEEN = (": ", " - ", " = ", " has number ", " -> ", " was given ", "\t", ", ")
_TITLES = ("Register:", "List of entries:", "Notes:", "Table:", "Assignments:")
_AGAIN = ("As asked, again:", "To look up:", "Copies:", "Answers:")


def lookups(prose: Sequence[Document], count: int = 600, seed: int = 0) -> list[str]:
    """So many documents, which take their words from `prose`."""
    text, draw = " ".join(map(str, prose)), random.Random(seed)
    return [_lookup(text, draw) for _ in range(count)]


def _lookup(prose: str, draw: random.Random) -> str:
    """Sentences and then the same again, or a list and then some of its entries in another order."""
    start = draw.randrange(len(prose) - 4000)
    some = prose[start : start + 4000]
    if draw.random() < 0.3:
        sentences = re.findall(r"[A-Z][^.]{40,200}\.", some)[:4]
        return " ".join([*sentences, "\n\nOnce more:\n", *draw.sample(sentences, len(sentences))])
    words = sorted(set(re.findall(r"\b[a-z]{5,9}\b", some)))
    numbers = [str(draw.randrange(10, 10 ** draw.randrange(2, 7))) for _ in range(40)]
    dates = [f"{draw.randrange(1, 28)} {draw.choice(_MONTHS.split())} {draw.randrange(1900, 2025)}" for _ in range(20)]
    people = [" ".join(draw.sample(_NAMES.split(), 2)) for _ in range(20)]
    keys, values = draw.choice([people, words, numbers]), draw.choice([words, numbers, dates])
    count, between, end = draw.randrange(6, 11), draw.choice(_BETWEEN), draw.choice(("\n", "; ", ". "))
    entries = [key + between + draw.choice(values) for key in draw.sample(keys, min(count, len(keys)))]
    again = draw.sample(entries, len(entries) * 2 // 3)
    return "\n".join([draw.choice(_TITLES), end.join(entries), draw.choice(_AGAIN), end.join(again)])
