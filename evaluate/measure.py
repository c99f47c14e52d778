"""Models at work, in this process or on several ranks: they answer tasks, and their predictions are compared."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoConfig
from transformers.utils import logging

from rewired.ranks import run_on_ranks
from rewired.text.windows import windows_of

from . import answers, harness
from .divergence import Divergence, divergence
from .models import Model, load_model, load_tokenizer
from .suites import Entry

_TIMEOUT_SECONDS = 1800.0  # of a collective: ranks score what they generated at their own pace
_CPU_BATCH, _GENERATION_BATCH = 8, 16
WINDOW = 512  # tokens


@dataclass(frozen=True)
class Machine:
    """How models run. `batch_size` is a number, or `auto`: what fits; 16 to generate; 8 on a CPU."""

    device_type: str  # cpu or cuda
    ranks: int = 1
    dtype: str = "auto"
    batch_size: str = "auto"

    @property
    def weights_dtype(self) -> str:
        """`auto` is float32 on a CPU, and else the checkpoint's."""
        return "float32" if self.dtype == "auto" and self.device_type == "cpu" else self.dtype

    def with_dtype_of(self, folder: Path) -> Machine:
        """All models run in the precision of one: `auto` is its checkpoint's, on a CPU float32."""
        if self.dtype != "auto" or self.device_type == "cpu":
            return self
        dtype = AutoConfig.from_pretrained(folder).dtype
        return replace(self, dtype=str(dtype or torch.bfloat16).removeprefix("torch."))

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args, machine)` on every rank; the first one's result."""
        if self.ranks == 1:
            return function(*args, self)
        ranks = (function, self.ranks, *args, self)
        return run_on_ranks(*ranks, device_type=self.device_type, timeout_seconds=_TIMEOUT_SECONDS)[0]

    def batch_size_for(self, generates: bool) -> int | str:
        if self.batch_size != "auto":
            return int(self.batch_size)
        # the harness tries batches of a model's longest context before it generates, which for 128 k tokens is 1
        return _CPU_BATCH if self.device_type == "cpu" else _GENERATION_BATCH if generates else "auto"


@dataclass(frozen=True)
class Question:
    """A task to ask, and the file for the answers."""

    entry: Entry
    file: Path


def ask(
    model: Model,
    tokenizer_of: Model,
    questions: Sequence[Question],
    rows: Path | None,
    runs_code: bool,
    machine: Machine,
) -> None:
    """Ask each question and keep its answers at once, so that an interrupted run goes on with the next.

    The prompts are tokenised as for `tokenizer_of`: a model's own tokenizer may add a BOS where another's does not.
    """
    _free_memory()
    tasks = harness.load_tasks([question.entry for question in questions], rows, runs_code)
    tokenizer, loaded = load_tokenizer(tokenizer_of), _load(model, machine)
    for number, (question, task) in enumerate(zip(questions, tasks, strict=True), start=1):
        _say(f"{model.name}: {question.entry.title} ({number} of {len(questions)})")
        generates = any(asked.OUTPUT_TYPE == "generate_until" for asked in task.loaded.values())
        with _enough_memory():
            logs = harness.ask(loaded, tokenizer, task, machine.batch_size_for(generates), runs_code)
        if _is_first_rank():
            answers.write(question.file, logs)


def compare(original: Model, others: Sequence[Model], text: str, tokens: int, machine: Machine) -> list[Divergence]:
    """Each of `others` against `original` on the first `tokens` of `text`; two models are in memory at a time."""
    windows = windows_of(text, load_tokenizer(original), WINDOW, tokens)
    first = _load(original, machine)
    found = []
    for other in others:
        second = _load(other, machine)
        with _enough_memory(), _bar(f"{other.name}: divergence", len(windows)) as advance:
            found.append(divergence(_logits(first), _logits(second), windows, advance))
        del second
        _free_memory()
    return found


def _logits(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda input_ids: model(input_ids.to(model.device), use_cache=False).logits


def _load(model: Model, machine: Machine) -> Any:
    if not _is_first_rank():  # every rank does the same, one speaks
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the rank ends
    logging.disable_progress_bar()
    return load_model(model, machine.weights_dtype, machine.device_type, machine.ranks)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _say(sentence: str) -> None:
    if _is_first_rank():
        print(sentence, file=sys.stderr, flush=True)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    with Progress(console=Console(stderr=True), transient=True, disable=not _is_first_rank()) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise ValueError(
            "The GPU's memory is too small for this: take a smaller --batch-size, or more ranks with --tp."
        ) from None
