"""The walk over a wiring's modules, against a loop that is written anew here, and what must hold of any machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewired import hardware
from rewired.checkpoint.named_shapes import named_shapes
from rewired.plan import engine
from rewired.plan.all_reduce_time import LIBRARIES, AllReduce, Network, Ring
from rewired.plan.compute import Rank, Step
from rewired.plan.machine import Load, Machine, serving_machine
from rewired.plan.pass_time import Timeline, pass_time
from rewired.plan.wirings import RANKED, wiring_of

SHAPE = named_shapes()["llama-3.2-1b"]
STEP = Step(4, 1, 1000)
RING = AllReduce({}, Ring(5e-6, 1e-6, 1e11), Network(7e-6, 4e11), 8)
SECONDS = st.floats(0, 1, allow_subnormal=False)
WIRINGS = st.sampled_from(["standard", *RANKED])


def rank(**changes: Any) -> Rank:
    return Rank(SHAPE, hardware.load("h100"), replace(engine.load("serving"), **changes), 8)


@given(SECONDS, SECONDS, SECONDS)
def test_the_exposed_part_is_a_part(collective: float, least: float, work: float) -> None:
    least = min(collective, least)

    def waited(work: float) -> float:
        timeline = Timeline()
        timeline.launch(collective, least)
        timeline.compute(work)
        timeline.wait(0)
        return timeline.waited

    assert least <= waited(work) <= collective * (1 + 1e-12)
    assert waited(work + 1) <= waited(work)
    assert waited(0) == pytest.approx(collective)


@pytest.mark.parametrize(
    "name", ["standard", "ladder@3-9", "desync-4x@0-8, ladder@8-12", "parallel+overlap", "ladder+delay-2"]
)
def test_layers_that_are_alike_are_walked_once_they_leave_all_as_it_was(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def took() -> list[float]:
        passes = [pass_time(rank(), slow, wiring_of(SHAPE, name), STEP) for slow in (RING, replace(RING, scale=5.0))]
        return [part for each in passes for part in (each.seconds, each.waited, each.communication)]

    short = took()
    monkeypatch.setattr(Timeline, "repeat", lambda self, times, run: [run() for _ in range(times)])
    assert short == pytest.approx(took(), rel=1e-12)


def test_a_ladder_by_hand() -> None:
    """Every all-reduce hides behind the next module, but for the last one, which the final norm waits for."""
    one, ring = rank(), replace(RING, slack=2e-6, hide=0.75)
    attention, mlp = one.attention(STEP), one.mlp(STEP)
    c, latency = ring.seconds(4 * SHAPE.hidden_size * 2, 8), 5e-6 + 2 * 7 * 1e-6
    waited = 0.0
    for module in range(2 * SHAPE.num_hidden_layers - 1):
        behind = mlp if module % 2 == 0 else attention
        waited += max(c - behind, 0.25 * (c - latency))
    took = pass_time(one, ring, wiring_of(SHAPE, "ladder"), STEP)
    assert took.waited == pytest.approx(waited + c)
    assert took.seconds == pytest.approx(SHAPE.num_hidden_layers * (attention + mlp) + one.head(STEP) + waited + c)


@pytest.mark.parametrize("times", [0.5, 1.2, 3])
def test_two_updates_late_only_what_a_layer_sends_counts(times: float) -> None:
    """Where an all-reduce takes so many times as long as the shorter module, if the whole of one hides. A ladder waits
    for what exceeds a module, delay 2 for what two exceed of a layer; the last two hide behind one and none."""
    one = rank()
    works = sorted([one.attention(STEP), one.mlp(STEP)])
    c = times * works[0]
    fixed = replace(RING, ring=Ring(c, 0.0, 1e30), hide=1.0)
    layers = SHAPE.num_hidden_layers
    ladder = pass_time(one, fixed, wiring_of(SHAPE, "ladder"), STEP).waited
    late = pass_time(one, fixed, wiring_of(SHAPE, "ladder+delay-2"), STEP).waited
    assert ladder == pytest.approx(sum(max(c - work, 0) for work in works) * layers, abs=2 * c)
    assert late == pytest.approx(max(2 * c - sum(works), 0) * layers, abs=3 * c)


@pytest.mark.parametrize(
    ("name", "reduces", "share"),
    [("standard", 32, 1), ("parallel", 16, 1), ("desync-2x", 16, 1), ("desync-4x", 8, 1), ("partial-0.5", 32, 0.5)],
)
def test_exposed_wirings_by_hand(name: str, reduces: int, share: float) -> None:
    """Of partial, the very last module reduces all."""
    whole_size = 4 * SHAPE.hidden_size * 2
    by_hand = (reduces - 1) * RING.seconds(share * whole_size, 8) + RING.seconds(whole_size, 8)
    assert pass_time(rank(), RING, wiring_of(SHAPE, name), STEP).waited == pytest.approx(by_hand)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8 + 8), ("int4/int8", 4 + 8), ("int4", 4 + 4)])
def test_a_payload_is_two_collectives_of_packed_bytes_and_the_packing(name: str, bits: int) -> None:
    """Groups of 64 channels, each with a scale of two bytes; bits of the parts and of the sum, whose mean counts."""
    slow = replace(RING, slack=1e-6)

    def by_hand(bits: int) -> float:
        size = 4 * SHAPE.hidden_size / 64 * (64 / 8 * bits + 2 * 2) / 2
        return slow.seconds(size, 8) + 1e-6 + rank().quantising(STEP)

    waited = 31 * by_hand(bits) + by_hand(8 + 8)  # the model's last module sends 8 bits
    assert pass_time(rank(), slow, wiring_of(SHAPE, name), STEP).waited == pytest.approx(waited)


@settings(deadline=None, max_examples=40)
@given(
    WIRINGS,
    st.sampled_from([1, 16, 64]),
    st.sampled_from([1, 128, 2048]),
    st.sampled_from([(sheet, library) for sheet in hardware.names() for library in LIBRARIES]),
    st.sampled_from([2, 4, 8, 16]),
)
def test_no_wiring_beats_no_communication(name: str, batch: int, prompt: int, on: tuple[str, str], tp: int) -> None:
    """Measured times do not rise with the size everywhere."""
    try:
        machine, load = serving_machine(*on, tp), Load(batch, prompt, 64)
    except ValueError:
        return  # no such library there
    bound = machine.generate(SHAPE, wiring_of(SHAPE, "standard"), load, communicates=False)
    run = machine.generate(SHAPE, wiring_of(SHAPE, name), load)
    assert bound.prefill.seconds <= run.prefill.seconds and bound.decode.seconds <= run.decode.seconds
    if "int" not in name and on == ("h100", "vllm"):  # packing may take longer than it saves, and so may a norm apart
        assert run.seconds <= machine.generate(SHAPE, wiring_of(SHAPE, "standard"), load).seconds * (1 + 1e-12)


@given(st.floats(1, 1e10), st.sampled_from([2, 4, 8]))
def test_what_nothing_hides_is_never_less_than_nothing(size: float, tp: int) -> None:
    for on in (("a100", "nccl"), ("l40s", "nccl"), ("l40s", "trtllm")):
        all_reduce = serving_machine(*on, tp).all_reduce
        assert 0 <= all_reduce.least_wait(size, tp) <= all_reduce.seconds(size, tp)


@settings(deadline=None, max_examples=40)
@given(
    WIRINGS,
    st.sampled_from(["flops", "memory_bandwidth"]),
    st.floats(1, 10),
    st.integers(1, 64),
)
def test_a_better_machine_is_never_slower(name: str, rate: str, factor: float, batch: int) -> None:
    machine, load = serving_machine("h100", "nccl", 8), Load(batch, 512, 64)
    better = replace(machine, hardware=replace(machine.hardware, **{rate: getattr(machine.hardware, rate) * factor}))
    wiring = wiring_of(SHAPE, name)
    assert better.generate(SHAPE, wiring, load).seconds <= machine.generate(SHAPE, wiring, load).seconds * (1 + 1e-12)


def test_payloads_pay_where_links_are_slow_and_messages_long() -> None:
    """Four L40S on PCIe in a prefill; not decoding one sequence by vLLM's own all-reduce, nor on NVLink."""
    load = Load(1, 2048, 64)

    def speedups(hardware: str, gpus: int, name: str) -> tuple[float, float]:
        machine = serving_machine(hardware, "vllm", gpus)
        dense, packed = (machine.generate(SHAPE, wiring_of(SHAPE, each), load) for each in ("standard", name))
        return dense.prefill.seconds / packed.prefill.seconds, dense.decode.seconds / packed.decode.seconds

    int8, int4 = speedups("l40s", 4, "int8"), speedups("l40s", 4, "int4")
    assert int4[0] > int8[0] > 1.3 and int8[1] < 1
    assert speedups("h100", 8, "int8")[1] < 1


def test_the_range_holds_the_prediction() -> None:
    machine, load = serving_machine("h100", "vllm", 8), Load(1, 2048, 64)

    def speedup(on: Machine) -> float:
        dense, ladder = (on.generate(SHAPE, wiring_of(SHAPE, name), load).seconds for name in ("standard", "ladder"))
        return dense / ladder

    assert speedup(machine.off_by(-1)) < speedup(machine) < speedup(machine.off_by(1))


def test_decoding_one_sequence_reads_every_weight_once() -> None:
    """Of a module without overheads: bytes over achieved bandwidth, whatever the arithmetic."""
    one = rank(memory_share=1.0)
    weights = SHAPE.hidden_size * (2 * 32 + 2 * 8) * 64 / 8
    assert one.products(1, weights) == pytest.approx(2 * weights / 3.35e12)


def test_a_long_prompt_is_bound_by_arithmetic() -> None:
    one = rank(flops_share=0.5)
    assert one.products(4096, 1e6) == pytest.approx(2 * 4096 * 1e6 / (0.5 * 989e12))


def test_flash_attention_skips_what_is_masked() -> None:
    """A query at position i attends to i + 1 keys."""
    step = Step(1, 512, 512)
    pairs = sum(position + 1 for position in range(512))
    flops = 4 * pairs * SHAPE.num_attention_heads / 8 * SHAPE.head_dim
    assert rank(flops_share=1e-9).scores(step) == pytest.approx(flops / (989e12 * 1e-9))


@pytest.mark.parametrize(
    ("name", "fused"),
    [("standard", 32), ("desync-2x", 16), ("parallel", 16), ("ladder", 1), ("partial-0.5", 1), ("int8", 0)],
)
def test_a_norm_is_fused_with_an_all_reduce_that_it_waits_for(name: str, fused: int) -> None:
    """2 us less for each; none of those that hide, send a part of the channels, or are packed."""
    plain, engines = (serving_machine("h100", library, 8) for library in ("vllm", "vllm-fused"))
    took, less = (each.generate(SHAPE, wiring_of(SHAPE, name), Load(4, 512, 2)) for each in (plain, engines))
    assert took.decode.seconds - less.decode.seconds == pytest.approx(fused * 2e-6)
    assert took.prefill.seconds == less.prefill.seconds  # messages too large to fuse


def test_what_cannot_be_fused() -> None:
    two_nodes = serving_machine("h100", "vllm-fused", 8, gpus_per_node=4).all_reduce
    assert two_nodes.waited_seconds(4096, 8) == two_nodes.seconds(4096, 8)
    with pytest.raises(ValueError, match=r"Engines fuse no all-reduce on L40S.*: choose --library vllm"):
        serving_machine("l40s", "vllm-fused", 4)


def test_of_slow_links_more_hides() -> None:
    """Their kernels take fewer processors."""
    assert serving_machine("l40s", "nccl", 4).all_reduce.hide > serving_machine("h100", "nccl", 4).all_reduce.hide
