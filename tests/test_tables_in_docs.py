"""Tables of the pages that repeat the code say what the code says."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rewired.adapt.recipe.keys import Recipe
from rewired.comm.companion import CommKeys
from rewired.comm.options import Comm
from tests.test_docs import ROOT


def test_the_keys_of_recipes() -> None:
    rows = [key_row(field, keys) for keys in (Recipe, CommKeys) for field in dataclasses.fields(keys)]
    table = "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
    assert f"\n{table}\n" in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")


def key_row(field: dataclasses.Field[Any], keys: type) -> str:
    default = "required" if field.name in ("model", "datasets") else str(field.default).lower()
    help_text = field.metadata["help"]
    hint = get_type_hints(keys)[field.name]
    if get_origin(hint) is Literal:
        help_text = f"{help_text.removesuffix('.')}: {', '.join(get_args(hint))}."
    return f"| `{field.name}` | {default} | {help_text} |"


def test_the_defaults_of_comm() -> None:
    page = (ROOT / "docs" / "comm.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(Comm):
        assert field.default is None or f"\n| `{field.name}` | `{str(field.default).lower()}` |" in page, field.name
