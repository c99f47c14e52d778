"""An engine's all-reduce runs on a stream of its own: it may read its input as late as the wait for the sum."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import Work, _register_work
from torch.nn.functional import silu
from torch.testing._internal.distributed.fake_pg import FakeStore

from rewired.model.reductions import own, start_sums_by
from rewired.model.residual_stream import ResidualStream
from rewired.model.sharding import Shards
from rewired.ranks import run_on_ranks

from .test_against_reference import assert_close
from .tiny import rewired_config

HIDDEN, TOKENS = 256, 64


def test_a_compiled_program_leaves_alone_what_it_still_reads() -> None:
    """Inductor gives a buffer that no later operation reads to the next kernel, while the engine still reads it."""
    ((compiled, eager),) = run_on_ranks(compiled_and_eager, 1)
    assert_close(torch.tensor(compiled), torch.tensor(eager), "the stream after eight modules")


class Late(Work):
    """A sum of two ranks that hold the same, which reads when it is waited for."""

    def __init__(self, total: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self.total, self.output = total, output

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.total.copy_(2 * self.output)
        return True


def start(output: torch.Tensor) -> torch.Tensor:
    total = torch.empty_like(output)
    _register_work(total, Late(total, output))
    return total


@torch.no_grad()
def compiled_and_eager() -> tuple[list[float], list[float]]:
    distributed.destroy_process_group()
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert distributed.group.WORLD is not None
    group = distributed.group.WORLD.group_name
    start_sums_by(group, start)
    config = rewired_config([{"layers": "0-4", "preset": "ladder"}], tp_shards=2, num_hidden_layers=4)
    wirings, shards = config.resolved_wiring.modules, Shards(2, 1, group)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5 for _ in wirings]

    def run(embedding: torch.Tensor) -> torch.Tensor:
        stream = ResidualStream(embedding)
        for wiring, weight in zip(wirings, weights, strict=True):
            view, stream = stream.read(wiring, None, shards)
            normed = view * torch.rsqrt(view.pow(2).mean(-1, keepdim=True) + 1e-5)
            at_once = None if wiring.overlapped else (lambda output: 2 * output)
            stream = stream.write(own(silu(normed @ weight) @ weight), wiring, shards, at_once)
        return stream.total(shards)

    embedding = torch.randn(1, TOKENS, HIDDEN, generator=generator)
    eager = run(embedding)
    return torch.compile(run, fullgraph=True)(embedding).flatten().tolist(), eager.flatten().tolist()
