"""What rewired takes of vLLM beyond its interface is said in one place; this needs no vLLM."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import rewired

ROOM = Path(rewired.__file__).parent
FILES = [
    *(ROOM / "serve" / "vllm").glob("*.py"),
    ROOM / "bench" / "vllm_engine.py",
    ROOM / "evaluate" / "vllm_engine.py",
]


def test_every_module_of_vllm_that_is_imported_is_in_the_list_and_no_other() -> None:
    text = ast.get_docstring(ast.parse((ROOM / "serve" / "vllm" / "__init__.py").read_text()))
    assert text is not None
    listed = set(re.findall(r"^    ([a-z_.]+)  ", text, re.MULTILINE))
    taken = {name for file in FILES for name in modules_of_vllm(file)}
    assert taken
    for name in taken:
        assert any(name == each or name.startswith(f"{each}.") for each in listed), name
    for each in listed:
        assert any(name == each or name.startswith(f"{each}.") for name in taken), f"{each} is not used any more"


def modules_of_vllm(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse(file.read_text()))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and node.level == 0}
    return {name.removeprefix("vllm.") for name in names if name.startswith("vllm.")}
