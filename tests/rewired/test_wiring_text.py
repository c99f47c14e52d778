"""The text of a wiring: parsed and printed, each the other's inverse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rewired.model.presets import PRESETS
from rewired.model.wiring import Wiring
from rewired.model.wiring_text import parse_wiring, parse_wirings, region_name, wiring_text

from .test_against_reference import regions

LAYERS = 40


def wiring(entries: list[dict[str, Any]]) -> Wiring:
    return Wiring.from_json(entries, LAYERS, 64)


def printed(text: str) -> str:
    return wiring_text(wiring(parse_wiring(text)).regions)


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Regions with every option there is, some of several ranges."""
    entries = draw(regions(num_layers=LAYERS))
    for entry in entries:
        entry["payload"] = draw(st.sampled_from(["full", "int8", "int4/int8", "8:0.1,4/8:0.4,0:0.5", "8:.5,4:0.500"]))
        if "shared_fraction" in entry:
            entry["shared_fraction"] = draw(st.floats(0, 1))
        if (stop := int(entry["layers"].split("-")[1].split(":")[0])) - int(entry["layers"].split("-")[0]) > 2:
            entry["layers"] = entry["layers"].replace(f"-{stop}", f"-{stop - 2}") + f",{stop - 1}"
    try:
        return wiring(entries)
    except ValueError:  # merges that mix, or channels that nothing is left of
        assume(False)
        raise


@given(wirings())
def test_what_is_printed_is_read_as_it_was(random: Wiring) -> None:
    text = wiring_text(random.regions)
    assert wiring(parse_wiring(text)) == random
    assert printed(text) == text


@pytest.mark.parametrize(
    ("text", "entries"),
    {
        "ladder": [{"layers": "0-", "preset": "ladder"}],
        "ladder@16-32": [{"layers": "16-32", "preset": "ladder"}],
        "ladder+peek@0-30": [{"layers": "0-30", "preset": "ladder", "peek": True}],
        "desync-4x@8-24, ladder@24-32": [
            {"layers": "8-24", "preset": "desync", "every": 4},
            {"layers": "24-32", "preset": "ladder"},
        ],
        "desync@-8": [{"layers": "-8", "preset": "desync"}],
        "partial-0.5(mean)@16-32": [{"layers": "16-32", "preset": "partial", "shared_fraction": 0.5, "merge": "mean"}],
        "standard+int4@0-2,desync-2x+int4@2-30": [
            {"layers": "0-2", "preset": "standard", "payload": "int4"},
            {"layers": "2-30", "preset": "desync", "every": 2, "payload": "int4"},
        ],
        "ladder@0-4:attn": [{"layers": "0-4:attn", "preset": "ladder"}],
        "ladder@0-4,8-12": [{"layers": "0-4,8-12", "preset": "ladder"}],
        "int4/int8@ 0-4, 8-12, parallel + overlap @ -2": [
            {"layers": "0-4,8-12", "preset": "standard", "payload": "int4/int8"},
            {"layers": "-2", "preset": "parallel", "overlap": True},
        ],
        "desync-2x-peek": [{"layers": "0-", "preset": "desync", "every": 2, "peek": False}],
        "ladder+delay-2@-2": [{"layers": "-2", "preset": "ladder", "delay": 2}],
        "ladder+int4+peek-overlap": [
            {"layers": "0-", "preset": "ladder", "payload": "int4", "peek": True, "overlap": False}
        ],
        "partial-.25": [{"layers": "0-", "preset": "partial", "shared_fraction": 0.25}],
        "ladder+8:0.1+4/8:0.4+0:0.5+peek@5": [
            {"layers": "5", "preset": "ladder", "payload": "8:0.1,4/8:0.4,0:0.5", "peek": True}
        ],
    }.items(),
)
def test_texts(text: str, entries: list[dict[str, Any]]) -> None:
    assert parse_wiring(text) == entries
    assert wiring(parse_wiring(printed(text))) == wiring(entries)
    assert printed(printed(text)) == printed(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "ladder": "ladder@0-40",
        "standard": "standard",
        "standard@0-": "standard",
        "desync+overlap@-8": "desync-2x+overlap@32-40",
        "partial-0.00001": "partial-0.00001@0-40",
        "int8@3": "standard+int8@3-4",
        "ladder+delay-2+peek": "ladder+peek+delay-2@0-40",
        "desync+overlap+delay-2": "desync-2x+delay-2@0-40",
        "standard+delay-2+overlap": "standard+delay-2@0-40",
        "ladder+delay-1": "ladder@0-40",
        "desync+delay-1": "desync-2x+overlap@0-40",
        "8:0.5+4:0.5": "standard+8:0.5+4:0.5@0-40",
        "ladder@24-, partial-1(mean)+int4-peek+overlap@0-2:mlp": (
            "partial-1(mean)-peek+overlap+int4@0-2:mlp, ladder@24-40"
        ),
    }.items(),
)
def test_how_they_are_printed(text: str, expected: str) -> None:
    assert printed(text) == expected


def test_a_region_has_a_name_without_its_layers() -> None:
    assert [region_name(region) for region in wiring(parse_wiring("ladder+peek@3-5")).regions] == [
        "standard",
        "ladder+peek",
        "standard",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    {
        "lader@0-4": r"'lader@0-4' is no wiring: begin with ladder, desync, .*, as in ladder\+peek@16-32",
        "ladder@0-4; desync": "is several wirings: put commas",
        "": "'' is no wiring",
        "ladder@0-4,": "'' is no wiring",
        "int2": "'int2' is no wiring",
        "ladder, none": "'none' is no wiring",
        "ladder+speed": r"'\+speed' in 'ladder\+speed' means nothing: 'ladder' takes \+peek, -overlap, .*@LAYERS",
        "ladder-peek": "'-peek' in 'ladder-peek' means nothing",
        "ladder+delay-3": "'delay' of layers 0- is 3: it must be 1 or 2",
        "ladder-overlap+delay-2": "cannot both wait and read late",
        "ladder-overlap+delay-1": "cannot both wait and read late",
        "ladder+peek+peek": r"'\+peek' in 'ladder\+peek\+peek' means nothing: .* takes \+peek, .*, each once,",
        "ladder:16-32": "':16-32' in 'ladder:16-32' means nothing",
        "ladder-2x": "'-2x' in 'ladder-2x' means nothing",
        "desync-1.5x": "'-1.5x' in 'desync-1.5x' means nothing: 'desync' takes -Nx,",
        "standard+8:0.5,4:0.5": "',4:0.5' in .* means nothing",
        "desync-1x": "'every' of layers 0- is 1: it must be an integer of at least 2",
        "partial@3": "need a shared fraction: .* or as partial-P in a text",
        "standard+int2": "'payload' of layers 0- is 'int2'",
        "ladder@": "'' is not a range of layers",
        "ladder@30-50": "beyond the model",
        "ladder, desync-4x@24-32": "Layer 24 is named twice",
    }.items(),
)
def test_what_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        wiring(parse_wiring(text))


def test_several_have_semicolons_between_them() -> None:
    assert parse_wirings("ladder; desync-4x@8-24, ladder@24-32;ladder") == ["ladder", "desync-4x@8-24, ladder@24-32"]
    with pytest.raises(ValueError, match="empty wiring"):
        parse_wirings("ladder;")


def test_every_option_has_a_form() -> None:
    options = {option for preset in PRESETS.values() for option in preset.all_options}
    assert all(option.type is bool or "{}" in option.text for option in options)
