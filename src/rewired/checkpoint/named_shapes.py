"""Shapes of models: by the short names of shapes.toml, or of a checkpoint's config.json."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from rewired.families import FAMILIES
from rewired.sources import find_source

from .checkpoint import Checkpoint
from .shape import Shape


@cache
def named_shapes() -> dict[str, Shape]:
    table = tomllib.loads((files("rewired.checkpoint") / "shapes.toml").read_text("utf-8"))
    return {name: Shape.from_config({"model_type": _type_of(name), **sizes}) for name, sizes in table.items()}


def _type_of(name: str) -> str:
    """The model_type of a short name: qwen2.5-7b is a qwen2."""
    return next((kind for kind in FAMILIES if name.startswith(kind)), "llama")


def find_shape(model: str) -> Shape:
    """The shape that a short name, a checkpoint's folder or a hub id means. Raises ValueError if there is none."""
    return named_shape(model) or find_checkpoint(model).shape


def named_shape(model: str) -> Shape | None:
    """The shape of a short name, if `model` is one; a folder of that name comes first."""
    return None if Path(model).is_dir() else named_shapes().get(model.lower().removesuffix("-instruct"))


def find_checkpoint(model: str) -> Checkpoint:
    """The config of a checkpoint, by its folder or hub id. Raises ValueError if there is none, or it is quantised."""
    try:
        source = find_source(model)
    except ValueError as error:
        like = get_close_matches(model.lower(), named_shapes()) or named_shapes()
        raise ValueError(f"{error} Shapes without a checkpoint: {', '.join(like)}.") from None
    with TemporaryDirectory(prefix="rewired-") as scratch:
        checkpoint = Checkpoint.open(source.preview(Path(scratch)))
    checkpoint.check_unquantised()
    return checkpoint
