"""Scores: what rewiring a layer costs in quality, and the cache of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rewired.cache import cache_folder, write_whole

from .choice import Price


@dataclass(frozen=True)
class LayerScore:
    """Mean KL(original || only these layers rewired) a token, after a refit, on held-out tokens."""

    single: float  # of the layer alone
    pair: float | None  # of the layer and the next one; None for the last


@dataclass(frozen=True)
class MeasuredKL:
    """A choice as a whole: the same KL right after conversion and after a refit of all its layers."""

    converted: float
    refitted: float
    standard_error: float | None  # of `refitted`


class ScoreCache:
    """The scores of one model on one text, and the measurements of its choices: JSON files in the user's cache.

    `settings` identify the text and the model, which has so many `layers`.
    """

    def __init__(self, settings: Mapping[str, Any], layers: int) -> None:
        self.layers = layers
        self.folder = cache_folder() / "scores" / _digest(settings)

    def read(self, wiring: str) -> dict[int, LayerScore]:
        """The scores of `wiring` that there are, by layer."""
        files = {layer: self._score(wiring, layer) for layer in range(self.layers)}
        return {layer: LayerScore(**json.loads(file.read_text())) for layer, file in files.items() if file.is_file()}

    def add(self, wiring: str, layer: int, score: LayerScore) -> None:
        write_whole(self._score(wiring, layer), json.dumps(asdict(score)))

    def measured(self, entries: Sequence[Mapping[str, Any]]) -> MeasuredKL | None:
        """The measurement of the choice with these wiring entries, if there is one."""
        file = self._measurement(entries)
        return MeasuredKL(**json.loads(file.read_text())) if file.is_file() else None

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

    def _score(self, wiring: str, layer: int) -> Path:
        return self.folder / f"{wiring.replace('/', '-')}-{layer}.json"

    def _measurement(self, entries: Sequence[Mapping[str, Any]]) -> Path:
        return self.folder / f"measured-{_digest(entries)}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
