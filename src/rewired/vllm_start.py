"""vLLM as the engine of a command: whether it is installed, and what it refuses, in one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from .extras import needs


def vllm_version() -> str:
    """Of the package `vllm`, for a command with `--engine vllm`. Raises ValueError where it is not installed."""
    with needs("vllm", "--engine vllm"):
        return version("vllm")


@contextmanager
def starting(model: str) -> Iterator[None]:
    """Start vLLM inside, without its page of log; what it refuses of `model` becomes a ValueError of one sentence."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        problems = error.errors() if hasattr(error, "errors") else []  # pydantic's
        reason = problems[0]["msg"].removeprefix("Value error, ") if problems else str(error).strip()
        raise ValueError(f"vLLM cannot run {model}: {(reason or type(error).__name__).splitlines()[0]}") from error
