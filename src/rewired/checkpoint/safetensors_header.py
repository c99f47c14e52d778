"""Safetensors headers, read without reading a tensor; the floating-point types of weights, stored and cast to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # by their names in torch
_DOUBLE = "F64"


@dataclass(frozen=True)
class TensorInfo:
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of its data. The name of its dtype says the bits of a number: F8_E4M3 has 8."""
        bits = 8 if self.dtype == "BOOL" else int(re.findall(r"\d+", self.dtype)[0])
        return math.prod(self.shape) * bits // 8


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Name, dtype and shape of every tensor in `path`. Raises ValueError if the file is truncated or corrupt."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - the handle is no dict
            return {name: TensorInfo(path.name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): download it again.") from None


def check_dtype(name: str) -> None:
    """Raise ValueError for what weights are not cast to."""
    if name not in DTYPES:
        raise ValueError(f"'{name}' is not a dtype to convert to: choose one of {', '.join(DTYPES)}.")


def check_types(tensors: Iterable[TensorInfo], dtype: str | None, what: str = "fitted") -> None:
    """Raise ValueError if one of `tensors`, cast to `dtype` if there is one, has a type in which nothing is written
    that is computed, that is `what`."""
    stored = {_cast(info, dtype).dtype for info in tensors}
    if odd := stored - set(DTYPES.values()):
        advice = "convert with --dtype bfloat16" if odd == {_DOUBLE} else "take weights that are not quantised"
        raise ValueError(f"Weights in {', '.join(sorted(odd))} cannot be {what}: {advice}.")


def needs_cast(tensors: Iterable[TensorInfo], dtype: str) -> bool:
    return any(_cast(info, dtype) != info for info in tensors)


def cast_size(tensors: Iterable[TensorInfo], dtype: str | None) -> int:
    """Bytes of tensor data after the cast, if there is one."""
    return sum(_cast(info, dtype).size for info in tensors)


def _cast(info: TensorInfo, dtype: str | None) -> TensorInfo:
    return replace(info, dtype=DTYPES[dtype]) if dtype and info.dtype in {*DTYPES.values(), _DOUBLE} else info
