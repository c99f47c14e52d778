"""The memory that a bench takes, before it is taken."""

from __future__ import annotations

from pathlib import Path

import torch

from rewired.checkpoint.shape import USABLE, Shape, cache_bytes, weight_bytes
from rewired.grid.size import TpSize
from rewired.quantities import count, size

from .request import VLLM, BenchRequest

_MEMINFO = Path("/proc/meminfo")


def check_memory(request: BenchRequest, shape: Shape, tp: TpSize, batch: int, contenders: int, copies: int) -> None:
    """Raise ValueError where weights and caches of `tp` ranks do not fit. A CPU's ranks share its memory.

    Contenders share both, where their weights are split alike; there are so many `copies` of weights as there are ways
    to split them. Each engine of vLLM has its own.
    """
    width = _width(request)
    caches = 3 if request.is_compiled else 2  # dynamic and static ones that stay, and that of a prefill
    tokens = batch * (request.prompt + request.new)
    needed = width * (copies * weight_bytes(shape, tp) + min(copies, 2) * caches * cache_bytes(shape, tp.x, tokens))
    if request.trains:  # a copy, gradients and two moments; logits and their gradient in float32
        own = contenders if request.fsdp > 1 else 0  # parts of weights
        weights = copies + (4 * copies + own) / request.fsdp
        needed = width * weights * weight_bytes(shape, tp) + 8 * batch * request.prompt * shape.vocab_size
    if request.engine == VLLM:
        needed = width * contenders * (weight_bytes(shape, tp) + cache_bytes(shape, tp, tokens))
    if request.device == "cuda":
        free, where = USABLE * torch.cuda.get_device_properties(0).total_memory, "a GPU has"
    else:
        needed *= 1 if request.emulation else tp * request.fsdp
        free, where = _available(), "this machine has"
    if needed > free:
        ranks = count(tp * request.fsdp, "rank")
        raise ValueError(
            f"{request.model} with batch {batch} on {ranks} takes {size(needed)} of weights and caches, "
            f"and {where} {size(free)}: take fewer --layers, a smaller --batch, or more ranks."
        )


def engine_cache(request: BenchRequest, shape: Shape, tp: int, batch: int, spare: int) -> int:
    """Bytes of a rank's keys and values in an engine; each sequence has room for so many `spare` tokens more."""
    tokens = batch * (request.prompt + request.new + spare)
    return int(_width(request) * cache_bytes(shape, tp, tokens))


def _width(request: BenchRequest) -> float:
    """Of numbers, as a multiple of the 16 bits that are planned with."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype.itemsize / 2


def _available() -> float:
    """Bytes that a process may take; without a limit where the system does not say."""
    if not _MEMINFO.exists():
        return float("inf")
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text("ascii").splitlines())
    return 1024.0 * int(lines["MemAvailable"].split()[0])
