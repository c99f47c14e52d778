"""The recipes that come with the package, by name."""

from __future__ import annotations

import difflib
from pathlib import Path

import rewired

FOLDER = Path(str(rewired.__file__)).parent / "recipes"


def find(name: Path, folder: Path = Path()) -> Path:
    """The recipe `name`: a file in `folder` or, if there is none and the name is no path, one of the package's.

    Raises ValueError, with the nearest name that there is, if it is neither.
    """
    near, packaged = folder / name, FOLDER / f"{_bare(name)}.yaml"
    if not near.is_file() and name.parent == Path() and packaged.is_file():
        return packaged
    if near.exists():
        return near
    names = [recipe.name for recipe in near.parent.glob("*.yaml")]
    alike = difflib.get_close_matches(near.name, names, 1) or difflib.get_close_matches(_bare(near), descriptions(), 1)
    hint = f"did you mean {alike[0]}?" if alike else "`adapt --list` shows those that come with the package."
    raise ValueError(f"There is no recipe {near}: {hint}")


def descriptions() -> dict[str, str]:
    """The first line of each recipe by the recipe's name."""
    recipes = sorted(FOLDER.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in recipes}


def _bare(path: Path) -> str:
    """The name without its suffix; `stem` would end it at another dot."""
    return path.name.removesuffix(".yaml")
