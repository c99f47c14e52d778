"""`evaluate` against lm-evaluation-harness called directly, on the same tasks, rows and model.

    .venv/bin/python benchmarks/bench_evaluate.py --data DIR --write

`rewired data fetch benchmarks DIR` fills DIR. Both run SmolLM2-135M-Instruct on the first items of the quick suite's
tasks with the same batch size: the harness all tasks in one call, ours one after another, each written to disk. They
are timed in turns (A B, B A, A B, ...), and the figure is the median of the pairs' ratios. Both must give the same
values.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from paired import interleaved, milliseconds, speed
from transformers.utils import logging

from rewired.evaluate import answers, harness
from rewired.evaluate.metrics import Metric
from rewired.evaluate.models import load_model, load_tokenizer, open_model
from rewired.evaluate.suites import choose, load_suite

RESULT = Path(__file__).resolve().parents[1] / "results" / "bench-evaluate.md"
BATCH_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24, help="items of each task")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULT.name}")
    args = parser.parse_args()
    logging.disable_progress_bar()

    opened = open_model("smollm2-135m")
    model, tokenizer = load_model(opened, "float32", "cpu", 1), load_tokenizer(opened)
    tasks = harness.load_tasks(choose(load_suite("quick"), (), args.limit), args.data, False)
    values: dict[str, dict[str, float]] = {}

    def direct() -> None:
        values["direct"] = run_harness(model, tokenizer, tasks, args.limit)

    def ours() -> None:
        values["ours"] = run_ours(model, tokenizer, tasks)

    pairs = interleaved(direct, ours, args.pairs)
    assert values["ours"] == values["direct"], values
    text = _TEXT.format(
        command=shlex.join(["python", *sys.argv]),
        tasks=", ".join(task.entry.task for task in tasks),
        limit=args.limit,
        pairs=args.pairs,
        speed=speed(pairs),
        milliseconds=milliseconds(pairs),
    )
    print(text)
    if args.write:
        RESULT.write_text(text)


def run_harness(model: Any, tokenizer: Any, tasks: Sequence[harness.Task], limit: int) -> dict[str, float]:
    """Each task's value, as lm-eval reports it."""
    results: Any = simple_evaluate(
        HFLM(model, tokenizer=tokenizer, batch_size=BATCH_SIZE),
        tasks=[task.loaded[task.entry.task] for task in tasks],
        limit=limit,
        task_manager=harness._manager(harness._OURS),
        bootstrap_iters=0,
    )
    return {task.entry.task: results["results"][task.entry.task][f"{_metric(task).name},none"] for task in tasks}


def run_ours(model: Any, tokenizer: Any, tasks: Sequence[harness.Task]) -> dict[str, float]:
    """Each task's value from our logs, which are written to disk."""
    values = {}
    with TemporaryDirectory() as folder:
        for task in tasks:
            logs = harness.run_task(harness.askable(model, tokenizer, BATCH_SIZE), task)
            answers.write(Path(folder) / task.entry.task, logs)
            items = [log["metrics"][_metric(task).name][0] for log in logs]
            values[task.entry.task] = sum(items) / len(items)
    return values


def _metric(task: harness.Task) -> Metric:
    assert task.metric is not None
    return task.metric


_TEXT = """# `evaluate` against calling lm-evaluation-harness directly

SmolLM2-135M-Instruct, float32 on two CPU cores; {tasks}; {limit} items each; the values are the same. {pairs} pairs in
turns, medians.

    {command}

- Speed of ours over the harness's (quartiles): **{speed}**
- Milliseconds of the harness, and ours: {milliseconds}
"""

if __name__ == "__main__":
    main()
