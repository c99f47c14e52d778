"""Made-up results with every kind of number in them, and helpers that read a report back."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from rewired.divergence import Divergence
from rewired.evaluate.results import Average, ModelInfo, Results, TaskResult, average_of
from rewired.evaluate.statistics import Delta, Score
from rewired.evaluate.suites import Paper

COMMAND, DATE = "evaluate dense hybrid tuned --suite mine", "2030-01-02 03:04 UTC"
WIRING = [{"layers": "2-4", "preset": "ladder"}]
SETTINGS = {
    "answers": {
        "seed": 1234,
        "rows": ["a==1"],
        "dtype": "float32",
        "device": "cpu",
        "tokenizer": "7",
        "batch_size": "auto",
        "tp": 2,
        "versions": {"rewired": "0.1.0", "lm_eval": "0.4.13"},
    },
    "limit": None,
    "text_tokens": 8192,
    "window": 512,
}


def task(title: str, scores: dict[str, Score], deltas: dict[str, Delta], verdicts: dict[str, bool]) -> TaskResult:
    return TaskResult(title, "its_task", "acc_norm", scores, deltas, verdicts, shots=5, versions={"its_task": 1.0})


MMLU = task(
    "MMLU",
    {"dense": Score(0.681412345, 0.0123, 1500), "hybrid": Score(0.5, 0.013, 1500), "tuned": Score(0.67, 0.0125, 1500)},
    {"hybrid": Delta(-0.181412345, 0.0081, 1e-9), "tuned": Delta(-0.011412345, 0.0072, 0.1234)},
    {"hybrid": True, "tuned": False},
)
PERPLEXITY = replace(
    task(
        "WikiText",
        {"dense": Score(10.0, 0.25, 62), "hybrid": Score(12.5, 0.5, 62), "tuned": Score(9.9, 0.25, 62)},
        {"hybrid": Delta(2.5, 0.125, 0.0), "tuned": Delta(-0.1, 0.04, 0.0124)},
        {"hybrid": True, "tuned": True},
    ),
    task="wikitext",
    metric="word_perplexity",
    shots=0,
    is_share=False,
    higher_is_better=False,
    note="WikiText-2",
)
PAPER = Paper("A Paper, arXiv 0", "Llama-9", ("MMLU", "WikiText"), {"published": (68.14, 13.51)}, ("WikiText",))
DIVERGENCE = Divergence(8176, 10.5, 11.25, 0.123456789, 0.0045, 0.678, {1: 0.9, 5: 0.85, 10: 0.8}, {}, 0.004)


def results(**changes: Any) -> Results:
    whole = {
        "suite": "mine",
        "about": "What it is for.",
        "models": [
            ModelInfo("dense", "original", "0123456789abcdef" * 4),
            ModelInfo("hybrid", "rewired", "1" * 64, {"wiring": WIRING, "tp_shards": 4}),
            ModelInfo("tuned", "rewired", "2" * 64),
        ],
        "tasks": [MMLU, PERPLEXITY],
        "average": None,
        "divergences": {"prose.txt": {"hybrid": DIVERGENCE, "tuned": replace(DIVERGENCE, kl=0.01)}},
        "left_out": {"HE+": "No package has its rows."},
        "notes": ["Perplexity ran in transformers."],
        "settings": SETTINGS,
        "paper": PAPER,
    }
    return Results(**(whole | changes))


def shares(*titles: str) -> dict[str, Any]:
    """Tasks that are shares, and their average."""
    tasks = [replace(MMLU, title=title) for title in titles]
    return {"tasks": tasks, "average": average_of(tasks, ["dense", "hybrid", "tuned"])}


def alone(of: Results) -> Results:
    """The same of the original alone."""
    own = [replace(each, scores={"dense": each.scores["dense"]}, deltas={}, significant={}) for each in of.tasks]
    return replace(of, models=of.models[:1], tasks=own, divergences={})


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each table's rows, as column -> cell."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE)
    parsed = []
    for block in blocks:
        head, rule, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        assert rule == ["---"] * len(head)
        parsed.append([dict(zip(head, row, strict=True)) for row in rows])
    return parsed


def renamed(name: str) -> Results:
    """Everything that was hybrid's under another name, which is also a task's."""

    def swap(by_model: dict[str, Any]) -> dict[str, Any]:
        return {name if model == "hybrid" else model: value for model, value in by_model.items()}

    whole = results(**shares("MMLU", "PIQA"))
    average = Average(*(swap(value) if isinstance(value, dict) else value for value in vars(whole.average).values()))
    tasks = [
        replace(each, scores=swap(each.scores), deltas=swap(each.deltas), significant=swap(each.significant))
        for each in whole.tasks
    ]
    return replace(
        whole,
        models=[replace(model, name=name) if model.name == "hybrid" else model for model in whole.models],
        tasks=[replace(tasks[0], title=name), *tasks[1:]],
        average=average,
        divergences={text: swap(by_model) for text, by_model in whole.divergences.items()},
    )
