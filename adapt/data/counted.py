"""Numbers of things in plain English: `1 row`, `2,000 rows`."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`count` and `noun`, which takes an s in the plural."""
    return f"{count:,} {noun}" + ("s" if count != 1 else "")
