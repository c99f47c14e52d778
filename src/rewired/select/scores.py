"""Scores: what rewiring a layer costs in quality, and the cache of them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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

    `settings` identify the model and the text. The file of a wiring grows with each of its `layers` that is scored.
    """

    def __init__(self, settings: Mapping[str, Any], layers: int) -> None:
        self.settings, self.layers = dict(settings), layers
        self.folder = cache_folder() / "scores" / _digest(self.settings)
        self.scores: dict[str, dict[int, LayerScore]] = {}

    def read(self, wiring: str) -> dict[int, LayerScore]:
        """The scores of `wiring`, by layer. Raises ValueError where the file of them is broken."""
        if wiring not in self.scores:
            self.scores[wiring] = _read(self.folder / _file(wiring), self._scores) or {}
        return self.scores[wiring]

    def add(self, wiring: str, layer: int, score: LayerScore) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.scores.pop(wiring, None)  # another run may have added some
            self.read(wiring)[layer] = score
            self._write(_file(wiring), {layer: asdict(one) for layer, one in sorted(self.scores[wiring].items())})

    def measured(self, entries: Sequence[Mapping[str, Any]]) -> MeasuredKL | None:
        """The measurement of the choice with these wiring entries, if there is one."""
        return _read(self.folder / f"measured-{_digest(entries)}.json", lambda numbers: MeasuredKL(**numbers))

    def add_measured(self, entries: Sequence[Mapping[str, Any]], measured: MeasuredKL) -> None:
        self._write(f"measured-{_digest(entries)}.json", asdict(measured))

    def price(self, names: Sequence[str]) -> Price:
        """What choices among the wirings `names` cost, all of whose layers are scored."""
        return Price(
            [{name: self.read(name)[layer].single for name in names} for layer in range(self.layers)],
            # neighbours of two kinds are not scored together: halfway between the kinds
            lambda layer, one, other: (self._excess(one, layer) + self._excess(other, layer)) / 2,
        )

    def _excess(self, wiring: str, layer: int) -> float:
        """What `layer` and the next one cost together beyond what they cost alone.

        They may cost less, where the second's refit mends what the first left; many in a row do not.
        """
        one, other = self.read(wiring)[layer], self.read(wiring)[layer + 1]
        assert one.pair is not None, "only the last layer has no neighbour"
        return max(0.0, one.pair - one.single - other.single)

    def _scores(self, written: dict[str, dict[str, float]]) -> dict[int, LayerScore]:
        """Scores as they were written. Raises ValueError for layers that the model has not."""
        scores = {int(layer): LayerScore(**score) for layer, score in written.items()}
        for layer, score in scores.items():
            if not 0 <= layer < self.layers or (score.pair is None) != (layer == self.layers - 1):
                raise ValueError(f"layer {layer} cannot have {score}")
        return scores

    def _write(self, name: str, value: Any) -> None:
        write_whole(self.folder / name, json.dumps(value, indent=2) + "\n")


def _file(wiring: str) -> str:
    return f"{wiring.replace('/', '-')}.json"


def _read(path: Path, make: Callable[[Any], T]) -> T | None:
    """What `make` makes of the JSON in `path`; None where there is no file. Raises ValueError where it is broken."""
    if not path.is_file():
        return None
    try:
        return make(json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is broken ({error}): remove it, and what it held is scored again.") from None


def _check_finite(*numbers: float) -> None:
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError(f"{numbers} are no finite numbers")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
