"""A check of `make lint`: no room sees a name of another room as Any, which mypy alone would let pass in silence.

python .ci/types_between_rooms.py [SRC]     # SRC is the folder that holds the import package; src by default
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mypy import api

PACKAGE = "rewired"


def main(src: Path) -> int:
    """0 where mypy knows every name that crosses rooms; else 1, and the names on stderr."""
    names = sorted(set(_imports(src / PACKAGE)))
    assert names, f"no room of {src} imports another"
    untyped = _any_of(names, src)
    for module, name in untyped:
        print(f"{module}.{name} is Any to mypy: the rooms that import it are not checked against it.", file=sys.stderr)
    return int(bool(untyped))


def _imports(package: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything that is imported by its absolute name."""
    for folder, _, files in os.walk(package, followlinks=True):
        for path in (Path(folder) / file for file in files if file.endswith(".py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.level == 0 and f"{node.module}.".startswith(f"{PACKAGE}."):
                    yield from ((str(node.module), alias.name) for alias in node.names)


def _any_of(names: list[tuple[str, str]], src: Path) -> list[tuple[str, str]]:
    """Those of `names` that mypy, as pyproject.toml configures it, reveals as Any."""
    lines = [f"from {module} import {name} as name; reveal_type(name)" for module, name in names]
    with tempfile.TemporaryDirectory() as scratch:
        probe = Path(scratch) / "probe.py"
        probe.write_text("\n".join(lines))
        output, errors, _ = api.run(["--config-file", str(src.parent / "pyproject.toml"), "--no-pretty", str(probe)])
    revealed = re.findall(r'probe\.py:(\d+): note: Revealed type is "(.*)"', output)
    assert len(revealed) == len(names), output + errors
    return [names[int(line) - 1] for line, kind in revealed if kind == "Any"]


if __name__ == "__main__":
    sys.exit(main(Path(*sys.argv[1:2] or ["src"])))
