"""A folder of calibration text that also looks things up: the packaged mix, and lists that are asked for again.

    .venv/bin/python studies/lookups.py FOLDER [FILES]
    .venv/bin/convert SOURCE OUT --wiring desync-2x@15-30 --refit FOLDER

Of the mix it has what `--refit` alone fits on. Lookups come in so many FILES (1), and files give a refit equal parts.
None has the words of `evaluate --retrieval`.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

from rewired.text.documents import KEPT_BACK, mix

NAMES = "Anna Ben Clara David Elena Farid Greta Hugo Iris Jonas Karim Lena Marco Nadia Oscar Petra Rosa Samir Vera Zoe"
MONTHS = "January February March April May June July August"
BETWEEN = (": ", " - ", " = ", " has number ", " -> ", " was given ", "\t", ", ")
TITLES = ("Register:", "List of entries:", "Notes:", "Table:", "Assignments:")
AGAIN = ("As asked, again:", "To look up:", "Copies:", "Answers:")
DOCUMENTS = 600


def main() -> None:
    folder, files = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    folder.mkdir()
    fitted = [documents[: len(documents) - len(documents) // KEPT_BACK] for documents in mix()]
    for number, documents in enumerate(fitted):
        write(folder / f"mix-{number}.jsonl", documents)
    prose = " ".join(fitted[-1])
    for seed in range(files):
        draw = random.Random(seed)
        write(folder / f"lookups-{seed}.jsonl", [lookups(prose, draw) for _ in range(DOCUMENTS)])


def write(file: Path, documents: list[str]) -> None:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def lookups(prose: str, draw: random.Random) -> str:
    """Sentences and then the same again, or a list and then some of its entries in another order."""
    start = draw.randrange(len(prose) - 4000)
    some = prose[start : start + 4000]
    if draw.random() < 0.3:
        sentences = re.findall(r"[A-Z][^.]{40,200}\.", some)[:4]
        return " ".join([*sentences, "\n\nOnce more:\n", *draw.sample(sentences, len(sentences))])
    words = sorted(set(re.findall(r"\b[a-z]{5,9}\b", some)))
    numbers = [str(draw.randrange(10, 10 ** draw.randrange(2, 7))) for _ in range(40)]
    dates = [f"{draw.randrange(1, 28)} {draw.choice(MONTHS.split())} {draw.randrange(1900, 2025)}" for _ in range(20)]
    people = [" ".join(draw.sample(NAMES.split(), 2)) for _ in range(20)]
    keys, values = draw.choice([people, words, numbers]), draw.choice([words, numbers, dates])
    count, between, end = draw.randrange(6, 11), draw.choice(BETWEEN), draw.choice(("\n", "; ", ". "))
    entries = [key + between + draw.choice(values) for key in draw.sample(keys, min(count, len(keys)))]
    again = draw.sample(entries, len(entries) * 2 // 3)
    return "\n".join([draw.choice(TITLES), end.join(entries), draw.choice(AGAIN), end.join(again)])


if __name__ == "__main__":
    main()
