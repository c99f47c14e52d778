"""The refit itself: one walk over the layers, each module fitted on the stream that the refitted ones before it made.

Three models take every step together, a layer of each in memory: the original, the refitted one and, on held-out
tokens, the one that conversion alone gives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch.nn.functional import linear, rms_norm

from rewired.divergence import Divergence, divergence
from rewired.families import classes
from rewired.model.configuration import RewiredConfig
from rewired.model.residual_stream import ResidualStream
from rewired.model.sharding import Shards
from rewired.model.wiring import Wiring

from .activations import on_device, on_host
from .calibration import Calibration
from .fitting import TEACHER_SHARE, Batch, Fit, fit_gain, fit_input, fit_output
from .refit_module import RefitModule
from .weights import Finished, FinishedLayer, Layers, Weights

_BATCH = 4096  # tokens that run together


class BrokenWeightsError(ValueError):
    """A checkpoint computes NaN or infinity."""


class Sweep:
    """A refit of all rewired layers of `config` on `calibration`, from the original's `weights`.

    `gains` and `matrices` say what is fitted. Fitted weights are rounded to the dtype that they will be stored in,
    `dtype` or, where that is None, the source's, before the next module is fitted on their outputs.
    `seconds` is how long the original takes for all tokens, its head left out.
    """

    def __init__(
        self,
        config: RewiredConfig,
        weights: Weights,
        calibration: Calibration,
        dtype: str | None,
        gains: bool,
        matrices: bool,
    ) -> None:
        self.config, self.weights, self.calibration = config, weights, calibration
        self.layers = Layers(config, weights, getattr(torch, dtype) if dtype else None)
        self.gains, self.matrices = gains, matrices
        self.device = weights.device
        self.tokens = sum(texts.numel() for held_out in (False, True) for texts in calibration.texts(held_out))
        self.seconds = 0.0
        config._attn_implementation = "sdpa"
        self.dense_wirings = Wiring.dense(config.num_hidden_layers, config.hidden_size).layers
        self.wirings = config.resolved_wiring.layers
        self.shards = Shards(config.tp_shards, config.tp_shards)
        positions = torch.arange(calibration.windows.shape[1], device=self.device)[None]
        like = torch.empty(1, device=self.device)
        self.position_embeddings = _rotary_embedding(config).to(self.device)(like, positions)

    @torch.no_grad()
    def run(self, finished: Finished, on_layer: Callable[[int, int, list[Fit]], None]) -> tuple[Divergence, Divergence]:
        """Refit layer after layer into `finished`; returns how far from the original conversion alone is, and the
        refit.

        Raises BrokenWeightsError where these are not finite.
        """
        batches = self.start()
        fitted = [index for index in range(self.config.num_hidden_layers) if any(self._fits(index))]
        for index in range(self.config.num_hidden_layers):
            fits = list[Fit]()
            if index > fitted[-1]:  # nothing is left to fit
                batches = [batch for batch in batches if batch.is_measured]
            if index < fitted[0]:
                self.pass_layer(index, batches)
                _check_finite(index, batches, {})
            else:
                known = finished.read(index)
                changed, fits = self.fit_layer(index, batches, known)
                _check_finite(index, batches, changed)
                if known is None:
                    finished.write(index, changed, fits)
            on_layer(index, self.config.num_hidden_layers, fits)
        measured = [batch for batch in batches if batch.is_measured]
        originals = [batch.original for batch in measured]
        streams = [[getattr(batch, name) for batch in measured] for name in ("converted", "refitted")]
        converted, refitted = (self.divergence(originals, map(self.total, each)) for each in streams)
        if not all(math.isfinite(each.kl) for each in (converted, refitted)):
            raise BrokenWeightsError("The model gives no finite KL: are the checkpoint's weights whole?")
        return converted, refitted

    def start(self) -> list[Batch]:
        """All texts before the first layer."""
        family = self.config.family
        table = self.weights.tensor(f"{family.in_base(family.embedding)}.weight")
        batches = []
        for held_out in (False, True):
            for texts in self.calibration.texts(held_out):  # [W, T]
                for part in texts.split(max(_BATCH // texts.shape[1], 1)):
                    embedded = on_host(table[part.to(self.device)])
                    batches.append(Batch.start(ResidualStream(embedded), embedded, held_out))
        return batches

    @torch.no_grad()
    def pass_layer(self, index: int, batches: list[Batch]) -> None:
        """Layer `index`, which computes what the original's does, where all models are still the same.

        What it writes last stays in flight: a rewired layer that follows may not wait for it.
        """
        layer = self.layers.build(index, self.wirings[index], self.weights.layer(index))
        started = self._now()
        for number, batch in enumerate(batches):
            stream = batch.refitted
            for module in RefitModule.all_of(layer):
                stream = self._step(module, stream)
            total = on_host(stream.total(layer.shards))
            batches[number] = Batch.start(on_host(stream), total, batch.held_out)
        self.seconds += self._now() - started

    @torch.no_grad()
    def fit_layer(
        self, index: int, batches: Sequence[Batch], known: FinishedLayer | None = None
    ) -> tuple[dict[str, torch.Tensor], list[Fit]]:
        """Layer `index` fitted, or as it is `known`: its tensors that changed, and how well each module fits."""
        source = self.weights.layer(index)
        both = (self.dense_wirings, self.wirings)
        original, converted = (self.layers.build(index, wirings[index], source) for wirings in both)
        start = source | _to(known.tensors, self.device) if known else source
        start = {name: tensor.clone() for name, tensor in start.items()}
        refitted = self.layers.build(index, self.wirings[index], start)
        fits = list(known.fits) if known else []
        round_weights = partial(self.layers.round, index, refitted)
        modules = zip(*map(RefitModule.all_of, (original, converted, refitted)), self._fits(index), strict=True)
        for of_original, of_converted, module, fits_it in modules:
            self._step_original(of_original, batches)
            self._step_converted(of_converted, batches)
            fits += self._step_refitted(index, module, batches, round_weights, known is None and fits_it)
        return self.layers.changed(index, refitted, source), fits

    @torch.no_grad()
    def advance(self, index: int, streams: Sequence[ResidualStream]) -> list[ResidualStream]:
        """`streams` after layer `index`, as the original has it."""
        layer = self.layers.build(index, self.dense_wirings[index], self.weights.layer(index))
        for module in RefitModule.all_of(layer):
            streams = [on_host(self._step(module, stream)) for stream in streams]
        return list(streams)

    def total(self, stream: ResidualStream) -> torch.Tensor:
        """All that was contributed to `stream`, [B, T, H]."""
        return on_host(on_device(stream, self.device).total(self.shards))

    def _fits(self, index: int) -> list[bool]:
        """Whether the attention of layer `index` is fitted, and whether its MLP is."""
        return [wiring.is_rewired for wiring in self.wirings[index]]

    def _step_original(self, module: RefitModule, batches: Sequence[Batch]) -> None:
        started = self._now()
        for batch in batches:
            stream = self._step(module, ResidualStream(batch.original))
            batch.original = on_host(stream.total(module.shards))
        tokens = sum(batch.original.shape[:2].numel() for batch in batches)
        self.seconds += (self._now() - started) * self.tokens / tokens

    def _step_converted(self, module: RefitModule, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if batch.converted is not None:
                batch.converted = on_host(self._step(module, batch.converted))

    def _step(self, module: RefitModule, stream: ResidualStream) -> ResidualStream:
        view, stream = module.read(on_device(stream, self.device))
        return module.write(stream, self.hidden(module, view))

    def hidden(self, module: RefitModule, view: torch.Tensor) -> torch.Tensor:
        """The input of the module's last projection, [B, T, A], from its view, [B, T, H] or [r, B, T, H]."""
        return module.hidden(view, tuple(part[:, : view.shape[-2]] for part in self.position_embeddings))

    def _step_refitted(
        self,
        index: int,
        module: RefitModule,
        batches: Sequence[Batch],
        round_weights: Callable[[], None],
        is_fitted: bool,
    ) -> list[Fit]:
        """The module's fit if there is one: gain, input and output, each on streams that the one before it makes."""
        gain = inputs = placement = output = None
        if is_fitted and self.gains and module.gain is not None:
            gain = fit_gain(module, batches, self.device)
        if is_fitted and self.matrices and module.wiring.lacks_something:
            inputs, placement = fit_input(module, batches, self.device)
        round_weights()
        hidden = []
        for batch in batches:
            view, _ = module.read(on_device(batch.refitted, self.device))
            hidden.append(on_host(self.hidden(module, view)))
        if is_fitted and self.matrices:
            output = fit_output(module, hidden, batches, self.device)
            round_weights()
        for batch, own in zip(batches, hidden, strict=True):
            _, stream = module.read(on_device(batch.refitted, self.device))
            written = module.write(stream, own.to(self.device))
            if not batch.held_out:
                written = self._towards_teacher(module, written, batch.original)
            batch.refitted = on_host(written)
        fit = Fit(index, "MLP" if module.is_mlp else "attention", gain, inputs, placement, output)
        return [fit] if gain or inputs or output else []

    def _towards_teacher(self, module: RefitModule, stream: ResidualStream, original: torch.Tensor) -> ResidualStream:
        """`stream` as the next module is fitted on it: a little closer to the original's, [B, T, H].

        Many modules in a row are fitted on what those before them leave of the same tokens, and overfit it: so each
        corrects what the last ones have missed, rather than all that was ever missed.
        """
        missing = original.to(self.device) - module.total(stream)
        return stream._replace(settled=stream.settled + TEACHER_SHARE * missing)

    @torch.no_grad()
    def divergence(self, originals: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> Divergence:
        """On the held-out windows: of the head's predictions from `others` to those from `originals`."""
        family = self.config.family
        head = family.head  # of a tied one, too, transformers reads what is stored
        if f"{head}.weight" not in self.weights.files:
            head = family.in_base(family.embedding)
        norm, matrix = (self.weights.tensor(f"{name}.weight") for name in (family.in_base(family.last_norm), head))

        def logits(totals: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
            states = (window for total in totals for window in total)

            def next_window(_: torch.Tensor) -> torch.Tensor:
                normalised = rms_norm(next(states).to(self.device), norm.shape, norm, self.config.rms_norm_eps)
                return linear(normalised, matrix)[None]

            return next_window

        windows = self.calibration.windows[torch.tensor(self.calibration.held_out)]
        return divergence(logits(originals), logits(others), windows)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _rotary_embedding(config: RewiredConfig) -> torch.nn.Module:
    """That of a model of this `config`, with its buffers."""
    with torch.device("meta"):
        rotary = classes(config.family, "Model")(config).rotary_emb
    return type(rotary)(config)


def _check_finite(index: int, batches: Sequence[Batch], changed: dict[str, torch.Tensor]) -> None:
    if not all(bool(batch.original.isfinite().all()) for batch in batches):
        raise BrokenWeightsError(
            f"The original's layer {index} gives no finite numbers: are the checkpoint's weights whole?"
        )
    if not all(bool(tensor.isfinite().all()) for tensor in changed.values()):
        raise BrokenWeightsError(
            f"Layer {index} holds numbers that are too large for what it is stored in: convert with --dtype bfloat16."
        )


def _to(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
