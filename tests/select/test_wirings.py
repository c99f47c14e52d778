"""The savings of choices, against the table that `convert` prints of them."""

from __future__ import annotations

from itertools import product

import pytest

from rewired.convert.traffic import Traffic
from rewired.model.wiring import Wiring
from rewired.select.choice import STANDARD
from rewired.select.wirings import WIRINGS, entries, exposed, exposures, last, least_exposed

CHOICES = list(product((STANDARD, *WIRINGS), repeat=3))


def test_what_layers_save_adds_up() -> None:
    units, dense = exposures(3, list(WIRINGS)), exposed((STANDARD,) * 3)
    assert dense == 6
    for choice in CHOICES:
        modules = Wiring.from_json(entries(choice), 3, 64).modules
        total = Traffic.of(modules, 8, 2).exposed
        assert dense + sum(units[layer][name] for layer, name in enumerate(choice)) == exposed(choice) == total


def test_the_least_is_that_of_all_choices() -> None:
    assert least_exposed(3, list(WIRINGS)) == min(map(exposed, CHOICES))
    for name in WIRINGS:
        assert least_exposed(3, [name]) == min(map(exposed, product((STANDARD, name), repeat=3)))


def test_layers_of_one_kind_become_one_entry() -> None:
    choice = ("ladder", STANDARD, "desync-2x", "ladder", "ladder")
    assert entries(choice) == [
        {"layers": "0-1,3-5", "preset": "ladder"},
        {"layers": "2-3", "preset": "desync", "every": 2},
    ]


@pytest.mark.parametrize(
    ("budget", "most_exposed", "count"), [(2, None, 2), (4, None, 4), (None, 4, 2), (None, 5, 2), (None, 8, 0)]
)
def test_the_papers_take_the_last_layers(budget: int | None, most_exposed: int | None, count: int) -> None:
    """Each ladder layer saves two; as few as it takes."""
    assert last(4, "ladder", budget, most_exposed) == (STANDARD,) * (4 - count) + ("ladder",) * count
