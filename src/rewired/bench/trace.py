"""A traced run, and what it tells of one rank: modules, matrix products, all-reduces, and waits for them.

The trace is PyTorch's, for Perfetto and chrome://tracing. On a CPU it holds what gloo's threads do; on a GPU, NCCL's
kernels, which are on a stream of their own.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from .contenders import NONE

ATTENTION, MLP = "attention", "MLP"

_KINDS = {"Attention": ATTENTION, "MLP": MLP}  # by the ends of classes' names
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::scaled_dot_product_attention")
# in the names of kernels: NCCL's, also of payloads; vLLM's and FlashInfer's; those of ranks that are emulated
_COLLECTIVES = ("nccl", "cross_device_reduce", "allreduce", "_hold")
_LAUNCH, _WAIT, _GLOO = "c10d::allreduce_", "_c10d_functional::wait_tensor", "gloo:all_reduce"

Event = dict[str, Any]  # of Chrome's format


def traced(run: Callable[[], None], file: Path) -> None:
    """Run under PyTorch's profiler, and write this rank's trace to `file`, which ends in .json.gz.

    Calls of attention and MLP modules are marked in it, unless they are compiled.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with _modules_marked(), profile(activities=activities) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))


@dataclass(frozen=True)
class Profile:
    """Where a prefill of so many sequences is traced to, by every contender on one link."""

    folder: Path
    batch: int

    def trace(self, models: Mapping[str, Any], tokens: torch.Tensor) -> None:
        """Run on every rank, which writes its own traces; `models` are by contender, and warm."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, model in models.items():
            if name != NONE:
                run = partial(model, tokens, logits_to_keep=1)
                run()
                distributed.barrier()
                traced(run, self.file(name, distributed.get_rank()))

    def draw(self, names: Iterable[str], title: str) -> Path:
        """Draw the first rank's timelines, next to the folder."""
        from .timeline import draw_timeline

        png = self.folder.parent / "timeline.png"
        draw_timeline({name: self.file(name, 0) for name in names if name != NONE}, png, title)
        return png

    def file(self, name: str, rank: int) -> Path:
        """Without the colon that a contender's name may have, and a file system may not."""
        return self.folder / f"{name.replace(':', '-')}.rank{rank}.json.gz"


@dataclass(frozen=True)
class Span:
    """Something with a name and a time, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TracedAllReduce:
    """Or another collective: when it is launched, when the ranks begin to exchange, when this rank has the sum; in µs.

    `module` launched it, as far as modules are marked.
    """

    launched: float
    start: float
    end: float
    module: str | None


@dataclass(frozen=True)
class RankTrace:
    """One rank's run, each in the order of time. On a GPU nothing says that it waits: its stream is idle."""

    modules: Sequence[Span]
    products: Sequence[Span]  # matrix products and attention; on a GPU, all kernels that compute
    all_reduces: Sequence[TracedAllReduce]
    waits: Sequence[Span]


def read(file: Path) -> RankTrace:
    """A trace of `traced`."""
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    return (_of_gpu if any(event.get("cat") == "kernel" for event in events) else _of_cpu)(events)


def _of_cpu(events: Sequence[Event]) -> RankTrace:
    """gloo works off a queue, in order: what it does first is what was launched first."""
    modules = _modules(events, "user_annotation")
    running = _named(events, _GLOO)
    launches = _named(events, _LAUNCH) if running else []  # without communication there are launches only
    all_reduces = [
        TracedAllReduce(launch.start, own.start, own.end, _launched_by(modules, launch.start))
        for launch, own in zip(launches, running, strict=True)
    ]
    return RankTrace(modules, _named(events, *_PRODUCTS), all_reduces, _named(events, _WAIT))


def _of_gpu(events: Sequence[Event]) -> RankTrace:
    """A collective's kernel starts when its stream comes to it; the CPU runs ahead, and its launches say nothing."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    collectives = [event for event in kernels if any(part in event["name"].lower() for part in _COLLECTIVES)]
    computing = [event for event in kernels if event not in collectives]
    streams = {event["tid"] for event in computing}
    modules = _modules([event for event in events if event["tid"] in streams], "gpu_user_annotation")
    all_reduces = [
        TracedAllReduce(span.start, span.start, span.end, _launched_by(modules, span.start))
        for span in map(_span, collectives)
    ]
    return RankTrace(modules, [_span(event) for event in computing], all_reduces, [])


def _modules(events: Sequence[Event], category: str) -> list[Span]:
    return [_span(event) for event in events if event.get("cat") == category and event["name"] in (ATTENTION, MLP)]


def _named(events: Sequence[Event], *names: str) -> list[Span]:
    return [_span(event) for event in events if event["name"] in names]


def _span(event: Event) -> Span:
    return Span(event["name"], event["ts"], event["ts"] + event["dur"])


def _launched_by(modules: Sequence[Span], time: float) -> str | None:
    """The last module that began before; the stock model's launch while they still run."""
    return next((module.name for module in reversed(modules) if module.start <= time), None)


@contextmanager
def _modules_marked() -> Iterator[None]:
    """While it lasts, every module whose class is an attention or an MLP records when it runs."""
    running: list[Any] = []

    def begin(module: nn.Module, args: Any) -> None:
        if kind := _kind(module):
            running.append(record_function(kind))
            running[-1].__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if _kind(module):
            running.pop().__exit__(None, None, None)

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kind(module: nn.Module) -> str | None:
    return next((kind for ending, kind in _KINDS.items() if type(module).__name__.endswith(ending)), None)
