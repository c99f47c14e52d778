"""Safetensors headers, read without reading a tensor."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open


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
