"""The recipes that come with the package, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

import rewired

FOLDER = Path(str(rewired.__file__)).parent / "recipes"


def find(name: Path, folder: Path = Path()) -> Path:
    """The recipe `name`: a file in `folder` or, if there is none and the name is no path, one of the package's."""
    near = folder / name
    packaged = FOLDER / f"{_bare(name)}.yaml"
    is_name = name.parent == Path()
    return packaged if is_name and not near.is_file() and packaged.is_file() else near


def missing(path: Path) -> str:
    """A sentence for a recipe that is not there, with the nearest name that is."""
    names = [recipe.name for recipe in path.parent.glob("*.yaml")]
    near = difflib.get_close_matches(path.name, names, 1) or difflib.get_close_matches(_bare(path), descriptions(), 1)
    hint = f"did you mean {near[0]}?" if near else "`adapt --list` shows those that come with the package."
    return f"There is no recipe {path}: {hint}"


def descriptions() -> dict[str, str]:
    """The first line of each recipe by the recipe's name."""
    recipes = sorted(FOLDER.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in recipes}


def _bare(path: Path) -> str:
    """The name without its suffix; `stem` would end it at another dot."""
    return path.name.removesuffix(".yaml")
