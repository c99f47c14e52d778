"""Payloads on several ranks: what one process computes, in the bytes that are promised."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rewired.model import exchange
from rewired.model.collectives import launch
from rewired.model.payload import Section
from rewired.model.quantisation import quantised_sum
from rewired.model.reductions import Reduction
from rewired.ranks import run_on_ranks

from .sharded import Events, Payload, gradients, load, saved
from .test_against_reference import assert_close
from .test_tensor_parallel import PATIENCE, HeldBack
from .test_tensor_parallel_training import assert_same
from .tiny import PAYLOADS, tokens

# several ranks share two cores here: `make test-slow` runs all of them
some_payloads = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "table" else pytest.mark.slow) for name in PAYLOADS]
)

SECTIONS = (Section(8, 8, 100), Section(6, 6, 80), Section(4, 8, 30))


def test_a_sum_on_ranks_is_bit_for_bit_that_of_one_process() -> None:
    """Also where groups of channels do not go round, and with several shards on a rank; so is what rounding leaves."""
    for ranks in (2, 3):
        for dtype in (torch.float32, torch.bfloat16):
            expected = quantised_sum(parts(dtype), SECTIONS)
            found = run_on_ranks(sum_on_ranks, ranks, dtype)
            for total, _, _ in found:
                assert torch.equal(torch.from_numpy(total).to(dtype), expected.total)
            for which in (1, 2):
                left = torch.cat([torch.from_numpy(each[which]) for each in found])
                assert torch.equal(left.to(dtype), expected[which])


def parts(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(6, 1, 3, 210, generator=torch.Generator().manual_seed(3)).to(dtype)


def sum_on_ranks(dtype: torch.dtype) -> Any:
    world = torch.distributed.group.WORLD
    own = parts(dtype).chunk(world.size())[world.rank()]
    total, left, left_of_sum = launch(own, Reduction(world.group_name, SECTIONS))
    return [(each + 0).float().numpy() for each in (total, left, left_of_sum)]  # whoever uses the total waits


@some_payloads
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_outputs_and_greedy_tokens_of_one_process(name: str, ranks: int, tmp_path: Path) -> None:
    folder = saved(PAYLOADS[name], tmp_path)
    expected_logits, expected_tokens = answers(folder, 1)
    for logits, generated in run_on_ranks(answers, ranks, folder, ranks):
        assert_close(torch.from_numpy(logits), torch.from_numpy(expected_logits), f"{ranks} ranks")
        assert generated == expected_tokens


def answers(folder: Path, ranks: int) -> tuple[Any, list[list[int]]]:
    model = load(folder, ranks, dtype=torch.float64)
    with torch.no_grad():
        logits = model(tokens()).logits
    return logits.numpy(), model.generate(tokens(), max_new_tokens=16, min_new_tokens=16, do_sample=False).tolist()


@some_payloads
def test_every_gradient_on_two_ranks_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    """Straight through the quantisation; with gradient checkpointing, too, which repeats it."""
    folder = saved(PAYLOADS[name], tmp_path)
    expected = one_backward(folder, 1, False)
    for plain, checkpointed in run_on_ranks(with_and_without_checkpointing, 2, folder):
        assert_same(plain, expected)
        assert_same(checkpointed, expected)


def with_and_without_checkpointing(folder: Path) -> tuple[Any, Any]:
    return one_backward(folder, 2, False), one_backward(folder, 2, True)


def one_backward(folder: Path, ranks: int, is_checkpointed: bool) -> dict[str, Any]:
    model = load(folder, ranks, dtype=torch.float64).train()
    if is_checkpointed:
        model.activation_checkpointing_enable()
    model(tokens(), labels=tokens()).loss.backward()
    return gradients(model)


# what one of two ranks sends for each of 18 tokens, by hand: half of its own packed part, and its half of the sum
BYTES = {  # that the parts take, and the sum
    "full": (0, 0),
    "int8": (2 * 66 // 2, 2 * 66 // 2),  # of 128 channels: two groups, 64 numbers and a scale each
    "int6": (2 * 50 // 2, 2 * 50 // 2),
    "int4": (2 * 34 // 2, 2 * 34 // 2),
    "int4/int8": (2 * 34 // 2, 2 * 66 // 2),
    "8:0.5,4:0.5": (66 + 34, 66 + 34),  # a group each, which one of the ranks adds up
}


@pytest.mark.parametrize("payload", BYTES)
def test_the_bytes_on_the_wire(payload: str, tmp_path: Path) -> None:
    folder = saved(
        [{"layers": "0-6", "preset": "standard", "payload": payload}], tmp_path, tp_shards=2, hidden_size=128
    )
    scattered, gathered = (each * tokens().numel() for each in BYTES[payload])
    for sent, all_reduces in run_on_ranks(forward_bytes, 2, folder):
        embedding = 1  # transformers' own
        if payload == "full":
            assert sent == [] and len(all_reduces) == embedding + 12
            assert all_reduces[embedding] == Payload(128, 128 * tokens().numel() * 2, torch.bfloat16)
        else:
            last = [each * tokens().numel() for each in BYTES["int8"]]
            assert sent == [scattered, gathered] * 11 + last and len(all_reduces) == embedding


def forward_bytes(folder: Path) -> tuple[list[int], list[Payload]]:
    model = load(folder, 2, dtype=torch.bfloat16)
    sent: list[int] = []
    record(sent)
    with torch.no_grad(), Events() as events:
        model(tokens())
    return sent, events.payloads


def record(sent: list[int]) -> None:
    """Append to `sent` what this one of two ranks sends to the other: half of an all-to-all, all of an all-gather."""

    def run(collective: Any, share: int, packed: torch.Tensor, group: Any) -> torch.Tensor:
        sent.append(packed.nbytes // share)
        return collective(packed, group)

    exchange.all_to_all = partial(run, exchange.all_to_all, 2)
    exchange.all_gather = partial(run, exchange.all_gather, 1)


@pytest.mark.parametrize(("preset", "overlaps"), [("ladder", True), ("standard", False)])
def test_a_module_runs_while_the_payload_before_it_is_held_back(preset: str, overlaps: bool, tmp_path: Path) -> None:
    folder = saved([{"layers": "0-6", "preset": preset, "payload": "int8"}], tmp_path, tp_shards=2)
    _, was_told = run_on_ranks(with_an_all_to_all_held_back, 2, folder, PATIENCE if overlaps else 0.5)
    assert was_told == overlaps


def with_an_all_to_all_held_back(folder: Path, patience: float) -> bool | None:
    model = load(folder, 2)
    held = HeldBack(8, ("send",), patience=patience)  # the fifth all-to-all: an all-gather follows each
    with torch.no_grad(), held:
        model(tokens())
    return held.was_told


@pytest.mark.slow
@pytest.mark.parametrize("name", PAYLOADS)
def test_one_graph_with_the_same_outputs_and_gradients(name: str, tmp_path: Path) -> None:
    folder = saved(PAYLOADS[name], tmp_path)
    expected = compiled_pass(folder, 1, None)
    for found in run_on_ranks(compiled_pass, 2, folder, 2, "aot_eager"):
        for logits, expected_logits in zip(found[0], expected[0], strict=True):
            assert_close(torch.from_numpy(logits), torch.from_numpy(expected_logits), "logits")
        assert_same(found[1], expected[1])


def compiled_pass(folder: Path, ranks: int, backend: str | None) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Logits without and with gradients, and these."""
    model = load(folder, ranks, dtype=torch.float64).train()
    run = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    with torch.no_grad():
        inferred = run(tokens()).logits
    outputs = run(tokens(), labels=tokens())
    outputs.loss.backward()
    return (inferred.numpy(), outputs.logits.detach().numpy()), gradients(model)
