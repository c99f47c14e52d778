"""An engine's own all-reduce, where nothing hides one, or everywhere: the same stream, and only those sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from rewired.model.residual_stream import PeekGain, ResidualStream
from rewired.model.sharding import Shards
from rewired.model.wiring import ModuleWiring
from rewired.ranks import run_on_ranks

from .test_against_reference import assert_close
from .tiny import WIRINGS, rewired_config


def test_the_same_stream_with_an_engine_s_all_reduce() -> None:
    for rank in run_on_ranks(totals_and_sums, 2):
        assert set(rank) == set(WIRINGS)
        for name, (expected, *found) in rank.items():
            modules = rewired_config(WIRINGS[name], tp_shards=2).resolved_wiring.modules
            asked = [sum(module.is_exposed for module in modules), sum(module.launches for module in modules)]
            for (total, sums), often in zip(found, asked, strict=True):
                assert_close(torch.from_numpy(total), torch.from_numpy(expected[0]), name)
                assert sums == often


def totals_and_sums() -> dict[str, Any]:
    """For each wiring: the total of random outputs, and how often an engine's sum was asked for it.

    Without one, with one where nothing hides it, and with one everywhere.
    """
    asks = (lambda wiring: False, lambda wiring: wiring.is_exposed, lambda wiring: wiring.launches)
    return {name: [total(name, asked) for asked in asks] for name in WIRINGS}


@torch.no_grad()
def total(name: str, asks: Callable[[ModuleWiring], bool]) -> tuple[Any, int]:
    sums = list[torch.Tensor]()
    config = rewired_config(WIRINGS[name], tp_shards=2)
    assert distributed.group.WORLD is not None
    shards = Shards(2, 1, distributed.group.WORLD.group_name)
    generator = torch.Generator().manual_seed(distributed.get_rank())

    def sum_at_once(output: torch.Tensor) -> torch.Tensor:
        sums.append(output)
        distributed.all_reduce(output)  # in place, as vLLM's is on a CPU
        return output

    gain = PeekGain(1, config.hidden_size)
    torch.nn.init.constant_(gain.weight, 1.5)
    stream = ResidualStream(torch.ones(1, 3, config.hidden_size))
    for wiring in config.resolved_wiring.modules:
        view, stream = stream.read(wiring, gain, shards)
        weight = torch.randn(config.hidden_size, config.hidden_size, generator=generator) / config.hidden_size
        output = view.reshape(1, 3, config.hidden_size).tanh() @ weight
        output = output[None] if wiring.gives_partials else output
        stream = stream.write(output, wiring, shards, sum_at_once if asks(wiring) else None)
    return stream.total(shards).numpy(), len(sums)
