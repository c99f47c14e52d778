"""YAML files that come with the package, by their names, and all others, by their paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml


def read_yaml(kind: str, name: str, folder: Path) -> tuple[Path, Any]:
    """The path and the content of a `kind` of file: one of `folder`, or any other. Raises ValueError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = names_in(folder)
        near = get_close_matches(name, known) or known
        raise ValueError(f"There is no {kind} '{name}': take {one_of(near)}, or the path of a .yaml file.")
    try:
        return path, yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"The {kind} {path} is not readable YAML: {' '.join(str(error).split())}.") from None


def names_in(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def refuse_unknown(given: Iterable[Any], known: Sequence[str], where: str) -> None:
    """Raise ValueError for a key that means nothing."""
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), known) or known
            raise ValueError(f"{where} has the key '{key}', which is not known: did you mean {one_of(near)}?")


def one_of(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
