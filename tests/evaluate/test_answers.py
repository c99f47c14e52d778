"""Answers on disk: whole or missing, never mistaken for others, and paired only where the items are the same."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewired.evaluate.answers import (
    answering_code,
    cache_file,
    paired,
    read,
    sample_file,
    write,
    write_samples,
)
from rewired.evaluate.harness import Task
from rewired.evaluate.metrics import Metric
from rewired.evaluate.models import Model
from rewired.evaluate.suites import Entry
from tests.full_disk import full_disk

few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

# what a log may hold: any text of a document or a model, and what json has
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
logs_of_items = st.lists(st.dictionaries(st.text(), values, max_size=3), max_size=3)


def log(item: str, answer: str = "", filter_name: str = "none") -> dict[str, Any]:
    return {"id": item, "filter": filter_name, "responses": [answer]}


# whole or not there


@few
@given(logs_of_items)
def test_what_was_written_is_read(tmp_path: Path, logs: list[dict[str, Any]]) -> None:
    write(tmp_path / "answers" / "a.jsonl", logs)
    assert read(tmp_path / "answers" / "a.jsonl") == logs
    assert [path.name for path in (tmp_path / "answers").iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    "text", ["a\nb", "a\r\nb\rc", "a\u2028b\u2029c\x85d\x0b\x0c", "naïve 語 🙂", '{"a": 1}', "\x00"]
)
def test_an_item_is_one_line_whatever_it_says(text: str, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [log(text, text), log("next")])
    assert read(tmp_path / "a.jsonl") == [log(text, text), log("next")]
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 2


def test_what_json_has_not_is_kept_as_text(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"doc": {"day": date(2030, 1, 2)}, "pair": (1, 2)}])
    assert read(tmp_path / "a.jsonl") == [{"doc": {"day": "2030-01-02"}, "pair": [1, 2]}]


class Unprintable:
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize("bad", [Unprintable(), {(1, 2): 3}], ids=["interrupted", "no JSON"])
@pytest.mark.parametrize("before", [1, 5000], ids=["at once", "after some reached the disk"])
@pytest.mark.parametrize("existing", [None, [log("kept")]], ids=["new", "over an older one"])
def test_an_error_in_the_middle_leaves_things_as_they_were(
    bad: Any, before: int, existing: list[dict[str, Any]] | None, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    if existing:
        write(file, existing)
    with pytest.raises((KeyboardInterrupt, TypeError)):
        write(file, [*(log(str(item)) for item in range(before)), {"doc": bad}])
    assert [path.name for path in tmp_path.iterdir()] == (["a.jsonl"] if existing else [])
    assert not existing or read(file) == existing


@pytest.mark.parametrize("items", [5, 5000], ids=["found when the file is closed", "found on the way"])
def test_a_full_disk_leaves_nothing(items: int, tmp_path: Path) -> None:
    with pytest.raises(OSError), full_disk(100):
        write(tmp_path / "a.jsonl", [log(str(item)) for item in range(items)])
    assert list(tmp_path.iterdir()) == []


class Reader:
    """Looks into a file as it is written into a log."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.met: list[list[dict[str, Any]]] = []

    def __str__(self) -> str:
        self.met.append(read(self.file))
        return "met"


def test_a_reader_never_meets_half_a_file(tmp_path: Path) -> None:
    """While the new answers are written, the old ones are there."""
    write(tmp_path / "a.jsonl", [log("old")])
    reader = Reader(tmp_path / "a.jsonl")
    write(tmp_path / "a.jsonl", [*(log(str(item)) for item in range(5000)), {"doc": reader}, log("last")])
    assert reader.met == [[log("old")]]
    assert len(read(tmp_path / "a.jsonl")) == 5002


# the file's name

MODEL = Model("hybrid", Path("hybrid"), None, "1" * 64, "7" * 64)
ENTRY = Entry("piqa", "acc", 0, False, 100, "PIQA")
TASK = Task(ENTRY, {}, Metric("acc", "mean"), "none", 5, {"piqa": 1.0}, "")
BASIS: dict[str, Any] = {"engine": "transformers", "dtype": "float32", "rows": "hub", "tokenizer": "7", "seed": 1}
BASIS |= {"device": "cpu", "versions": {"lm_eval": "1"}}
SETTINGS: dict[str, Any] = {"answers": BASIS, "batch_size": "8"}


def other(**changes: Any) -> dict[str, Any]:
    return SETTINGS | {"answers": BASIS | changes}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def asked(**changes: Any) -> Task:
    """TASK with changes to its entry, or to itself."""
    of_itself = ("shots", "versions", "filter", "metric", "note", "loaded")
    of_task = {key: value for key, value in changes.items() if key in of_itself}
    of_entry = {key: value for key, value in changes.items() if key not in of_task}
    return replace(TASK, entry=replace(ENTRY, **of_entry), **of_task)


def loaded(items: str, for_shots: str) -> dict[str, Any]:
    """A task of the harness with a document a letter."""
    documents = [[{"text": letter} for letter in letters] for letters in (items, for_shots)]
    return {"piqa": SimpleNamespace(eval_docs=documents[0], sampler=SimpleNamespace(df=documents[1]))}


DIFFERENT: dict[str, tuple[Model, Task, dict[str, Any]]] = {
    "as it is": (MODEL, TASK, SETTINGS),
    "another model": (replace(MODEL, sha256="2" * 64), TASK, SETTINGS),
    "another task": (MODEL, asked(task="sciq"), SETTINGS),
    "other shots": (MODEL, asked(shots=0), SETTINGS),
    "a chat template": (MODEL, asked(chat=True), SETTINGS),
    "another limit": (MODEL, asked(limit=10), SETTINGS),
    "no limit": (MODEL, asked(limit=None), SETTINGS),
    "another version": (MODEL, asked(versions={"piqa": 1.1}), SETTINGS),
    "another group": (MODEL, asked(versions={"piqa": 1.0, "sciq": 1.0}), SETTINGS),
    "another engine": (MODEL, TASK, other(engine="vllm")),
    "another dtype": (MODEL, TASK, other(dtype="bfloat16")),
    "rows of packages": (MODEL, TASK, other(rows=["a==1", "b==2"])),
    "another harness": (MODEL, TASK, other(versions={"lm_eval": "2"})),
    "another tokenizer": (MODEL, TASK, other(tokenizer="8")),
    "another seed": (MODEL, TASK, other(seed=2)),
    "another machine": (MODEL, TASK, other(device="a GPU")),
    "rows of newer packages": (MODEL, TASK, other(rows=["a==1", "b==3"])),
    "items": (MODEL, asked(loaded=loaded("ab", "xy")), SETTINGS),
    "another item": (MODEL, asked(loaded=loaded("ac", "xy")), SETTINGS),
    "another item for shots": (MODEL, asked(loaded=loaded("ab", "xz")), SETTINGS),
}


def test_whatever_answers_depend_on_is_in_their_files_name(cache: Path) -> None:
    files = {what: cache_file(*of) for what, of in DIFFERENT.items()}
    assert len(set(files.values())) == len(files)
    assert {file.parent for file in files.values()} == {cache / "answers"}
    assert files["another task"].name.startswith("sciq-")


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (replace(MODEL, name="called otherwise", folder=Path("elsewhere")), TASK),
        (MODEL, asked(column="another title")),
        (MODEL, asked(metric=Metric("acc_norm", "mean"), filter="strict-match", note="rows differ")),
    ],
    ids=["the model's name", "the column", "the metric: all are in the logs"],
)
def test_what_answers_do_not_depend_on_is_not(model: Model, task: Task) -> None:
    assert cache_file(model, task, SETTINGS) == cache_file(
        MODEL, TASK, {"batch_size": "4", "answers": dict(reversed(BASIS.items()))}
    )


def test_where_no_shots_are_shown_no_item_for_them_matters() -> None:
    files = {cache_file(MODEL, asked(shots=0, loaded=loaded("ab", shots)), SETTINGS) for shots in ("xy", "xz")}
    assert len(files) == 1


def test_answers_depend_on_the_code_of_the_model_and_of_the_tasks() -> None:
    names = {file.name for file in answering_code()}
    assert {"residual_stream.py", "modeling_rewired_llama.py", "harness.py"} <= names


def test_a_name_says_nothing_about_a_file(cache: Path) -> None:
    """That it is there means that it is whole."""
    file = cache_file(MODEL, TASK, SETTINGS)
    assert not file.exists() and not cache.exists()
    write(file, [log("a")])
    assert read(cache_file(MODEL, TASK, SETTINGS)) == [log("a")]


# samples beside the results


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "/etc/passwd", "..\\..\\x", "..", ".", "", "../", "a/../../..", ".hidden", "~", "a b"]
)
def test_samples_stay_in_a_folder_of_their_models_own(name: str, tmp_path: Path) -> None:
    """A model is called `..` or nothing where a user evaluates the folder that they stand in, or the one above it."""
    samples = (tmp_path / "results" / "samples").resolve()
    assert "\\" not in str(sample_file(tmp_path, name, name)), "which divides folders elsewhere"
    as_model = sample_file(tmp_path / "results", name, "piqa").resolve()
    assert as_model.parent.parent == samples
    assert as_model.name == "piqa.jsonl"
    assert sample_file(tmp_path / "results", "hybrid", name).resolve().parent == samples / "hybrid"


def test_samples_take_the_place_of_those_of_another_evaluation(tmp_path: Path) -> None:
    write_samples(tmp_path, {"HE+": {"org/model": [log("a")], "gone": [log("a")]}})
    write_samples(tmp_path, {"HE+": {"org/model": [log("b")]}})
    assert read(sample_file(tmp_path, "org/model", "HE+")) == [log("b")]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["org--model"]


# pairs


@few
@given(st.lists(st.permutations("abcdef"), min_size=1, max_size=3))
def test_items_pair_in_the_order_of_the_first(orders: list[list[str]]) -> None:
    logs = [
        [log(item, f"{model}{item}") for item in order] + [log("z", "other", "flexible")]
        for model, order in enumerate(orders)
    ]
    aligned = paired(logs, "none")
    for model, of_model in enumerate(aligned):
        assert of_model == [log(item, f"{model}{item}") for item in orders[0]]


@pytest.mark.parametrize("items", ["ab", "abcd", "abd", "", "abC"], ids=["fewer", "more", "other", "none", "case"])
def test_other_items_do_not_pair(items: str) -> None:
    logs = [[log(item) for item in "abc"], [log(item) for item in "cba"], [log(item) for item in items]]
    with pytest.raises(AssertionError, match="all were asked the same"):
        paired(logs, "none")


def test_items_of_another_filter_do_not_pair() -> None:
    with pytest.raises(AssertionError, match="all were asked the same"):
        paired([[log("a", filter_name="strict")], [log("a", filter_name="flexible")]], "strict")
