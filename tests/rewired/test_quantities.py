"""Quantities as they are printed."""

from __future__ import annotations

import pytest

from rewired.quantities import count, duration, operations, size


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (count(0, "layer"), "0 layers"),
        (count(1, "layer"), "1 layer"),
        (count(1200, "token"), "1,200 tokens"),
        (size(800), "0.8 kB"),
        (size(35_400_000), "35.4 MB"),
        (size(16_060_000_000), "16.1 GB"),
        (size(2_100e9), "2,100 GB"),
        (operations(2e9), "2 GFLOP"),
        (operations(3.21e15), "3,210 TFLOP"),
        (duration(0.2), "1 s"),
        (duration(95), "95 s"),
        (duration(600), "10 min"),
        (duration(7200), "2.0 h"),
    ],
)
def test_what_is_printed(printed: str, words: str) -> None:
    assert printed == words
