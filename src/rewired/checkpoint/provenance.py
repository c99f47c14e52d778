"""The original of a checkpoint whose weights changed: recorded in its config, and looked up by that record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewired.cache import digest
from rewired.sources import Source, checkpoint_folder, find_source
from rewired.sources.hub import SHORT_NAMES

from .checkpoint import Checkpoint


def record(source: Source, folder: Path, revision: str | None = None) -> dict[str, Any]:
    """What identifies `source`, whose checkpoint is in `folder`: path or id, revision, its files' SHA-256."""
    located = source.locate("checkpoint")
    is_snapshot = folder.parent.name == "snapshots"  # of the hub's cache, named by its commit
    weights = [located] if located.is_file() else Checkpoint.open(folder).weight_files()
    return {
        "name": str(source.folder.resolve()) if source.folder else source.base_model,
        "revision": folder.name if is_snapshot else revision,
        "weights": {path.name: digest(path) for path in weights},
    }


def content(folder: Path) -> dict[str, str]:
    """The SHA-256 of a checkpoint's config and weights, by their files' names."""
    return {path.name: digest(path) for path in (folder / "config.json", *Checkpoint.open(folder).weight_files())}


def find(base: Mapping[str, Any], made: Path) -> Path:
    """The folder of the `base` that the config of `made` names. Raises ValueError where it is not what it was."""
    name, revision = base["name"], base.get("revision")
    shorts = [short for short, repo in SHORT_NAMES.items() if repo == name]  # what a package carries has one
    problem = ""
    for candidate in (name, *shorts):
        try:
            located = find_source(candidate, revision).locate("checkpoint")
            changed = _changed(base["weights"], located)
            if not changed:
                return checkpoint_folder(candidate, revision)
            problem = problem or f"its {changed} is no longer what it was."
        except ValueError as error:
            problem = problem or str(error)
    raise ValueError(f"{made} was made from {name}, which is needed as its original: {problem}")


def _changed(weights: Mapping[str, str], located: Path) -> str | None:
    """The first file that is not there, or another one than it was."""
    for file, sha256 in weights.items():
        path = located if located.is_file() else located / file
        if path.name != file or not path.is_file() or digest(path) != sha256:
            return file
    return None
