"""The names of wirings: what they mean, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rewired.bench.contenders import contenders
from rewired.checkpoint.named_shapes import named_shapes

TINY = named_shapes()["tiny"]  # 4 layers


def entries(name: str, own: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    return {each.name: each.entries for each in contenders([name], TINY, own or [])}[name]


@pytest.mark.parametrize(
    ("name", "regions"),
    {
        "none": [],
        "ladder": [{"layers": "0-", "preset": "ladder"}],
        "ladder+peek": [{"layers": "0-", "preset": "ladder", "peek": True}],
        "parallel+overlap+peek": [{"layers": "0-", "preset": "parallel", "overlap": True, "peek": True}],
        "desync-4x": [{"layers": "0-", "preset": "desync", "every": 4}],
        "desync": [{"layers": "0-", "preset": "desync"}],
        "partial-0.5": [{"layers": "0-", "preset": "partial", "shared_fraction": 0.5}],
        "ladder@2-4": [{"layers": "2-4", "preset": "ladder"}],
        "int8": [{"layers": "0-", "preset": "standard", "payload": "int8"}],
        "int4/int8@2-4": [{"layers": "2-4", "preset": "standard", "payload": "int4/int8"}],
        "standard+int4": [{"layers": "0-", "preset": "standard", "payload": "int4"}],
        "ladder+peek+int4": [{"layers": "0-", "preset": "ladder", "peek": True, "payload": "int4"}],
        "desync-2x+int4/int8": [{"layers": "0-", "preset": "desync", "every": 2, "payload": "int4/int8"}],
        "desync-2x+overlap@-2": [{"layers": "-2", "preset": "desync", "every": 2, "overlap": True}],
    }.items(),
)
def test_names(name: str, regions: list[dict[str, Any]]) -> None:
    assert entries(name) == regions


def test_the_baselines_are_always_there_and_nothing_is_twice() -> None:
    names = [each.name for each in contenders(["ladder", "standard", "ladder", "none"], TINY, [])]
    assert names == ["stock", "standard", "ladder", "none"]


def test_own_is_the_checkpoint_s() -> None:
    own = [{"layers": "1-3", "preset": "ladder"}]
    assert entries("own", own) == own


@pytest.mark.parametrize(
    ("name", "sentence"),
    {
        "lader": "--wirings lader: 'lader' is no wiring: begin with ladder, desync,",
        "ladder+speed": r"--wirings ladder\+speed: '\+speed' in .* means nothing",
        "ladder-2x": "'-2x' in 'ladder-2x' means nothing",
        "int2": "--wirings int2: 'int2' is no wiring",
        "int8+peek": "is no wiring",
        "ladder, none": "'none' is no wiring",
        "desync-1.5x": "'-1.5x' in 'desync-1.5x' means nothing",
        "desync-1x": "--wirings desync-1x: .*every",
        "partial": "--wirings partial: .*shared fraction",
        "ladder@3-9": "--wirings ladder@3-9: .*layers 0 to 3",
        "own": "and this model has none",
    }.items(),
)
def test_refused_names(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        contenders([name], TINY, [])
