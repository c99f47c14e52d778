"""What models are called, in reports and in files' names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def names_of(models: Sequence[str]) -> list[str]:
    """What a report calls `models`, as a user gave them: a folder by the end of its path that only it has.

    Trainers' folders, `final` and `checkpoint-N`, are called by the folder that they lie in, too.
    """
    bases_and_adapters = [base_and_adapter(given) for given in models]
    paths = [_parts(adapter or base) for base, adapter in bases_and_adapters]
    ends = ["/".join(path[-_enough(path, paths) :]) for path in paths]
    bases = [names_of([base])[0] if adapter else "" for base, adapter in bases_and_adapters]
    return [f"{base}+{end}" if base else end for base, end in zip(bases, ends, strict=True)]


def base_and_adapter(given: str) -> tuple[str, str]:
    """BASE and ADAPTER of BASE+ADAPTER; without an adapter, the second is empty. A name on disk may have a +."""
    base, plus, adapter = given.partition("+")
    return (given, "") if not plus or Path(given).exists() else (base, adapter)


def as_file_name(name: str) -> str:
    """A model's or a task's name, such as org/model, as that of one file or folder."""
    return name.replace("/", "--").replace("\\", "--") if name not in ("", ".", "..") else f"--{name}"


def _parts(given: str) -> tuple[str, ...]:
    return Path(given).resolve().parts[1:] if Path(given).is_dir() else (given,)


def _enough(path: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> int:
    """How many parts at the end of `path` no other one of `paths` ends with."""
    least = 2 if re.fullmatch(r"final|checkpoint-\d+", path[-1]) else 1
    sizes, others = range(least, len(path)), [other for other in paths if other != path]
    return next((size for size in sizes if all(other[-size:] != path[-size:] for other in others)), len(path))
