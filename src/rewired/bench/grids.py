"""A bench on a grid of ranks: what of it can be timed there, beside the stock model on as many ranks without a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from rewired.grid.size import TpSize, blocks_of, check
from rewired.progress import announce

from .contenders import STANDARD, STOCK, Contender
from .models import config_of, family, sizes_of
from .request import TRANSFORMERS, BenchRequest


def on_grid(
    request: BenchRequest, rivals: Sequence[Contender], config: Mapping[str, Any], tp_shards: int, tp: TpSize
) -> list[Contender]:
    """Those that run on the grid; the others are left out, and it is said why.

    Raises ValueError where the model does not fit, or the bench is one without grids.
    """
    if request.emulation is not None or request.engine != TRANSFORMERS:
        flag = f"--engine {request.engine}" if request.emulation is None else "--emulated"
        raise ValueError(
            f"--tp {tp} is a grid of ranks that transformers runs: leave out {flag}, or give --tp {int(tp)}."
        )
    sizes = sizes_of(config)
    check(config_of(Contender(STANDARD, []), sizes, 1), tp, name="--tp")
    return [rival for rival in rivals if _runs(rival, request, sizes, tp_shards, tp)]


def _runs(rival: Contender, request: BenchRequest, sizes: PreTrainedConfig, tp_shards: int, tp: TpSize) -> bool:
    try:
        if rival.name == STOCK:
            family(sizes).check_shards(sizes, int(tp), "--tp")
        else:
            check(config_of(rival, sizes, tp_shards), tp, request.fsdp, "--tp")
    except ValueError as error:
        announce(f"bench: {rival.name} is left out: {error}")
        return False
    return True


def copies_of_weights(rivals: Sequence[Contender], config: Mapping[str, Any], tp_shards: int, tp: TpSize) -> int:
    """In how many ways weights are split: on a grid, as stock's, and by each number of blocks."""
    if tp.y == 1:
        return 1
    sizes = sizes_of(config)
    return len({0 if rival.name == STOCK else blocks_of(config_of(rival, sizes, tp_shards)) for rival in rivals})
