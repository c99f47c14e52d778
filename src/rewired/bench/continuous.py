"""What is timed of a model in transformers' continuous batching: requests that arrive together, by its own clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from .request import BenchRequest
from .runs import DECODE, PREFILL
from .timing import Run

_PAGE = 256  # tokens of a page of its cache


class Batches:
    """Runs of models on the requests of one prompt, [B, T]; the time of starting the engine does not count."""

    def __init__(self, first: Any, tokens: torch.Tensor, request: BenchRequest) -> None:
        self.prompts = tokens.tolist()
        length = tokens.shape[1] + request.new
        self.sampling = GenerationConfig(max_new_tokens=request.new, do_sample=False, eos_token_id=-1)
        # without limits it takes all memory that is free, for every rank
        self.limits = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=len(self.prompts) * math.ceil(length / _PAGE) + 1,
            max_batch_tokens=max(_PAGE, tokens.numel()),
        )

    def runs(self, model: Any) -> Iterator[Run]:
        yield lambda: self._generate(model)

    def _generate(self, model: Any) -> Mapping[str, float]:
        outputs = model.generate_batch(
            self.prompts,
            generation_config=self.sampling,
            continuous_batching_config=self.limits,
            record_timestamps=True,
            progress_bar=False,
        ).values()
        started = min(output.lifespan[0] for output in outputs)
        first, last = (max(output.timestamps[place] for output in outputs) for place in (0, -1))
        return {PREFILL: first - started, DECODE: (last - first) / (self.sampling.max_new_tokens - 1)}
