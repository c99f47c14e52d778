"""Benchmarks whose answers are programs: Hugging Face's metric `code_eval`, computed in our sandbox (`sandbox.py`)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from statistics import mean
from typing import Any

from .sandbox import Outcome, run_program


@contextmanager
def sandbox_for_code_eval() -> Iterator[None]:
    """Within it, `evaluate.load("code_eval")` of Hugging Face's package returns our sandbox.

    The harness's tasks that run code (HumanEval, MBPP, ...) load that metric while their modules are imported, with no
    setting for another. It is a script from the hub, which runs programs next to us and guards against little. So the
    function is replaced while tasks load, here and nowhere else.
    """
    hugging_face_evaluate: Any = import_module("evaluate")  # `import evaluate` would be this folder to mypy
    load, metric = hugging_face_evaluate.load, CodeEval(runs=False)

    def load_or_sandbox(name: str, *args: Any, **options: Any) -> Any:
        return metric if name == "code_eval" else load(name, *args, **options)

    hugging_face_evaluate.load = load_or_sandbox
    try:
        yield
    finally:
        hugging_face_evaluate.load, metric.runs = load, True


@dataclass
class CodeEval:
    """Hugging Face's metric `code_eval`, computed in our sandbox.

    Tasks try it out while they load, which needs no sandbox: until it `runs`, it gives no scores.
    """

    runs: bool = True

    def compute(
        self, references: list[str], predictions: list[list[str]], k: list[int]
    ) -> tuple[dict[str, float], dict[int, list[Outcome]]]:
        """pass@k, averaged over the problems, and the outcomes of each problem's programs.

        A reference is the test that the candidates of its problem must pass. A k above the smallest number of
        candidates is left out.
        """
        if not self.runs:
            return {}, {}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            outcomes = {
                problem: list(pool.map(run_program, [f"{candidate}\n{test}" for candidate in candidates]))
                for problem, (test, candidates) in enumerate(zip(references, predictions, strict=True))
            }
        counts = [(len(row), sum(outcome.passed for outcome in row)) for row in outcomes.values()]
        possible = [size for size in k if all(candidates >= size for candidates, _ in counts)]
        return {f"pass@{size}": mean(pass_at_k(*each, size) for each in counts) for size in possible}, outcomes


def pass_at_k(candidates: int, passing: int, k: int) -> float:
    """The probability that one of k candidates, drawn without replacement, passes (arXiv 2107.03374, equation 1)."""
    return 1 - math.comb(candidates - passing, k) / math.comb(candidates, k)
