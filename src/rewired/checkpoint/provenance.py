"""The original of a checkpoint whose weights changed: recorded in its config, and looked up by that record.

What `convert` and `adapt` call a base is the name, the revision and the files' SHA-256 of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rewired.cache import digest
from rewired.model.wiring import Wiring
from rewired.sources import Source, checkpoint_folder, find_source
from rewired.sources.hub import SHORT_NAMES

from .checkpoint import Checkpoint

TRAINED, FITS = "adapted", ("refit", "calibrated")  # the config's keys for records of trainings and fits,
AGAIN = "rewired_again"  # and of wirings that the weights had before; all have a base
FROM_SCRATCH = "from_scratch"  # marks a base whose weights are random: there is no original
_IS_REWIRED = "is_rewired"  # marks a base that is not the original itself: one with its weights and another wiring


def base_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The base whose weights were trained or fitted, if a checkpoint's `config` records that: the original itself, if
    one of its records names it."""
    bases = [config[name]["base"] for name in (TRAINED, *FITS, AGAIN) if name in config]
    return next((base for base in bases if _IS_REWIRED not in base), bases[0] if bases else None)


def original(base: Mapping[str, Any] | None) -> str | None:
    """The path or the id of the original that a base is, None where there is none or it is a rewired model."""
    return None if base is None or _IS_REWIRED in base else str(base["name"])


class Changed(NamedTuple):
    """The layers that have other weights than the original's, and whether the embedding, last norm or head may."""

    layers: tuple[int, ...] = ()
    ends: bool = False


def changed(config: Mapping[str, Any]) -> Changed:
    """What differs from the original's weights, as a checkpoint's `config` records it."""
    records = [config[name] for name in (TRAINED, AGAIN) if name in config]
    layers = {layer for record in records for layer in record["layers"]}
    if "refit" in config:
        fitted = Wiring.from_json(config["refit"]["wiring"], config["num_hidden_layers"], config["hidden_size"])
        layers |= {*fitted.rewired_layers}
    return Changed(tuple(sorted(layers)), any(record["ends"] for record in records))


def trained_tokens(training: Mapping[str, Any]) -> int:
    """How many tokens weights were trained on, by the record of their last training: in it, and before."""
    return int(training["tokens"] + training.get("tokens_before", 0))


def record(source: Source, folder: Path, revision: str | None = None) -> dict[str, Any]:
    """The base that `source` is, whose checkpoint is in `folder`."""
    located = source.locate("checkpoint")
    is_snapshot = folder.parent.name == "snapshots"  # of the hub's cache, named by its commit
    weights = [located] if located.is_file() else Checkpoint.open(folder).weight_files()
    return {
        "name": source.recorded_name,
        "revision": folder.name if is_snapshot else revision,
        "weights": {path.name: digest(path) for path in weights},
        **({_IS_REWIRED: True} if Checkpoint.open(folder).is_rewired else {}),
    }


def content(folder: Path) -> dict[str, str]:
    """The SHA-256 of a checkpoint's config and weights, by their files' names."""
    return {path.name: digest(path) for path in (folder / "config.json", *Checkpoint.open(folder).weight_files())}


def find(base: Mapping[str, Any], made: Path) -> Path:
    """The folder of the `base` that the config of `made` names. Raises ValueError where it is not what it was."""
    name = find_name(base, made)
    return checkpoint_folder(name, _revision(base, name))


def find_name(base: Mapping[str, Any], made: Path) -> str:
    """The path, id or short name by which `find` finds it."""
    name = base["name"]
    shorts = [short for short, repo in SHORT_NAMES.items() if repo == name]  # what a package carries has one
    problem = ""
    for candidate in (name, *shorts):
        try:
            located = find_source(candidate, _revision(base, candidate)).locate("checkpoint")
            changed = _changed(base["weights"], located)
            if not changed:
                return str(candidate)
            problem = problem or f"its {changed} is no longer what it was."
        except ValueError as error:
            problem = problem or str(error)
    raise ValueError(f"{made} was made from {name}, which is needed as its original: {problem}")


def _revision(base: Mapping[str, Any], name: str) -> str | None:
    """That to ask for; None for a folder, which may be a snapshot and have its commit in the record."""
    return None if Path(name).exists() else base.get("revision")


def _changed(weights: Mapping[str, str], located: Path) -> str | None:
    """The first file that is not there, or another one than it was."""
    for file, sha256 in weights.items():
        path = located if located.is_file() else located / file
        if path.name != file or not path.is_file() or digest(path) != sha256:
            return file
    return None
