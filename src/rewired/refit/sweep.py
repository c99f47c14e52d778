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
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rewired.evaluate.divergence import Divergence, divergence
from rewired.model.configuration_rewired_llama import RewiredLlamaConfig
from rewired.model.modeling_rewired_llama import RewiredLlamaDecoderLayer
from rewired.model.residual_stream import PeekGain, ResidualStream
from rewired.model.sharding import Shards
from rewired.model.wiring import ModuleWiring, Wiring

from .calibration import Calibration
from .fitting import PULL, Batch, Fit, fit_gain, fit_input, fit_output
from .half import Half
from .shelf import Shelf, on_device
from .weights import Finished, FinishedLayer, Weights

_BATCH = 4096  # tokens that run together


class BrokenWeightsError(ValueError):
    """A checkpoint computes something that is no number."""


class Sweep:
    """A refit of all rewired layers of `config` on `calibration`, from the original's `weights`.

    `gains` and `matrices` say what is fitted. Fitted weights are rounded to what they will be stored in, `dtype` or,
    where that is None, what the source has them in, before the next module is fitted on what they make. `seconds` is
    how long the original takes for all tokens, its head left out.
    """

    def __init__(
        self,
        config: RewiredLlamaConfig,
        weights: Weights,
        calibration: Calibration,
        dtype: str | None,
        shelf: Shelf,
        gains: bool,
        matrices: bool,
    ) -> None:
        self.config, self.weights, self.calibration = config, weights, calibration
        self.dtype = getattr(torch, dtype) if dtype else None
        self.shelf, self.gains, self.matrices = shelf, gains, matrices
        self.device = weights.device
        self.tokens = sum(texts.numel() for held_out in (False, True) for texts in calibration.texts(held_out))
        self.seconds = 0.0
        config._attn_implementation = "sdpa"
        self.dense = Wiring.dense(config.num_hidden_layers, config.hidden_size).layers
        self.own = config.resolved_wiring.layers
        self.shards = Shards(config.tp_shards, config.tp_shards)
        positions = torch.arange(calibration.windows.shape[1], device=self.device)[None]
        like = torch.empty(1, device=self.device)
        self.position_embeddings = LlamaRotaryEmbedding(config).to(self.device)(like, positions)

    @torch.no_grad()
    def run(self, finished: Finished, on_layer: Callable[[int, int, list[Fit]], None]) -> tuple[Divergence, Divergence]:
        """Refit layer after layer into `finished`; how far from the original conversion alone is, and the refit.

        Raises BrokenWeightsError where these are no numbers.
        """
        batches = self.start()
        rewired = [index for index, halves in enumerate(self.own) if any(half.is_rewired for half in halves)]
        for index in range(self.config.num_hidden_layers):
            fits = list[Fit]()
            if index > rewired[-1]:  # nothing is fitted any more
                batches = [batch for batch in batches if batch.is_measured]
            if index < rewired[0]:
                self.pass_layer(index, batches)
                _check_finite(index, batches, {})
            else:
                known = finished.read(index)
                changed, fits = self.fit_layer(index, batches, known)
                _check_finite(index, batches, changed)
                if known is None:
                    finished.write(index, changed, fits)
            on_layer(index, self.config.num_hidden_layers, fits)
        judging = [batch for batch in batches if batch.is_measured]
        originals = [batch.original for batch in judging]
        streams = [[getattr(batch, name) for batch in judging] for name in ("converted", "refitted")]
        converted, refitted = (self.divergence(originals, map(self.total, each)) for each in streams)
        if not all(math.isfinite(found.kl) for found in (converted, refitted)):
            raise BrokenWeightsError("The model gives no finite KL: are the checkpoint's weights whole?")
        return converted, refitted

    def start(self) -> list[Batch]:
        """All texts before the first layer."""
        table = self.weights.tensor("model.embed_tokens.weight")
        batches = []
        for held_out in (False, True):
            for texts in self.calibration.texts(held_out):  # [W, T]
                for part in texts.split(max(_BATCH // texts.shape[1], 1)):
                    embedded = self.shelf.put(table[part.to(self.device)])
                    batches.append(Batch.start(ResidualStream(embedded), embedded, held_out))
        return batches

    @torch.no_grad()
    def pass_layer(self, index: int, batches: list[Batch]) -> None:
        """Layer `index`, which computes what the original's does, where all models are still the same.

        What it writes last stays in flight: a rewired layer that follows may not wait for it.
        """
        layer = self._layer(index, self.own[index], self.weights.layer(index))
        started = self._now()
        for number, batch in enumerate(batches):
            stream = batch.refitted
            for is_mlp in (False, True):
                stream = self._step(Half(layer, is_mlp), stream)
            total = self.shelf.put(stream.total(layer.shards))
            batches[number] = Batch.start(self.shelf.put_stream(stream), total, batch.held_out)
        self.seconds += self._now() - started

    @torch.no_grad()
    def fit_layer(
        self, index: int, batches: Sequence[Batch], known: FinishedLayer | None = None
    ) -> tuple[dict[str, torch.Tensor], list[Fit]]:
        """Layer `index` fitted, or as it is `known`: its tensors that changed, and how well each module fits."""
        source = self.weights.layer(index)
        original, converted = (self._layer(index, wirings[index], source) for wirings in (self.dense, self.own))
        start = source | (_to(known.tensors, self.device) if known else {})
        refitted = self._layer(index, self.own[index], {name: tensor.clone() for name, tensor in start.items()})
        fits = list(known.fits) if known else []
        for is_mlp in (False, True):
            self._step_original(Half(original, is_mlp), batches)
            self._step_converted(Half(converted, is_mlp), batches)
            half = Half(refitted, is_mlp)
            round_weights = partial(self._round, index, refitted)
            fits += self._step_refitted(index, half, batches, round_weights, is_known=known is not None)
        return self._changed(index, refitted, source), fits

    @torch.no_grad()
    def advance(self, index: int, streams: Sequence[ResidualStream]) -> list[ResidualStream]:
        """`streams` after layer `index`, as the original has it."""
        layer = self._layer(index, self.dense[index], self.weights.layer(index))
        for is_mlp in (False, True):
            streams = [self.shelf.put_stream(self._step(Half(layer, is_mlp), stream)) for stream in streams]
        return list(streams)

    def total(self, stream: ResidualStream) -> torch.Tensor:
        """All that was contributed to `stream`, [B, T, H]."""
        return self.shelf.put(on_device(stream, self.device).total(self.shards))

    def _layer(
        self, index: int, wirings: tuple[ModuleWiring, ModuleWiring], tensors: dict[str, torch.Tensor]
    ) -> RewiredLlamaDecoderLayer:
        with torch.device("meta"):
            layer = RewiredLlamaDecoderLayer(self.config, index, *wirings)
        wanted = layer.state_dict().keys()
        tensors = {name: tensor for name, tensor in (self._gains(layer) | tensors).items() if name in wanted}
        layer.load_state_dict(tensors, assign=True)
        return layer.requires_grad_(False).eval()

    def _gains(self, layer: RewiredLlamaDecoderLayer) -> dict[str, torch.Tensor]:
        """Where the source has none: what a model begins with."""
        shape = (self.config.tp_shards, self.config.hidden_size)
        gains = {name: gain for name, gain in layer.named_modules() if isinstance(gain, PeekGain)}
        return {f"{name}.weight": torch.full(shape, gain.initial, device=self.device) for name, gain in gains.items()}

    def _step_original(self, half: Half, batches: Sequence[Batch]) -> None:
        started = self._now()
        for batch in batches:
            stream = self._step(half, ResidualStream(batch.original))
            batch.original = self.shelf.put(stream.total(half.shards))
        tokens = sum(batch.original.shape[:2].numel() for batch in batches)
        self.seconds += (self._now() - started) * self.tokens / tokens

    def _step_converted(self, half: Half, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if batch.converted is not None:
                batch.converted = self.shelf.put_stream(self._step(half, batch.converted))

    def _step(self, half: Half, stream: ResidualStream) -> ResidualStream:
        view, stream = half.read(on_device(stream, self.device))
        return half.write(stream, self._hidden(half, view))

    def _hidden(self, half: Half, view: torch.Tensor) -> torch.Tensor:
        return half.hidden(view, tuple(part[:, : view.shape[-2]] for part in self.position_embeddings))

    def _step_refitted(
        self, index: int, half: Half, batches: Sequence[Batch], round_weights: Callable[[], None], is_known: bool
    ) -> list[Fit]:
        """The module's fit if there is one; gains, inputs and outputs, each on what the ones before it make."""
        gain = inputs = placement = output = None
        is_fitted = half.wiring.is_rewired and not is_known
        if is_fitted and self.gains and half.gain is not None:
            gain = fit_gain(half, batches, self.device)
        if is_fitted and self.matrices and half.wiring.lacks_something:
            inputs, placement = fit_input(half, batches, self.device)
        round_weights()
        hidden = []
        for batch in batches:
            view, _ = half.read(on_device(batch.refitted, self.device))
            hidden.append(self.shelf.put(self._hidden(half, view)))
        if is_fitted and self.matrices:
            output = fit_output(half, hidden, batches, self.device)
            round_weights()
        for batch, own in zip(batches, hidden, strict=True):
            _, stream = half.read(on_device(batch.refitted, self.device))
            written = half.write(stream, own.to(self.device))
            batch.refitted = self.shelf.put_stream(written if batch.held_out else self._drawn(written, batch.original))
        found = Fit(index, "MLP" if half.is_mlp else "attention", gain, inputs, placement, output)
        return [found] if gain or inputs or output else []

    def _drawn(self, stream: ResidualStream, original: torch.Tensor) -> ResidualStream:
        """`stream` as the next module is fitted on it: a little closer to the original's, [B, T, H].

        Many modules in a row are fitted on what those before them leave of the same tokens, and overfit it: so each
        mends what the last ones have missed, rather than all that was ever missed.
        """
        missing = original.to(self.device) - stream.total(self.shards)
        return stream._replace(settled=stream.settled + PULL * missing)

    def _round(self, index: int, layer: RewiredLlamaDecoderLayer) -> None:
        for name, parameter in layer.named_parameters():
            parameter.copy_(parameter.to(self._stored(index, name)))

    def _changed(
        self, index: int, layer: RewiredLlamaDecoderLayer, source: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What has to be written: the tensors of `layer` that differ from the source's, in the dtype to store."""
        before = self._gains(layer) | source
        return {
            name: tensor.to(self._stored(index, name))
            for name, tensor in layer.state_dict().items()
            if not torch.equal(tensor, before[name])
        }

    def _stored(self, index: int, name: str) -> torch.dtype:
        """What a tensor of layer `index` is stored in; a new gain as the layer's matrices are."""
        names = (name, "mlp.down_proj.weight")
        return self.dtype or next(dtype for name in names if (dtype := self.weights.dtype(index, name)))

    @torch.no_grad()
    def divergence(self, originals: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> Divergence:
        """On the windows that judge, of what the model's head makes of `others` from what it makes of `originals`."""
        norm, head = (self.weights.tensor(name) for name in ("model.norm.weight", self._head()))

        def logits(totals: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
            states = (window for total in totals for window in total)

            def next_window(_: torch.Tensor) -> torch.Tensor:
                normalised = rms_norm(next(states).to(self.device), norm.shape, norm, self.config.rms_norm_eps)
                return linear(normalised, head)[None]

            return next_window

        windows = self.calibration.windows[torch.tensor(self.calibration.held_out)]
        return divergence(logits(originals), logits(others), windows)

    def _head(self) -> str:
        return "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


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
