"""Texts that look something up."""

from __future__ import annotations

import re

from rewired.text.lookups import lookups

PROSE = (
    " ".join(
        f"The {noun} sailed along every {place} before winter."
        for noun in ("ship", "storm")
        for place in ("harbour", "island", "mountain", "village")
    )
    * 40
)


def test_what_comes_last_stood_in_the_text_before() -> None:
    documents = lookups([PROSE], 200)
    for document in documents:
        before, title, after = re.split(r"\n(As asked, again:|To look up:|Copies:|Answers:|\nOnce more:)\n", document)
        entries = (
            re.findall(r"[A-Z][^.]{40,200}\.", after) if "Once" in title else re.split("\n|; |[.] ", after.strip())
        )
        assert entries and all(entry.strip() in before for entry in entries), document
    assert len(set(documents)) > 100


def test_a_seed_gives_the_same_texts() -> None:
    assert lookups([PROSE], 3) == lookups([PROSE], 4)[:3] != lookups([PROSE], 3, seed=1)
