"""A compiled decode step of one of two CUDA ranks: one graph, all of it a CUDA graph, no memory reused too early."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import StaticCache

from rewired.bench.contenders import Contender
from rewired.bench.models import build, mesh_of
from rewired.ranks import run_on_ranks
from tests.rewired.tiny import PAYLOADS, WIRINGS, llama_config

from .conftest import Report
from .device import Program, compiled, pretend
from .test_traces import EMBEDDING, HEAD, RANKS, WIDE, EmptyWeights, modules_of

ALL = WIRINGS | PAYLOADS
BFLOAT16, GPU = torch.bfloat16, torch.device("cuda", 0)
BUFFER = r"(buf\d+)"


class Step(NamedTuple):
    program: Program
    graphs: int
    skips: int  # of CUDA graphs


def test_a_step_is_one_graph_and_reuses_nothing_that_is_under_way(report: Report) -> None:
    (steps,) = run_on_ranks(decode_steps, 1)
    for name, (program, graphs, skips) in steps.items():
        assert (graphs, skips) == (1, 0), name
        assert re.findall(r"Runner\(partitions=\[(.*?)\]\)", program.code) == ["partition_0,"], name
        assert not [line for line in program.call if "cpp_fused" in line or "_cpu(" in line], name
        starts, reused = under_way(program.call)
        assert reused == [], name
        assert starts == EMBEDDING + HEAD + sum(wiring.launches for wiring in modules_of(ALL[name])), name
        report.add("decode", name, len(program.launches))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["_c10d_functional.all_reduce_.default(buf1, 'sum', '0')", "buf2 = buf1; del buf1  # reuse"], 1),
        (["_c10d_functional.all_reduce_.default(buf1, 'sum', '0')", "buf3 = rewired.land.default(buf2, buf1, None)",
          "buf4 = buf1; del buf1  # reuse"], 0),
        (["buf2 = _c10d_functional.all_gather_into_tensor.default(buf1, 2, '0')", "buf3 = buf1; del buf1  # reuse"], 1),
        (["buf2 = rewired.land_and_launch.default(buf0, None, buf1, [], '0')", "buf3 = buf2[0]", "buf4 = buf2[1]",
          "buf5 = buf1; del buf1  # reuse", "buf6 = buf3; del buf3  # reuse", "buf7 = buf4; del buf4  # reuse"], 1),
    ],
)  # fmt: skip
def test_what_is_reused_too_early_is_found(lines: list[str], expected: int) -> None:
    assert len(under_way(lines)[1]) == expected


def under_way(lines: Sequence[str]) -> tuple[int, list[str]]:
    """How many collectives a program starts, and what reuses the memory of one before the wait for it.

    What a payload or an engine sends is a copy, made by the operation that starts it: `test_happens_before.py`.
    """
    starts, reused = 0, list[str]()
    held: dict[str, set[str]] = {}  # by what is waited for
    totals: dict[str, str] = {}  # where the outcomes of our operation have them
    for line in lines:
        names = re.findall(BUFFER, line)
        if line.startswith(("#", "assert", "del ")) or not names:
            continue
        if "# reuse" in line:
            reused += [line] if re.findall(f"del {BUFFER}", line)[0] in set().union(*held.values()) else []
        elif "_c10d_functional." in line and "wait_tensor" not in line:
            starts, held[names[0]] = starts + 1, set(names)
        elif "wait_tensor" in line or "rewired.land" in line:
            for name in names:
                held.pop(name, None)
            if "land_and_launch" in line:
                starts, totals[names[0]] = starts + 1, "[0]" if ".default(None" in line else "[1]"
        elif len(names) == 2 and names[1] + totals.get(names[1], " ") in line:
            held[names[0]] = {names[0]}
    return starts, reused


def decode_steps() -> dict[str, Step]:
    pretend()
    distributed.destroy_process_group()
    distributed.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    mesh = mesh_of(distributed.group.WORLD, "cuda")
    steps = {}
    for name in ALL:
        counters.clear()
        program = compiled(lambda name=name: decode(name, mesh), targets=())
        steps[name] = Step(program, counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"])
    return steps


@torch.no_grad()
def decode(name: str, mesh: Any) -> None:
    model = build(Contender(name, ALL[name]), llama_config(hidden_size=WIDE, dtype=BFLOAT16), RANKS, mesh)
    EmptyWeights(BFLOAT16, GPU).fill(model)
    config = model.config
    cache = StaticCache(config=config, max_cache_len=32)
    heads, dim = config.num_key_value_heads // RANKS, config.hidden_size // config.num_attention_heads
    cache.early_initialization(2, heads, dim, BFLOAT16, GPU)
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
    step(torch.empty(2, 1, dtype=torch.long, device=GPU), past_key_values=cache)
