"""The scorer of layers: each rewired alone and with the next one, refitted, the rest as in the original."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from rewired.checkpoint.rewired_config import wired_config
from rewired.model.residual_stream import ResidualStream
from rewired.model.wiring_text import parse_wiring
from rewired.progress import announce
from rewired.refit.calibration import Calibration
from rewired.refit.fitting import Batch
from rewired.refit.run import model_config
from rewired.refit.sweep import Sweep
from rewired.refit.weights import Weights

from .scores import LayerScore, ScoreCache

OnScore = Callable[[str, int, int, LayerScore], None]  # called with a wiring, the layer, and the number of layers


class Scorer:
    """Scores layers of the dense model of `config` on `tp_shards` shards."""

    def __init__(self, config: Mapping[str, Any], tp_shards: int, weights: Weights, calibration: Calibration) -> None:
        self.config, self.tp_shards = config, tp_shards
        self.weights, self.calibration = weights, calibration
        self.layers = int(config["num_hidden_layers"])
        self.dense = self._sweep([])

    def run(self, names: Sequence[str], cache: ScoreCache, on_score: OnScore) -> None:
        """Add to `cache` the scores of the wirings `names` that it lacks."""
        known = {name: cache.read(name) for name in names}
        missing = [[name for name in names if layer not in known[name]] for layer in range(self.layers)]
        if not any(missing):
            return
        announce("running the original")
        batches = self.dense.start()
        originals = self._finish({0: _measured(batches)})
        before = batches  # the layer before: the update that it leaves in flight is what a rewired one may not wait for
        for layer in range(max(layer for layer, lacking in enumerate(missing) if lacking) + 1):
            if missing[layer]:
                announce(f"measuring layer {layer} of 0 to {self.layers - 1}: {', '.join(missing[layer])}")
                for name, score in self._score(layer, missing[layer], before, originals):
                    cache.add(name, layer, score)
                    on_score(name, layer, self.layers, score)
            before = list(batches)
            self.dense.pass_layer(layer, batches)

    def _score(
        self, layer: int, names: Sequence[str], before: Sequence[Batch], originals: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, LayerScore]]:
        """The streams of all wirings take the layers behind them together."""
        after = min(layer + 2, self.layers)
        streams: dict[int, list[ResidualStream]] = {layer + 1: [], layer + 2: []}  # by the layer that they go on with
        for name in names:
            single, *pair = self._fitted(name, layer, after, before)
            [entry] = parse_wiring(name)
            if pair and "payload" in entry:  # where a region ends, what its last rounding leaves is lost
                [single] = self._fitted(name, layer, layer + 1, before)
            streams[layer + 1] += single
            streams[layer + 2] += chain.from_iterable(pair)
        ends, width = self._finish(streams), len(originals)
        kls = [self._kl(layer, originals, ends[start : start + width]) for start in range(0, len(ends), width)]
        pairs: Sequence[float | None] = kls[len(names) :] or [None] * len(names)
        return zip(names, map(LayerScore, kls, pairs), strict=True)

    def _fitted(self, name: str, start: int, stop: int, before: Sequence[Batch]) -> Iterator[list[ResidualStream]]:
        """The streams after each of these layers, which are one region."""
        sweep = self._sweep(parse_wiring(f"{name}@{start}-{stop}"))
        batches = [replace(batch) for batch in before]
        if start > 0:
            sweep.pass_layer(start - 1, batches)
        for index in range(start, stop):
            sweep.fit_layer(index, batches)
            yield _measured(batches)

    def _finish(self, streams: Mapping[int, Sequence[ResidualStream]]) -> list[torch.Tensor]:
        """Where `streams` end, [B, T, H] each, in order; by the first layer that each of them has yet to take."""
        running: list[ResidualStream] = []
        for layer in range(min(streams), self.layers):
            running = self.dense.advance(layer, [*running, *streams.get(layer, ())])
        late = (stream for layer, some in streams.items() if layer >= self.layers for stream in some)
        return [self.dense.total(stream) for stream in (*running, *late)]

    def _kl(self, layer: int, originals: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]) -> float:
        kl = self.dense.divergence(originals, ends).kl
        if not math.isfinite(kl):
            raise ValueError(f"Layer {layer}, rewired, gives no finite KL: are the checkpoint's weights whole?")
        return kl

    def _sweep(self, entries: Sequence[Mapping[str, Any]]) -> Sweep:
        config = model_config(wired_config(self.config, entries, self.tp_shards))
        return Sweep(config, self.weights, self.calibration, None, gains=False, matrices=True)


def _measured(batches: Sequence[Batch]) -> list[ResidualStream]:
    return [batch.refitted for batch in batches if batch.is_measured]
