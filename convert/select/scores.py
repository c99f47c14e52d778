"""What rewiring a layer costs in quality: KL(original || only this layer rewired), measured after a refit, and kept."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rewired.cache import cache_folder
from rewired.residual_stream import ResidualStream
from rewired.wiring import parse_wiring

from ..refit.fitting import Batch
from ..refit.run import RECIPE, model_config
from ..refit.shelf import Shelf
from ..refit.sweep import Sweep
from ..refit.text import Calibration
from ..refit.weights import Weights
from ..write import wired_config

OnScore = Callable[[str, int, int], None]  # hears of a wiring's name, the layer that is scored, and how many there are


@dataclass(frozen=True)
class Score:
    """Mean KL a token, on held-out tokens."""

    single: float  # of the layer alone
    pair: float | None  # of the layer and the next one; None for the last


class Scores:
    """The scores of one model on one text, in a JSON file that grows with every layer that is scored."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        name = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:24]
        self.path = cache_folder() / "scores" / f"{name}.json"
        self.found: dict[str, dict[int, Score]] = {}
        if self.path.is_file():
            kept = json.loads(self.path.read_text())["scores"]
            self.found = {
                wiring: {int(layer): Score(**score) for layer, score in layers.items()}
                for wiring, layers in kept.items()
            }

    def excess(self, wiring: str, layer: int) -> float:
        """What `layer` and the next one cost together beyond what they cost alone."""
        one, other = self.found[wiring][layer], self.found[wiring][layer + 1]
        assert one.pair is not None, "only the last layer has no neighbour"
        return one.pair - one.single - other.single

    def add(self, wiring: str, layer: int, score: Score) -> None:
        self.found.setdefault(wiring, {})[layer] = score
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent) as scratch:
            self.write(Path(scratch) / "scores.json", list(self.found)).replace(self.path)

    def write(self, path: Path, wirings: Sequence[str]) -> Path:
        scores = {wiring: {layer: vars(s) for layer, s in sorted(self.found[wiring].items())} for wiring in wirings}
        path.write_text(json.dumps({"settings": self.settings, "scores": scores}, indent=2) + "\n")
        return path


def settings_of(config: Mapping[str, Any], weights: Mapping[str, str], calibration: Calibration) -> dict[str, Any]:
    """What scores depend on: the model, its weights' SHA-256 by file, and the text."""
    return {"recipe": RECIPE, "config": dict(config), "weights": dict(weights), "text": calibration.sha256}


class Scorer:
    """Scores layers of the dense Llama of `config`, one after another, on `tp_shards` shards."""

    def __init__(
        self, config: Mapping[str, Any], tp_shards: int, weights: Weights, calibration: Calibration, shelf: Shelf
    ) -> None:
        self.config, self.tp_shards = config, tp_shards
        self.weights, self.calibration, self.shelf = weights, calibration, shelf
        self.layers = int(config["num_hidden_layers"])

    def run(self, wirings: Mapping[str, Mapping[str, Any]], scores: Scores, on_score: OnScore) -> None:
        """Add to `scores` what they lack of `wirings`: entries of the JSON form, less their layers, by name."""
        missing = {
            layer: [name for name in wirings if layer not in scores.found.get(name, {})] for layer in range(self.layers)
        }
        if not any(missing.values()):
            return
        dense = self._sweep([])
        batches = dense.start()
        originals = dense.finish(_judging(batches), 0)
        before = batches  # the layer before: the update that it leaves in flight is what a rewired one may not wait for
        for layer in range(self.layers):
            for name in missing[layer]:
                on_score(name, layer, self.layers)
                scores.add(name, layer, self._score(layer, wirings[name], before, originals))
            before = list(batches)
            dense.pass_layer(layer, batches)

    def _score(
        self, layer: int, entry: Mapping[str, Any], before: Sequence[Batch], originals: Sequence[torch.Tensor]
    ) -> Score:
        own, following = layer, [layer + 1][: self.layers - layer - 1]
        sweep = self._sweep([{"layers": f"{own}-{own + 1 + len(following)}", **entry}])
        batches = [replace(batch) for batch in before]
        if own > 0:
            sweep.pass_layer(own - 1, batches)
        found = []
        for index in (own, *following):
            sweep.fit_layer(index, batches)
            found.append(sweep.divergence(originals, sweep.finish(_judging(batches), index + 1)).kl)
        return Score(found[0], found[1] if following else None)

    def _sweep(self, entries: Sequence[Mapping[str, Any]]) -> Sweep:
        regions = parse_wiring(entries, self.layers)
        config = model_config(wired_config(self.config, regions, self.tp_shards), self.calibration)
        return Sweep(config, self.weights, self.calibration, None, self.shelf, gains=False, matrices=True)


def _judging(batches: Sequence[Batch]) -> list[ResidualStream]:
    return [batch.refitted for batch in batches if batch.held_out]
