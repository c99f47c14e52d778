"""Payloads in one process: the naive loop over ranks in reference.py, and what is sent in how many bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rewired.model.collectives import launch
from rewired.model.modeling_rewired_llama import RewiredLlamaConfig
from rewired.model.payload import FORMATS, Section
from rewired.model.quantisation import in_groups, pack, quantised_sum, unpack
from rewired.model.reductions import Reduction
from rewired.model.regions import make_region
from rewired.model.wiring import ModuleWiring, Wiring
from rewired.model.wiring_text import region_name

from .test_against_reference import assert_like_reference, cases
from .tiny import PAYLOADS, SIZES, rewired_model, tokens

TABLE = {8: 0.1, 4: 0.4, 0: 0.5}


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms in float64: a rounding to float32 in one of two equal models would move a whole number in the other."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("wiring", PAYLOADS.values(), ids=PAYLOADS)
def test_every_kind_of_payload(wiring: list[dict[str, Any]]) -> None:
    assert_like_reference(rewired_model(wiring, hidden_size=160).double(), wiring, 4)


@st.composite
def cases_with_payloads(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int, dict[str, Any]]:
    wiring, tp_shards, sizes = draw(cases())
    merges = {entry.get("merge") for entry in wiring}
    for entry in wiring:
        payloads: list[Any] = ["full", "int8", "int4", "int4/int8", {8: 0.35, "8/4": 0.1, 4: 0.55}]
        payloads += ["int6", "int6/int8", {8: 0.1, 6: 0.4, 4: 0.5}]
        if entry["preset"] in ("standard", "ladder") or entry.get("shared_fraction", 0) >= 0.5:
            payloads += [TABLE, {4: 0.75, 0: 0.25}]
        if "mean" in merges and "merge" not in entry:
            payloads = ["full"]  # what rounding leaves is folded by sum, and may not mix with what is by mean
        entry["payload"] = draw(st.sampled_from(payloads))
    return wiring, tp_shards, sizes


@pytest.mark.usefixtures("exact_norms")
@settings(max_examples=60)
@given(cases_with_payloads())
def test_any_payload_of_any_shape(case: tuple[list[dict[str, Any]], int, dict[str, Any]]) -> None:
    wiring, tp_shards, sizes = case
    torch.manual_seed(0)
    model = rewired_model(wiring, tp_shards, **sizes).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_()
    assert_like_reference(model, wiring, tp_shards)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_and_unpacked_no_number_is_off_by_more_than_half_a_step(bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 100, dtype=dtype) * torch.logspace(-6, 6, 5)[:, None].to(dtype)
    groups = in_groups(x)  # [3, 5, 2, 64]
    packed = pack(groups, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 5, 2, 8 * bits + 2)
    step = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    errors = (unpack(packed, bits, torch.float32) - groups).abs()
    # the scale is a bfloat16: the largest number may be off by its rounding, 1 in 512, instead
    assert (errors <= step * (0.5 * (1 + 2**-8) + 1e-5) + groups.abs() * 2**-8 * (bits == 8)).all()


@given(st.data(), st.sampled_from(sorted(FORMATS)), st.integers(-60, 60), st.sampled_from([8, 64, 128]))
def test_whole_numbers_of_a_scale_are_packed_exactly(data: st.DataObject, bits: int, power: int, channels: int) -> None:
    """The largest there is among them, so that the scale is what they were multiplied by."""
    most = 2 ** (bits - 1) - 1
    numbers = data.draw(st.lists(st.integers(-most, most), min_size=channels, max_size=channels))
    numbers[data.draw(st.integers(0, channels - 1))] = data.draw(st.sampled_from([-most, most]))
    group = torch.tensor(numbers, dtype=torch.float64) * 2.0**power
    packed = pack(group[None], bits)
    assert packed.shape == (1, channels * bits // 8 + 2) == (1, FORMATS[bits].group_bytes(channels))
    assert torch.equal(unpack(packed, bits, torch.float64)[0], group)


def test_groups_of_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    parts = torch.randn(2, 1, 1, 128)
    parts[:, ..., :64] = 0
    sections = (Section(8, 8, 128),)
    assert quantised_sum(parts, sections).total[..., :64].eq(0).all()
    for bad in (float("nan"), float("inf")):
        parts[1, ..., 3] = bad
        total = quantised_sum(parts, sections).total
        assert total[..., :64].isnan().all() and total[..., 64:].isfinite().all()


def test_every_shard_is_quantised_before_the_sum_is() -> None:
    """What a shard has below its own step is not sent, though all shards' together would be."""
    parts = torch.full((4, 1, 1, 64), 0.4)
    parts[:, 0, 0, 0] = torch.tensor([127.0, -127.0, 127.0, -126.0])  # together 1
    sections = (Section(8, 8, 64),)
    assert quantised_sum(parts, sections).total[..., 1:].eq(0).all()
    torch.testing.assert_close(quantised_sum(parts.sum(0)[None], sections).total, parts.sum(0), rtol=0.01, atol=0)


def test_what_rounding_leaves_is_left_to_the_shards_and_nothing_is_lost() -> None:
    """Each keeps its own, and the one that adds a group up keeps what its sum is rounded by."""
    parts = torch.randn(3, 2, 5, 300, dtype=torch.float64)
    sections = (Section(8, 4, 200), Section(4, 4, 100))  # groups: four, of which shards add up 2, 1 and 1, and two
    total, left, left_of_sum = quantised_sum(parts, sections)
    torch.testing.assert_close(total + left.sum(0) + left_of_sum.sum(0), parts.sum(0))
    owners = [0] * 128 + [1] * 64 + [2] * 8 + [0] * 64 + [1] * 36
    for channel, owner in enumerate(owners):
        assert left_of_sum[owner, ..., channel].ne(0).any() and left_of_sum[..., channel].ne(0).any(-1).sum() <= 2 * 5
        others = [shard for shard in range(3) if shard != owner]
        assert left_of_sum[others, ..., channel].eq(0).all()


def modules(payload: Any, preset: str = "standard", hidden_size: int = 160, **options: Any) -> tuple[ModuleWiring, ...]:
    entry = {"layers": "1-3", "preset": preset, "payload": payload} | options
    return Wiring.from_json([entry], 4, hidden_size).modules


def test_a_table_gives_bits_to_channels_in_order_and_none_is_partial() -> None:
    table = modules(TABLE)
    assert [m.reduce for m in table] == ["all"] * 2 + ["shared"] * 3 + ["all"] * 3
    two = ((8, 8, 16), (4, 4, 64))
    assert [m.sections for m in table[1:6]] == [(), two, two, two, (*two, (8, 8, 80))]
    partial = modules("int8", "partial", shared_fraction=0.5)
    row = modules({8: 0.5, 0: 0.5}, peek=True)
    facts = [[(m.reduce, m.sections, m.reads_shards, m.merge) for m in each[:5]] for each in (partial, row)]
    assert facts[0] == facts[1]


def test_bytes_of_a_token() -> None:
    assert [m.payload_bytes(2) for m in modules("full")] == [320] * 8
    assert [m.payload_bytes(2) for m in modules("int8", hidden_size=128)] == [256] * 2 + [2 * 66] * 4 + [256] * 2
    assert [m.payload_bytes(2) for m in modules("int4", hidden_size=128)] == [256] * 2 + [2 * 34] * 4 + [256] * 2
    assert [m.payload_bytes(2) for m in modules("int6", hidden_size=128)] == [256] * 2 + [2 * 50] * 4 + [256] * 2
    assert [m.payload_bytes(2) for m in modules("int6/int8", hidden_size=128)][2:6] == [50 + 66] * 4
    assert [m.payload_bytes(2) for m in modules("int4/int8", hidden_size=128)][2:6] == [34 + 66] * 4
    assert [m.payload_bytes(2) for m in modules(TABLE)][2:6] == [66 + 34] * 3 + [66 + 34 + 2 * 66]
    assert [m.payload_bytes(2) for m in modules("int4", "desync")] == [320, 320, 0, 3 * 34, 0, 3 * 34, 320, 320]


@pytest.mark.parametrize("trains", [False, True])
def test_inductor_gives_the_sums_of_eager_mode(trains: bool) -> None:
    """It would leave out the rounding of scales to 16 bits, as a conversion there and back."""
    parts, sections = torch.randn(2, 1, 7, 128, generator=torch.Generator().manual_seed(0)), (Section(8, 8, 128),)

    def run(parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total, left, left_of_sum = launch(parts, Reduction(None, sections))
        return 2 * total, left, left_of_sum

    parts.requires_grad_(trains)
    for found, expected in zip(torch.compile(run, fullgraph=True)(parts), run(parts), strict=True):
        assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad


def test_a_payload_is_part_of_the_function_and_of_the_config() -> None:
    wiring = Wiring.from_json([{"layers": "0-4", "preset": "standard", "payload": "int8"}], 4, 64)
    assert wiring.depends_on_shards and wiring.rewired_layers == [0, 1, 2, 3]
    assert wiring.to_json() == [{"layers": "0-4", "preset": "standard", "payload": "int8"}]
    assert region_name(wiring.regions[0]) == "standard+int8"
    full = Wiring.from_json([{"layers": "0-4", "preset": "standard", "payload": "full"}], 4, 64)
    assert full == Wiring.dense(4, 64)
    config = RewiredLlamaConfig(**SIZES, wiring=[{"layers": "0-6", "preset": "ladder", "payload": TABLE}])
    assert RewiredLlamaConfig.from_dict(json.loads(config.to_json_string())).wiring == config.wiring
    assert config.wiring == [{"layers": "0-6", "preset": "ladder", "payload": "8:0.1,4:0.4,0:0.5"}]


@pytest.mark.parametrize(
    "payload",
    [
        "int2",
        "int4/int2",
        "int4/",
        8,
        "8",
        "8:0.5",
        "4:0.5,8:0.5",
        "8:0.5,8:0.5",
        "8:1.5,4:-0.5",
        "0:1",
        "8:0.5.1,4:0.5",
        "4:0.5,4/8:0.5",
        "0/8:1",
        {16: 1},
        {8: "a"},
    ],
)
def test_other_payloads_are_refused(payload: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"^'payload' of layers 0-2 is .*: it must be 'full', 'int8', 'int6', 'int4', "
        "'int4/int8' or bits",
    ):
        make_region("0-2", "ladder", 4, payload=payload)


@pytest.mark.parametrize("preset", ["desync", "parallel"])
def test_channels_of_0_bits_go_with_no_module_that_reduces_nothing(preset: str) -> None:
    with pytest.raises(ValueError, match=f"'{preset}' layers 1-3 reduce nothing after some modules"):
        modules(TABLE, preset)


@pytest.mark.parametrize(
    ("wiring", "layers"),
    [
        pytest.param([{"layers": "0-2", "preset": "ladder", "peek": True, "payload": "int4"}], 2, id="two layers"),
        *(pytest.param(wiring, 6, id=name, marks=pytest.mark.slow) for name, wiring in PAYLOADS.items()),
    ],
)
def test_compiled_in_one_process(wiring: list[dict[str, Any]], layers: int) -> None:
    model = rewired_model(wiring, num_hidden_layers=layers).double()
    expected = model(tokens(), labels=tokens())
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens(), labels=tokens())
    found.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-6, msg=name)
