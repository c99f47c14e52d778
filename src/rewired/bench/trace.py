"""Traces of prefills by PyTorch's profiler, for Perfetto and chrome://tracing.

On a CPU a trace holds what gloo's threads do; on a GPU, NCCL's kernels, which are on a stream of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from .contenders import NONE

_MARKED = ("Attention", "MLP")  # ends of classes' names


def trace_prefills(models: Mapping[str, Any], tokens: torch.Tensor, folder: Path) -> None:
    """Run on every rank, which writes its own traces into `folder`; `models` are by contender, and warm."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        if name != NONE:
            run = partial(model, tokens, logits_to_keep=1)
            run()
            distributed.barrier()
            in_files = re.sub("[:/]", "-", name)
            traced(run, folder / f"{in_files}.rank{distributed.get_rank()}.json.gz")


def traced(run: Callable[[], None], file: Path) -> None:
    """Run under PyTorch's profiler, and write this rank's trace to `file`, which ends in .json.gz.

    Calls of attention and MLP modules are marked in it by their classes' names.
    """
    running: list[Any] = []

    def begin(module: nn.Module, args: Any) -> None:
        if type(module).__name__.endswith(_MARKED):
            running.append(record_function(type(module).__name__))
            running[-1].__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if type(module).__name__.endswith(_MARKED):
            running.pop().__exit__(None, None, None)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with (
        profile(activities=activities) as profiler,
        register_module_forward_pre_hook(begin),
        register_module_forward_hook(end),
    ):
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
