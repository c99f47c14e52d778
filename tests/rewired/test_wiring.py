"""The table: ranges as users write them, wirings as config.json holds them, and what follows for each module."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewired.model.modeling_rewired_llama import RewiredLlamaConfig
from rewired.model.regions import as_ranges, parse_layers
from rewired.model.wiring import ModuleWiring, Wiring

from .test_against_reference import regions
from .tiny import SIZES, rewired_config


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("16-32", "16-32"),
        ("16-", "16-32"),
        ("-8", "24-32"),
        ("5", "5-6"),
        ("0-4,8-12", "0-4,8-12"),
        ("0-4, 8-12", "0-4,8-12"),
        ("16-32:attn", "16-32:attn"),
        ("-2:mlp", "30-32:mlp"),
        ("0-2:attn,4-", "0-2:attn,4-32"),
    ],
)
def test_ranges_are_half_open(spec: str, expected: str) -> None:
    assert ",".join(map(str, parse_layers(spec, 32))) == expected


@pytest.mark.parametrize("spec", ["", "-", "4-2", "3-3", "30-33", "-33", "a-b", "1-2-3", "2:both", "1--3", "0-2,,4-6"])
def test_other_ranges_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"range|beyond"):
        parse_layers(spec, 32)


@given(st.sets(st.integers(0, 39)))
def test_ranges_cover_exactly_the_modules_they_were_made_of(indices: set[int]) -> None:
    ranges = as_ranges(indices)
    covered = [index for layer_range in ranges for index in layer_range.module_indices]
    assert sorted(covered) == sorted(indices)


@given(regions(num_layers=5))
def test_a_config_keeps_its_wiring_through_json(wiring: list[dict[str, Any]]) -> None:
    first = Wiring.from_json(wiring, 5, 64)
    second = Wiring.from_json(first.to_json(), 5, 64)
    assert second == first
    assert sorted(index for region in first.regions for index in region.module_indices) == list(range(10))


def modules(*entries: dict[str, Any], num_layers: int = 4, hidden_size: int = 10) -> tuple[ModuleWiring, ...]:
    return Wiring.from_json(entries, num_layers, hidden_size).modules


def reductions(*entries: dict[str, Any]) -> str:
    """What each of eight modules reduces: a(ll), n(one) or s(hared)."""
    return "".join(module.reduce[0] for module in modules(*entries))


@pytest.mark.parametrize(
    "entry, expected",
    [
        ({"layers": "0-4", "preset": "standard"}, "aaaaaaaa"),
        ({"layers": "0-4", "preset": "ladder"}, "aaaaaaaa"),
        ({"layers": "0-4", "preset": "parallel"}, "nananana"),
        ({"layers": "0-4", "preset": "desync"}, "nananana"),
        ({"layers": "0-4", "preset": "desync", "every": 4}, "nnnannna"),
        ({"layers": "0-4", "preset": "desync", "every": 3}, "nnannana"),
        ({"layers": "0-4", "preset": "desync", "every": 99}, "nnnnnnna"),
        ({"layers": "1-2,3-4", "preset": "desync", "every": 4}, "aananana"[:2] + "naaana"),
        ({"layers": "1-3", "preset": "partial", "shared_fraction": 0.5}, "aasssaaa"),
        ({"layers": "0-4", "preset": "partial", "shared_fraction": 0.09}, "nnnnnnna"),
        ({"layers": "0-4", "preset": "partial", "shared_fraction": 1}, "aaaaaaaa"),
        ({"layers": "0-4:attn", "preset": "desync"}, "naaanaaa"),
        ({"layers": "0-4:mlp", "preset": "partial", "shared_fraction": 0.5}, "asasasaa"),
    ],
)
def test_what_each_module_reduces(entry: dict[str, Any], expected: str) -> None:
    assert reductions(entry) == expected


def test_a_shared_fraction_reduces_the_floor_of_its_channels() -> None:
    channels = [m.shared_channels for m in modules({"layers": "1-3", "preset": "partial", "shared_fraction": 0.39})]
    assert channels == [10, 10, 3, 3, 3, 10, 10, 10]


def test_a_peek_that_has_nothing_to_see_needs_no_shard_axis() -> None:
    """The first of each desync group reads what everybody has; so does a module that waits for all."""
    assert [m.reads_shards for m in modules({"layers": "0-4", "preset": "desync", "every": 2})] == [False, True] * 4
    assert not any(m.reads_shards for m in modules({"layers": "0-4", "preset": "standard", "peek": True}))
    ladder = modules({"layers": "1-4", "preset": "ladder", "peek": True})
    assert [m.reads_shards for m in ladder] == [False, False] + [True] * 6


def test_the_dense_module_below_a_peeking_ladder_gives_partials_and_overlaps() -> None:
    below = modules({"layers": "1-4", "preset": "ladder", "peek": True})[1]
    assert below.region.preset == "standard"
    assert (below.gives_partials, below.keeps_payload, below.overlapped) == (True, True, True)


def test_two_updates_late_reductions_hide_behind_two_modules() -> None:
    late = modules({"layers": "1-3", "preset": "ladder", "delay": 2})
    assert [m.late for m in late] == [0, 0, 1, 2, 2, 2, 0, 0]
    assert [m.keeps for m in late] == [0, 0, 1, 1, 1, 0, 0, 0]
    assert [m.hides_behind for m in late] == [0, 2, 2, 2, 1, 0, 0, 0]


def test_one_module_of_each_layer_may_be_waited_for_longer() -> None:
    attention, mlp = (
        {"layers": f"0-4:{each}", "preset": "ladder", "delay": n} for each, n in (("attn", 1), ("mlp", 2))
    )
    late = modules(attention, mlp)
    assert [m.late for m in late] == [0, 1, 1, 2, 1, 2, 1, 2]
    assert [m.hides_behind for m in late] == [1, 2, 1, 2, 1, 2, 1, 0]


def test_a_wiring_tells_its_rewired_layers_and_what_a_token_waits_for() -> None:
    dense = Wiring.dense(4, 10)
    assert (dense.rewired_layers, dense.exposed, dense.depends_on_shards) == ([], 8, False)
    ladder = dense.rewire([{"layers": "2-4", "preset": "ladder", "peek": True}])
    assert (ladder.rewired_layers, ladder.exposed, ladder.depends_on_shards) == ([2, 3], 4, True)
    desync = dense.rewire([{"layers": "0-2:attn", "preset": "desync"}])
    assert desync.rewired_layers == [0, 1], "a standard MLP that reads what is not reduced yet computes something else"


def test_rewired_again_other_layers_keep_theirs() -> None:
    wiring = Wiring.from_json([{"layers": "0-4", "preset": "desync", "every": 4}], 4, 10)
    again = wiring.rewire([{"layers": "1", "preset": "standard"}, {"layers": "3", "preset": "ladder"}])
    assert again.to_json() == [
        {"layers": "0-1,2-3", "preset": "desync", "every": 4, "merge": "sum"},
        {"layers": "1-2", "preset": "standard"},
        {"layers": "3-4", "preset": "ladder"},
    ]
    assert wiring.to_json() == [{"layers": "0-4", "preset": "desync", "every": 4, "merge": "sum"}]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"tp_shards": 3}, "tp_shards 3 does not divide num_attention_heads 8"),
        ({"tp_shards": 8}, "tp_shards 8 does not divide num_key_value_heads 4"),
        ({"tp_shards": 4, "intermediate_size": 50}, "tp_shards 4 does not divide intermediate_size 50"),
        ({"tp_shards": 0}, "at least 1"),
        ({"wiring": [{"layers": "0-7", "preset": "ladder"}]}, "beyond the model"),
        ({"wiring": [{"layers": "0-3", "preset": "leader"}]}, "'leader' is not a wiring"),
        ({"wiring": [{"layers": "0-3", "preset": "ladder", "every": 2}]}, "'every' is no option"),
        ({"wiring": [{"layers": "0-3", "preset": "ladder"}, {"layers": "2-4", "preset": "desync"}]}, "named twice"),
        (
            {
                "wiring": [
                    {"layers": "0-4:attn", "preset": "partial", "shared_fraction": 0.5, "merge": "mean"},
                    {"layers": "0-4:mlp", "preset": "partial", "shared_fraction": 0.5},
                ]
            },
            "give both the same merge",
        ),
    ],
)
def test_a_config_is_validated_when_it_is_built(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RewiredLlamaConfig(**(SIZES | changes))


def test_a_config_without_a_wiring_is_dense_and_says_so() -> None:
    assert RewiredLlamaConfig(**SIZES).wiring == [{"layers": "0-6", "preset": "standard"}]


def test_a_config_survives_to_dict() -> None:
    config = rewired_config([{"layers": "2-", "preset": "desync", "every": 3, "merge": "mean", "overlap": True}])
    again = RewiredLlamaConfig.from_dict(config.to_dict())
    assert (
        again.wiring
        == config.wiring
        == [
            {"layers": "0-2", "preset": "standard"},
            {"layers": "2-6", "preset": "desync", "every": 3, "merge": "mean", "overlap": True},
        ]
    )
