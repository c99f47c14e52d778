"""The part of an evaluation that runs models, in this process or on several ranks: tasks, and divergences."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import logging

from rewired.divergence import Divergence, divergence
from rewired.progress import Progress, announce, is_first_rank
from rewired.ranks import free_memory, run_on_ranks
from rewired.text.tokenizer import load_tokenizer
from rewired.text.windows import windows_of

from . import answers, harness, retrieval, vllm_engine
from .models import Model, load_model
from .results import TaskResult
from .suites import Entry

_TIMEOUT_SECONDS = 1800.0  # of a collective: each rank scores the generations at its own pace
_CPU_BATCH, _GENERATION_BATCH = 8, 16
TRANSFORMERS, VLLM = "transformers", "vllm"


@dataclass(frozen=True)
class Runner:
    """Where and how models run. `batch_size` is a number, or `auto`: as many as fit, 16 to generate, 8 on a CPU.

    `engine` runs the tasks, for all models alike. Divergences need all logits, and always run in transformers.
    """

    device_type: str  # cpu or cuda
    ranks: int = 1
    dtype: str = "auto"
    batch_size: str = "auto"
    engine: str = TRANSFORMERS

    def with_dtype_of(self, folder: Path) -> Runner:
        """The same with `auto` resolved, so that all models run in one precision: float32 on a CPU, elsewhere that of
        the checkpoint in `folder`."""
        if self.dtype != "auto":
            return self
        on_cpu = self.device_type == "cpu"
        dtype = torch.float32 if on_cpu else AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype
        return replace(self, dtype=str(dtype or torch.bfloat16).removeprefix("torch."))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args, runner)` on every rank and return the first rank's result."""
        if self.ranks == 1 or (function is run_tasks and self.engine == VLLM):  # vLLM starts its ranks itself
            return function(*args, self)
        results = run_on_ranks(
            function, self.ranks, *args, self, device_type=self.device_type, timeout_seconds=_TIMEOUT_SECONDS
        )
        return results[0]

    def batch_size_for(self, generates: bool) -> int | str:
        if self.batch_size != "auto":
            return int(self.batch_size)
        # before it generates, the harness tries batches of the model's longest context: with 128 k tokens one fits
        return _CPU_BATCH if self.device_type == "cpu" else _GENERATION_BATCH if generates else "auto"


def run_tasks(
    model: Model,
    tokenizer_of: Model,
    pending: Mapping[Path, Entry],
    rows: Path | None,
    runs_code: bool,
    runner: Runner,
) -> None:
    """Run each task and write its answers to its file at once, so that an interrupted evaluation resumes with the next.

    Prompts are tokenised as for `tokenizer_of`: the model's own tokenizer may add a BOS where another one does not.
    """
    free_memory()
    tasks = {file: harness.load_task(entry, rows, runs_code) for file, entry in pending.items()}
    with _asked(model, tokenizer_of, runner) as askable:
        for number, (file, task) in enumerate(tasks.items(), start=1):
            announce(f"{model.name}: {task.entry.title} ({number} of {len(pending)})")
            with _explain_oom():
                logs = harness.run_task(askable(task), task, runs_code)
            if is_first_rank():
                answers.write(file, logs)


def compare(models: Sequence[Model], text: str, tokens: int, window: int, runner: Runner) -> dict[str, Divergence]:
    """Each other model against the first, on the first `tokens` of `text`; two models are in memory at a time."""
    original, *others = models
    windows = windows_of(text, load_tokenizer(original.folder), window, tokens)
    loaded_original = _load(original, runner)
    divergences = {}
    for other in others:
        loaded = _load(other, runner)
        with _explain_oom(), Progress(f"{other.name}: divergence of window", len(windows)) as progress:
            compared = divergence(_logits(loaded_original), _logits(loaded), windows, progress.advance)
        divergences[other.name] = compared
        del loaded
        free_memory()
    return divergences


def retrieve(models: Sequence[Model], lengths: Sequence[int], runner: Runner) -> list[TaskResult]:
    """What each model finds again in long texts, the original first; one model is in memory at a time."""
    items = retrieval.items_of(load_tokenizer(models[0].folder), lengths)
    right = {}
    for model in models:
        with _explain_oom():
            right[model.name] = retrieval.answers(_load(model, runner), items, model.name)
        free_memory()
    return retrieval.compiled(items, right)


@contextmanager
def _asked(model: Model, tokenizer_of: Model, runner: Runner) -> Iterator[Callable[[harness.Task], Any]]:
    """The model as the harness asks it, for each task."""
    if runner.engine == VLLM:
        with vllm_engine.askable(model, tokenizer_of, runner.dtype, runner.ranks, runner.batch_size) as asked:
            yield lambda task: asked
        return
    tokenizer, loaded = load_tokenizer(tokenizer_of.folder), _load(model, runner)

    def askable(task: harness.Task) -> Any:
        generates = any(of_harness.OUTPUT_TYPE == "generate_until" for of_harness in task.loaded.values())
        return harness.askable(loaded, tokenizer, runner.batch_size_for(generates))

    yield askable


def _logits(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda input_ids: model(input_ids.to(model.device), use_cache=False).logits


def _load(model: Model, runner: Runner) -> Any:
    if not is_first_rank():  # all ranks do the same, and the first one prints
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the rank ends
    logging.disable_progress_bar()
    return load_model(model, runner.dtype, runner.device_type, runner.ranks)


@contextmanager
def _explain_oom() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise ValueError(
            "The GPU's memory is too small for this: take a smaller --batch-size, or more ranks with --tp."
        ) from None
