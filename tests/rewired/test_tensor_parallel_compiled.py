"""Compiled under tensor parallelism: one graph, the same numbers, and the overlap is still there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._inductor.utils import run_and_get_code
from transformers import StaticCache

from rewired.model.residual_stream import ResidualStream
from rewired.model.sharding import Shards
from rewired.ranks import run_on_ranks

from .sharded import gradients, load, saved
from .test_against_reference import assert_close
from .test_tensor_parallel_training import assert_same
from .tiny import WIRINGS, rewired_config, tokens

LADDER = {"layers": "1-3", "preset": "ladder"}


def test_what_a_compiled_program_has_started_is_waited_for_outside_of_it() -> None:
    """As where only some layers are compiled."""
    assert run_on_ranks(landed_in_eager_mode, 2) == [2.0, 2.0]


@torch.no_grad()
def landed_in_eager_mode() -> float:
    assert distributed.group.WORLD is not None
    shards = Shards(2, 1, distributed.group.WORLD.group_name)
    wiring = rewired_config([LADDER]).resolved_wiring.modules[2]
    write = torch.compile(lambda output: ResidualStream(0 * output).write(output, wiring, shards), backend="aot_eager")
    time.sleep(distributed.get_rank())
    return float(write(torch.ones(1, 1, 32)).total(shards).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", WIRINGS)
def test_one_graph_with_the_same_outputs_and_gradients(name: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path)
    expected_logits, expected_gradients = training_pass(folder, 1, None)
    for logits, found in run_on_ranks(training_pass, 2, folder, 2, "aot_eager"):
        assert_close(torch.from_numpy(logits), torch.from_numpy(expected_logits), "logits")
        assert_same(found, expected_gradients)


def training_pass(folder: Path, ranks: int, backend: str | None) -> tuple[Any, dict[str, Any]]:
    model = load(folder, ranks).train()
    run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    outputs = run(tokens(), labels=tokens())
    outputs.loss.backward()
    return outputs.logits.detach().numpy(), gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize(("payload", "tolerance"), [("full", 1e-5), ("int8", 1e-3)])
def test_the_compiled_program_hides_what_the_wiring_hides(payload: str, tolerance: float, tmp_path: Path) -> None:
    """Inductor's own program, not only the graph it was given: every module of a ladder runs between the start of the
    all-reduce before it and the wait for that. Three layers: one standard, two ladder."""
    folder = saved([LADDER | {"payload": payload}], tmp_path, num_hidden_layers=3)
    expected = logits_in_one_process(folder)
    for logits, program in run_on_ranks(compiled_program, 2, folder):
        assert abs(logits - expected).max() < tolerance * abs(expected).max()
        attention, mlp = "m" * 4, "m" * 3
        # `s` starts an all-reduce, `w` waits for one, `b` waits for one and then starts the next
        waits_for_both = f"{attention}sw{mlp}s"
        # what rounding leaves of a sum goes into the next reduction: it is waited for before that starts
        both = "b" if payload == "full" else "ws"
        assert program == f"{waits_for_both}{attention}b{mlp}{both}{attention}{both}{mlp}wsw"


def logits_in_one_process(folder: Path) -> Any:
    with torch.no_grad():
        return load(folder)(tokens()).logits.numpy()


def compiled_program(folder: Path) -> tuple[Any, str]:
    """The logits, and the layers' part of what Inductor runs, one letter a call."""
    model = load(folder, 2)
    with torch.no_grad():
        outputs, (code,) = run_and_get_code(torch.compile(model, fullgraph=True), tokens())
    calls = code[code.index("def call(") :]
    letters = []
    for line in calls.splitlines():
        if "extern_kernels." in line and "mm(" in line:
            letters.append("m")
        elif "_c10d_functional.all_reduce_.default(" in line:
            letters.append("s")
        elif "rewired.land_and_launch" in line and ".default(" in line:
            letters.append("s" if ", None, " in line else "b")
        elif "rewired.land.default(" in line or "_c10d_functional.wait_tensor.default(" in line:
            letters.append("w")
    embedding, head = len("sw"), len("mw")
    return outputs.logits.numpy(), "".join(letters)[embedding:-head]


@pytest.mark.slow
def test_static_cache_decoding(tmp_path: Path) -> None:
    """`generate` with a static cache of each rank's own heads, and a compiled decode step: the same tokens."""
    folder = saved(WIRINGS["mixed"], tmp_path)
    expected = load(folder).generate(tokens(), max_new_tokens=12, min_new_tokens=12, do_sample=False).tolist()
    for generated, decoded in run_on_ranks(with_static_cache, 2, folder):
        assert generated == decoded == expected


def with_static_cache(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    model = load(folder, 2)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    generated = model.generate(tokens(), cache_implementation="static", disable_compile=True, **options).tolist()

    cache = StaticCache(model.config, max_cache_len=32)
    decode = torch.compile(model, fullgraph=True, backend="aot_eager")
    sequence = tokens()
    with torch.no_grad():
        logits = model(sequence, past_key_values=cache).logits
        for _ in range(12):
            latest = logits[:, -1:].argmax(-1)
            position = torch.tensor([[sequence.shape[1]]])
            sequence = torch.cat([sequence, latest], dim=1)
            logits = decode(latest, past_key_values=cache, position_ids=position).logits
    return generated, sequence.tolist()
