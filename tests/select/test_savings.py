"""The savings of choices, against the table that `convert` prints of them."""

from __future__ import annotations

from itertools import product

import pytest

from rewired.convert.traffic import Traffic
from rewired.model.wiring import Wiring
from rewired.select.choice import (
    STANDARD,
    Amount,
    Choice,
    dense_layers,
    entries,
    exposed,
    last,
    least,
    names,
    sent,
    units,
)

WIRINGS = names("ladder; ladder+peek+delay-2; parallel; parallel+overlap; desync; desync-2x+int4; int4; int8")
CHOICES = list(product((STANDARD, *WIRINGS), repeat=3))


def bytes_sent(choice: Choice) -> int:
    return sent(choice, hidden_size=64)


@pytest.mark.parametrize(("amount", "dense"), [(dense_layers, 3), (exposed, 6), (bytes_sent, 6 * 128)])
def test_what_layers_save_adds_up(amount: Amount, dense: int) -> None:
    saved = units(3, list(WIRINGS), amount)
    assert amount((STANDARD,) * 3) == dense
    for choice in CHOICES:
        assert dense + sum(saved[layer][name] for layer, name in enumerate(choice)) == amount(choice)


def test_it_is_what_convert_says() -> None:
    """Where ranks add up equally many groups."""
    for choice in CHOICES[::7]:
        traffic = Traffic.of(Wiring.from_json(entries(choice), 3, 128).modules, 2, 2)
        assert (traffic.exposed, traffic.bytes_sent) == (exposed(choice), sent(choice, hidden_size=128))


@pytest.mark.parametrize("amount", [exposed, bytes_sent])
def test_the_least_is_that_of_all_choices(amount: Amount) -> None:
    assert least(3, list(WIRINGS), amount) == min(map(amount, CHOICES))
    for name in WIRINGS:
        assert least(3, [name], amount) == min(map(amount, product((STANDARD, name), repeat=3)))


def test_names_are_printed_and_there_is_one_of_each() -> None:
    assert names("desync; desync-2x; standard+int4; int4/int8") == ("desync-2x", "standard+int4", "standard+int4/int8")


@pytest.mark.parametrize(
    ("wirings", "sentence"),
    [
        ("ladder@0-4", "'ladder@0-4' names layers"),
        ("ladder, desync", "leave them out"),
        ("ladder; standard", "'standard' is what unchosen layers stay"),
        ("desync-4x", "Layers cannot be chosen one by one for 'desync-4x'"),
        ("partial-0.5", "Layers cannot be chosen one by one"),
        ("desync-3x; ladder", "Layers cannot be chosen one by one"),
    ],
)
def test_layers_that_do_not_stand_for_themselves_are_refused(wirings: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        names(wirings)


def test_layers_of_one_kind_become_one_entry() -> None:
    choice = ("ladder", STANDARD, "desync-2x", "ladder", "ladder")
    assert entries(choice) == [
        {"layers": "0-1,3-5", "preset": "ladder"},
        {"layers": "2-3", "preset": "desync", "every": 2},
    ]


@pytest.mark.parametrize(
    ("amount", "most", "count"),
    [(dense_layers, 2, 2), (dense_layers, 0, 4), (exposed, 4, 2), (exposed, 5, 2), (exposed, 8, 0), (exposed, -1, 4)],
)
def test_the_papers_take_the_last_layers(amount: Amount, most: int, count: int) -> None:
    """Each ladder layer saves two; as few as it takes, or all, if they are not enough."""
    assert last(4, "ladder", amount, most) == (STANDARD,) * (4 - count) + ("ladder",) * count
