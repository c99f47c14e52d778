"""A bench on a grid of ranks: what of it can be timed there, beside the stock model on as many ranks without a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from rewired.checkpoint.rewired_config import stock_config
from rewired.checkpoint.shape import family_in
from rewired.families import stock
from rewired.grid.size import TpSize, check
from rewired.progress import announce

from .contenders import STANDARD, STOCK, Contender
from .models import config_of
from .request import TRANSFORMERS, BenchRequest


def on_grid(
    request: BenchRequest, rivals: Sequence[Contender], config: Mapping[str, Any], tp_shards: int, tp: TpSize
) -> list[Contender]:
    """Those that run on the grid; the others are left out, and it is said why.

    Raises ValueError where the model does not fit, or the bench is one without grids.
    """
    for flag, is_given in {
        "--emulated": request.emulation,
        f"--engine {request.engine}": request.engine != TRANSFORMERS,
    }.items():
        if is_given:
            raise ValueError(
                f"--tp {tp} is a grid of ranks that transformers runs: leave out {flag}, or give --tp {int(tp)}."
            )
    sizes = stock(family_in(config), "Config").from_dict(stock_config(config))
    check(config_of(Contender(STANDARD, []), sizes, 1), tp)
    return [rival for rival in rivals if _runs(rival, request, sizes, tp_shards, tp)]


def _runs(rival: Contender, request: BenchRequest, sizes: PreTrainedConfig, tp_shards: int, tp: TpSize) -> bool:
    try:
        if rival.name == STOCK:
            family_in(sizes.to_dict()).check_shards(sizes, int(tp), "--tp")
        else:
            check(config_of(rival, sizes, tp_shards), tp, request.fsdp)
    except ValueError as error:
        announce(f"bench: {rival.name} is left out: {error}")
        return False
    return True
