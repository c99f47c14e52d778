"""Safetensors headers, read and checked without reading a tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewired.quantities import count

_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _ITEM_BITS[self.dtype] // 8


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor in `path`. Raises ValueError if the file is truncated or corrupt."""
    try:
        header, data_size = _load(path)
        spans = sorted(_span(name, entry) for name, entry in header.items())
        _check_layout(spans, data_size)
        return {name: TensorInfo(path.name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except ValueError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}. Download it again.") from None


def data_size(path: Path) -> int:
    """Bytes of tensor data in a file."""
    return _load(path)[1]


def _load(path: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON, and how many bytes of data follow it."""
    file_size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if file_size < 8 or header_size > file_size - 8:
            raise ValueError(f"it ends after {count(file_size, 'byte')}, inside its header")
        if header_size > _MAX_HEADER:
            raise ValueError(f"its header claims {header_size} bytes")
        raw = file.read(header_size)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of tensors")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not _is_table_of_texts(metadata):
        raise ValueError("its __metadata__ is not a table of texts")
    return header, file_size - 8 - header_size


def _is_table_of_texts(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"its header names '{name}' twice")
        table[name] = value
    return table


def _span(name: str, entry: Any) -> tuple[int, int, str]:
    """Where a tensor lies in the data; its length checked against its dtype and shape."""
    try:
        shape, (begin, end), bits = entry["shape"], entry["data_offsets"], _ITEM_BITS[entry["dtype"]]
        is_valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(f"the entry of '{name}' is malformed")
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise ValueError(f"'{name}' has {count(end - begin, 'byte')}, not what its shape {shape} takes")
    return begin, end, name


def _check_layout(spans: list[tuple[int, int, str]], data_size: int) -> None:
    position = 0
    for begin, end, name in spans:
        if end > data_size:
            raise ValueError(f"'{name}' ends at byte {end} of its {count(data_size, 'byte')} of data")
        if begin != position:
            raise ValueError(f"'{name}' starts at byte {begin}, where byte {position} was expected")
        position = end
    if position != data_size:
        raise ValueError(f"it has {count(data_size - position, 'byte')} at its end that no tensor holds")
