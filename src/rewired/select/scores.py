"""Scores: what rewiring a layer costs in quality, and the cache of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rewired.cache import cache_folder, write_whole

from .choice import Price

T = TypeVar("T")


@dataclass(frozen=True)
class LayerScore:
    """Mean KL(original || only these layers rewired) a token, after a refit, on held-out tokens."""

    single: float  # of the layer alone
    pair: float | None  # of the layer and the next one; None for the last

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that are no KL."""
        _check_finite(self.single, 0.0 if self.pair is None else self.pair)


@dataclass(frozen=True)
class MeasuredKL:
    """A choice as a whole: the same KL right after conversion and after a refit of all its layers."""

    converted: float
    refitted: float
    standard_error: float | None  # of `refitted`

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that are no KL."""
        _check_finite(self.converted, self.refitted, 0.0 if self.standard_error is None else self.standard_error)


class ScoreCache:
    """The scores of one model on one text, and the measurements of its choices: JSON files in the user's cache.

    `settings` identify the text and the model, which has so many `layers`.
    """

    def __init__(self, settings: Mapping[str, Any], layers: int) -> None:
        self.layers = layers
        self.folder = cache_folder() / "scores" / _digest(settings)

    def read(self, wiring: str) -> dict[int, LayerScore]:
        """The scores of `wiring` that there are, by layer. Raises ValueError where the file of one is broken."""
        scores = {layer: _read(self._file(wiring, layer), partial(self._score, layer)) for layer in range(self.layers)}
        return {layer: score for layer, score in scores.items() if score is not None}

    def add(self, wiring: str, layer: int, score: LayerScore) -> None:
        write_whole(self._file(wiring, layer), json.dumps(asdict(score)))

    def measured(self, entries: Sequence[Mapping[str, Any]]) -> MeasuredKL | None:
        """The measurement of the choice with these wiring entries, if there is one. Raises ValueError as `read`."""
        return _read(self._measurement(entries), MeasuredKL)

    def add_measured(self, entries: Sequence[Mapping[str, Any]], measured: MeasuredKL) -> None:
        write_whole(self._measurement(entries), json.dumps(asdict(measured)))

    def price(self, names: Sequence[str]) -> Price:
        """What choices among the wirings `names` cost, all of whose layers are scored."""
        scores = {name: self.read(name) for name in names}

        def excess(name: str, layer: int) -> float:
            """What `layer` and the next one cost together beyond what they cost alone.

            They may cost less, where the second's refit mends what the first left; many in a row do not.
            """
            one, other = scores[name][layer], scores[name][layer + 1]
            assert one.pair is not None, "only the last layer has no neighbour"
            return max(0.0, one.pair - one.single - other.single)

        return Price(
            [{name: scores[name][layer].single for name in names} for layer in range(self.layers)],
            # neighbours of two kinds are not scored together: halfway between the kinds
            lambda layer, one, other: (excess(one, layer) + excess(other, layer)) / 2,
        )

    def _score(self, layer: int, **numbers: float) -> LayerScore:
        """Of `layer`, as it was written. Raises ValueError where the model's layer cannot have it."""
        score = LayerScore(**numbers)
        if (score.pair is None) != (layer == self.layers - 1):
            raise ValueError(f"layer {layer} cannot have {score}")
        return score

    def _file(self, wiring: str, layer: int) -> Path:
        return self.folder / f"{wiring.replace('/', '-')}-{layer}.json"

    def _measurement(self, entries: Sequence[Mapping[str, Any]]) -> Path:
        return self.folder / f"measured-{_digest(entries)}.json"


def _read(path: Path, make: Callable[..., T]) -> T | None:
    """What `make` makes of the numbers in `path`; None where there is no file. Raises ValueError where it is broken."""
    if not path.is_file():
        return None
    try:
        return make(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is broken ({error}): remove it, and what it held is scored again.") from None


def _check_finite(*numbers: float) -> None:
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError(f"{numbers} are no finite numbers")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
