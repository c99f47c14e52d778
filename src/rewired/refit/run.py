"""A conversion's refit, from the outside: which text, how much of it, and what came of it."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rewired.cache import digest
from rewired.checkpoint.rewired_llama import wired_config
from rewired.evaluate.divergence import Divergence
from rewired.model.configuration_rewired_llama import RewiredLlamaConfig
from rewired.model.modeling_rewired_llama import RewiredLlamaDecoderLayer
from rewired.ranks import choose_device

from .calibration import Calibration, load
from .fitting import Fit
from .request import RefitRequest
from .shelf import Shelf
from .sweep import BrokenWeightsError, Sweep
from .weights import Finished, Weights, discard

RECIPE = 8  # counts up when the same text gives other weights, so that no older run is gone on with


@dataclass(frozen=True)
class Outcome:
    """The new tensors, each with the file that holds it, and what a reader should know."""

    files: dict[str, Path]
    fits: list[Fit]
    request: RefitRequest
    calibration: Calibration
    before: Divergence
    after: Divergence
    passes: float | None  # time it took, in forward passes of the original over the same tokens; None if interrupted

    def facts(self) -> list[str]:
        """What comes out the same every time, for users and for the card."""
        before, after, text = self.before, self.after, self.calibration
        what = (
            "Refitted in closed form"
            if self.request.matrices
            else "Gains calibrated by least squares, no other weight changed,"
        )
        rest = ", which has no more" if text.tokens <= self.request.tokens - text.windows.shape[1] else ""
        return [
            f"{what} on {text.tokens:,} tokens of {text.name}{rest}, without a gradient step. On "
            f"{text.held_out_tokens:,} of them, which judged each fit: KL(original || fitted) {after.kl:.3f}, and "
            f"{before.kl:.3f} by conversion alone; perplexity {after.perplexity:.2f}, and {before.perplexity:.2f}; "
            f"the original's is {before.perplexity_original:.2f}.",
            *self._ridges(),
            *self._placements(),
        ]

    def _ridges(self) -> list[str]:
        if not self.request.matrices:
            return []
        told = []
        for name, part in (("what modules read", "input"), ("what they add", "output")):
            errors = [getattr(fit, part) for fit in self.fits]
            counts = Counter(ridge for error in errors if error for ridge in error.ridges)
            chosen = sorted((ridge, count) for ridge, count in counts.items() if ridge is not None)
            told.append(
                f"for {name} " + ", ".join([f"{ridge:g} ({count} times)" for ridge, count in chosen] or ["none"])
            )
            if counts[None]:
                told[-1] += f", and {counts[None]} fits dropped"
        return [f"Ridges, relative to the mean diagonal of each Gram matrix: {'; '.join(told)}."]

    def _placements(self) -> list[str]:
        placed = sum(fit.placement.after < fit.placement.before for fit in self.fits if fit.placement)
        if not placed:
            return []
        return [
            f"Neurons of {placed} MLPs moved to the shards that see what they read: a row of gate_proj or up_proj "
            "there may be another neuron than in the original."
        ]

    def time(self) -> list[str]:
        if self.passes is None:
            return []
        return [f"That took {self.passes:.1f} times as long as the original needs for the same tokens."]

    def record(self, base: Mapping[str, Any], wiring: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """For the config: what was done to which `wiring`, and the `base` that has the weights from before."""
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
) -> Outcome:
    """Fit the rewired layers of the checkpoint in `source`, as `config` wires them, and leave their tensors in `work`.

    `tensors` says which file holds which of the source's. Results are rounded to `dtype`, or stay in what the source
    has them in. `on_start` hears how many tokens there are, when nothing is left to be refused. What an interrupted run
    of the same settings left in `work` is gone on with. Raises ValueError for text or a tokenizer that cannot be used.
    """
    calibration = load_text(config, source, request.text, request.tokens)
    settings = {
        "recipe": RECIPE,
        "config": {name: config[name] for name in sorted(config)},
        "weights": {path.name: digest(path) for path in sorted(set(tensors.values()))},
        "text": calibration.sha256,
        "dtype": dtype,
        "gains": request.gains,
        "matrices": request.matrices,
    }
    started = time.perf_counter()
    weights = Weights(tensors, torch.device(choose_device("auto", 1)))
    finished, fits = Finished(work, settings), list[Fit]()
    goes_on = finished.has_begun()
    on_start(calibration.tokens)

    def keep(layer: int, layers: int, found: list[Fit]) -> None:
        fits.extend(found)
        on_layer(layer, layers, found)

    with tempfile.TemporaryDirectory(dir=request.spill, prefix="rewired-spill-") as spill:
        shelf = Shelf(Path(spill) if request.spill else None)
        parts = {"gains": request.gains, "matrices": request.matrices}
        sweep = Sweep(model_config(config), weights, calibration, dtype, shelf, **parts)
        try:
            with memory_is_told():
                before, after = sweep.run(finished, keep)
        except BrokenWeightsError:
            discard(work)
            raise
    passes = None if goes_on else (time.perf_counter() - started) / sweep.seconds
    return Outcome(finished.files(), fits, request, calibration, before, after, passes)


@contextmanager
def memory_is_told() -> Iterator[None]:
    """Raises ValueError where memory is too small for what is fitted inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise ValueError(
            "The GPU's memory is too small for this refit: hide it with CUDA_VISIBLE_DEVICES= to compute on the CPU, "
            "and the same command goes on."
        ) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise ValueError(
            "This machine's memory is too small for this refit: give it fewer tokens, or --spill a folder for the "
            "activations, and the same command goes on."
        ) from None


def model_config(config: Mapping[str, Any]) -> RewiredLlamaConfig:
    """`config` as a model has it. Raises ValueError where that is none."""
    try:
        found = RewiredLlamaConfig.from_dict(dict(config))
        with torch.device("meta"):
            RewiredLlamaDecoderLayer(found, 0, *found.resolved_wiring.layers[0])
    except Exception as error:  # whatever a value of another kind makes of transformers' code
        raise ValueError(f"config.json describes no Llama that can be run ({error!r}).") from None
    return found


def load_text(config: Mapping[str, Any], source: Path, text: str, tokens: int) -> Calibration:
    """`tokens` tokens of `text` for the checkpoint in `source`. Raises ValueError where it has no tokenizer that loads,
    and for a text that cannot be used."""
    shape = model_config(wired_config(config, [], tp_shards=1))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # a broken file can raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{source} has no tokenizer that can be loaded, and a refit needs one: {reason}") from None
    found = load(text, tokenizer, tokens, shape.max_position_embeddings)
    if int(found.windows.max()) >= shape.vocab_size:
        raise ValueError(
            f"The tokenizer has tokens beyond the model's vocabulary of {shape.vocab_size}: is it its own?"
        )
    return found
