"""The refit of a conversion: loads its text, runs the sweep, and tells what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rewired.cache import digest, discard
from rewired.checkpoint.rewired_config import wired_config
from rewired.checkpoint.shape import family_in
from rewired.divergence import Divergence
from rewired.families import classes
from rewired.loading import loading
from rewired.model.configuration import RewiredConfig
from rewired.quantities import count
from rewired.ranks import choose_device
from rewired.text.tokenizer import load_tokenizer

from .activations import memory_errors
from .calibration import Calibration, load
from .fitting import Fit
from .request import RefitRequest
from .sweep import BrokenWeightsError, Sweep
from .weights import Finished, Weights

ALGORITHM_VERSION = 9  # increase it when the same text gives other weights: then no older run is continued


@dataclass(frozen=True)
class RefitResult:
    """The new tensors, each with the file that holds it, and what a reader should know."""

    files: dict[str, Path]
    fits: list[Fit]
    request: RefitRequest
    calibration: Calibration
    before: Divergence
    after: Divergence
    passes: float | None  # time it took, in forward passes of the original over the same tokens; None if resumed

    def facts(self) -> list[str]:
        """Sentences for users and for the card, the same every time."""
        before, after, text = self.before, self.after, self.calibration
        what = (
            "Refitted in closed form"
            if self.request.matrices
            else "Gains calibrated by least squares, no other weight changed,"
        )
        rest = ", which has no more" if text.tokens <= self.request.tokens - text.windows.shape[1] else ""
        return [
            f"{what} on {text.tokens:,} tokens of {text.name}{rest}, without a gradient step. On "
            f"{text.held_out_tokens:,} of them, held out to choose each fit: KL(original || fitted) {after.kl:.3f}, "
            f"and {before.kl:.3f} by conversion alone; perplexity {after.perplexity:.2f}, and {before.perplexity:.2f}; "
            f"the original's is {before.perplexity_original:.2f}.",
            *self._ridges(),
            *self._placements(),
        ]

    def _ridges(self) -> list[str]:
        if not self.request.matrices:
            return []
        sentences = []
        for name, part in (("what modules read", "input"), ("what they add", "output")):
            ridges = [ridge for fit in self.fits if (errors := getattr(fit, part)) for ridge in errors.ridges]
            counts, dropped = Counter(ridge for ridge in ridges if ridge is not None), ridges.count(None)
            chosen = ", ".join(f"{ridge:g} ({count(times, 'time')})" for ridge, times in sorted(counts.items()))
            rest = f", and {count(dropped, 'fit')} dropped" if dropped else ""
            sentences.append(f"for {name} {chosen or 'none'}{rest}")
        return [f"Ridges, relative to the mean diagonal of each Gram matrix: {'; '.join(sentences)}."]

    def _placements(self) -> list[str]:
        placed = sum(fit.placement.after < fit.placement.before for fit in self.fits if fit.placement)
        if not placed:
            return []
        return [
            f"Neurons of {count(placed, 'MLP')} moved to the shards that see what they read: a row of their "
            "projections may be another neuron than in the original."
        ]

    def time(self) -> list[str]:
        if self.passes is None:
            return []
        return [f"That took {self.passes:.1f} times as long as the original needs for the same tokens."]

    def record(self, base: Mapping[str, Any], wiring: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """For the config: what was refitted, to which `wiring`, and the `base` that has the weights from before."""
        return {
            "base": dict(base),
            "wiring": [dict(entry) for entry in wiring],
            "text": self.calibration.name,
            "tokens": self.calibration.tokens,
            "kl_converted": round(self.before.kl, 6),
            "kl": round(self.after.kl, 6),
            "notes": self.facts(),
        }


def refit(
    config: Mapping[str, Any],
    source: Path,
    tensors: Mapping[str, Path],
    dtype: str | None,
    request: RefitRequest,
    work: Path,
    on_layer: Callable[[int, int, list[Fit]], None],
    on_start: Callable[[int], None] = lambda tokens: None,
) -> RefitResult:
    """Fit the rewired layers of the checkpoint in `source`, as `config` wires them, and leave their tensors in `work`.

    `tensors` names the file of each of the source's tensors. Results are rounded to `dtype` or, where that is None, to
    the source's. `on_start` is called with the number of tokens once all inputs are checked. A run of the same settings
    that was interrupted is resumed from what it left in `work`. Raises ValueError for text or a tokenizer that cannot
    be used.
    """
    calibration = load_text(config, source, request.text, request.tokens)
    settings = {
        "algorithm": ALGORITHM_VERSION,
        "config": {name: config[name] for name in sorted(config)},
        "weights": {path.name: digest(path) for path in sorted(set(tensors.values()))},
        "text": calibration.sha256,
        "dtype": dtype,
        "gains": request.gains,
        "matrices": request.matrices,
    }
    started = time.perf_counter()
    weights = Weights(tensors, torch.device(choose_device("auto", 1)), family_in(config))
    finished, fits = Finished(work, settings, weights.family), list[Fit]()
    resumes = finished.has_begun()
    on_start(calibration.tokens)

    def keep(layer: int, layers: int, new: list[Fit]) -> None:
        fits.extend(new)
        on_layer(layer, layers, new)

    with memory_errors():
        model = model_config(config)
        sweep = Sweep(model, weights, calibration, dtype, gains=request.gains, matrices=request.matrices)
        try:
            before, after = sweep.run(finished, keep)
        except BrokenWeightsError:
            discard(work)
            raise
    passes = None if resumes else (time.perf_counter() - started) / sweep.seconds
    return RefitResult(finished.files(), fits, request, calibration, before, after, passes)


def model_config(config: Mapping[str, Any]) -> RewiredConfig:
    """The model's config for the values in `config`. Raises ValueError where they describe no model."""
    with loading("config.json describes no model that can be run"):
        family = family_in(config)
        parsed: RewiredConfig = classes(family, "Config").from_dict(dict(config))
        with torch.device("meta"):
            classes(family, "DecoderLayer")(parsed, 0, parsed.resolved_wiring.layers[0])
    return parsed


def load_text(config: Mapping[str, Any], source: Path, text: str, tokens: int) -> Calibration:
    """`tokens` tokens of `text` for the checkpoint in `source`. Raises ValueError where it has no tokenizer that loads,
    and for a text that cannot be used."""
    shape = model_config(wired_config(config, [], tp_shards=1))
    tokenizer = load_tokenizer(source, because=", and a refit needs one")
    calibration = load(text, tokenizer, tokens, shape.max_position_embeddings)
    if int(calibration.windows.max()) >= shape.vocab_size:
        raise ValueError(
            f"The tokenizer has tokens beyond the model's vocabulary of {shape.vocab_size}: is it its own?"
        )
    return calibration
