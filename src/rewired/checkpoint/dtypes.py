"""The floating-point types that weights are stored in and cast to, by their names in torch and in safetensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .safetensors_header import TensorInfo

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DOUBLE = "F64"
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_dtype(name: str) -> str:
    """The full name of a dtype. Raises ValueError for another one."""
    name = ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"'{name}' is not a dtype to convert to: choose one of {', '.join(DTYPES)}.")
    return name


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
