"""Rows and files of which nothing can be learnt: named by file and number, or counted and skipped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pyarrow import parquet

from rewired.adapt.recipe.dataset_entry import DatasetEntry
from tests.adapt.world import conversations, load, texts, write_rows


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"conversations": []}, "empty conversation"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "no turn of the assistant"),
        ({"conversations": [{"from": "wizard", "value": "q"}]}, "unknown role 'wizard'"),
        ({"conversations": [{"from": "gpt", "value": "a"}] * 2}, "turns out of order"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": " "}]}, "empty turn"),
        ({"conversations": [{"from": "human", "text": "q"}]}, "cannot be read as text"),
        ({"prompt": "q", "completion": " "}, "empty completion"),
        ({"prompt": "q", "completion": "a", "system": "s"}, "has a system turn beside a prompt that is a text"),
        ({"prompt": [], "completion": [{"role": "assistant", "content": "a"}]}, "has an empty prompt"),
        ({"instruction": "q", "output": "a", "history": [["p", "b"]]}, "has a history, which adapt does not read"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0}]}, "weight 0"),
        (
            {"messages": [user("q"), assistant("a", tool_calls=[{"id": 1}])]},
            "has tool_calls, which adapt does not read",
        ),
        ({"messages": [user("q"), assistant("a", reasoning_content="r")]}, "has reasoning_content, which adapt"),
        ({"messages": [user("q"), assistant("a", weight=0)]}, "has an answer of weight 0"),
        (
            {"messages": [user([{"type": "image"}, {"type": "text", "text": "q"}]), assistant("a")]},
            "a part of type image",
        ),
        ({"prompt": "q", "completion": [{"role": "assistant", "content": "a"}]}, "cannot be read as text"),
        (
            {"conversations": [{"from": "human", "value": "\ud83d"}, {"from": "gpt", "value": "a"}]},
            "holds half of a character",
        ),
    ],
)
def test_a_bad_row_is_named_or_skipped(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    good = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    path = str(write_rows(tmp_path / "rows.jsonl", [good, row, good]))
    with pytest.raises(ValueError, match=f"rows.jsonl, row 2 .*{problem}.*skip_bad"):
        load(path)
    found = load(path, skip_bad=True)
    assert len(texts(found)) == 2
    assert "1 bad row left out" in found.notes[0] and problem in found.notes[0]


def test_what_says_nothing_is_no_harm(tmp_path: Path) -> None:
    """Of questions, a weight: they are not learnt. Turns that are empty beside others in another form."""
    nothing: dict[str, Any] = {
        "tool_calls": [None],
        "function_call": {"name": None},
        "thinking": "",
        "reasoning": "null",
    }
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows: list[dict[str, Any]] = [
        {"messages": [user("q") | {"weight": 0}, assistant("a", weight=1, **nothing)], "tools": [{"name": "f"}]},
        {"messages": [], "conversations": turns},
        {"messages": [user("q"), assistant("a")], "prompt": ["q"], "history": "of rome"},
        {"messages": [user("q"), assistant("a")], "conversations": [{"from": "gpt", "value": [{"type": "image"}]}]},
    ]
    found = texts(load(str(write_rows(tmp_path / "rows.jsonl", rows))))
    assert len(found) == 4 and len(set(found)) == 1
    assert texts(load(str(write_rows(tmp_path / "texts.jsonl", [{"text": "a", "history": "of rome"}])))) == ["a</s>"]


def test_a_system_turn_beside_a_prompt_of_turns_is_read(tmp_path: Path) -> None:
    row = {"prompt": [user("q")], "completion": [assistant("a")], "system": "be brief"}
    assert "be brief" in texts(load(str(write_rows(tmp_path / "rows.jsonl", [row]))))[0]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_row_that_cannot_be_read_is_named_or_skipped(name: str, streaming: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".parquet":
        write_broken_parquet(path)
    else:
        path.write_bytes(b'{"text": "whole"}\n{"text": "brok\n{"text": "well"}\n')
    with pytest.raises(ValueError, match=rf"{name}, row 2 cannot be read .*skip_bad"):
        texts(load(str(path), streaming=streaming))
    found = load(str(path), streaming=streaming, skip_bad=True)
    assert sorted(texts(found)) == ["well</s>", "whole</s>"]
    assert "1 bad row left out" in [*found.notes, *found.streamed()][0]


def write_broken_parquet(path: Path) -> None:
    """Three groups of a row, of which the second is overwritten."""
    Dataset.from_list([{"text": text} for text in ("whole", "broken", "well")]).to_parquet(path, batch_size=1)
    group = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + group.total_compressed_size] = b"\xff" * group.total_compressed_size
    path.write_bytes(content)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("name", "content"), [("rows.json", b"[1, 2"), ("rows.parquet", b"PAR1 and no more"), ("rows.jsonl", b"")]
)
def test_a_broken_file_is_named(name: str, content: bytes, streaming: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} (cannot be read|has no rows)"):
        load(str(tmp_path / name), streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n'),
        ("rows.json", b'\xef\xbb\xbf[{"text": "a"}, {"text": "b"}]'),
        ("rows.json", b'\n  [{"text": "a"},\n {"text": "b"}]\n'),
    ],
)
def test_a_file_is_read_whatever_it_begins_with(name: str, content: bytes, streaming: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert sorted(texts(load(str(tmp_path / name), streaming=streaming))) == ["a</s>", "b</s>"]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_row_that_is_no_utf8_is_named(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('{"text": "a"}\n{"text": "café"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2 cannot be read .*utf-8"):
        texts(load(str(tmp_path / "rows.jsonl"), streaming=streaming))


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_row_of_json_lines_has_the_number_of_its_line(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n7\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, row 4 is not a mapping"):
        texts(load(str(tmp_path / "rows.jsonl"), streaming=streaming))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no .*nowhere"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"There is no instruct/rows.jsonl"):  # which is no repository's name
        load("instruct/rows.jsonl")
    with pytest.raises(ValueError, match=r"no kept/sharegpt.jsonl: `rewired data fetch instruct kept` makes it"):
        load("kept/sharegpt.jsonl")
    path = str(write_rows(tmp_path / "rows.jsonl", conversations(4)))
    for part in ({"split": "test"}, {"name": "7M"}):
        with pytest.raises(ValueError, match=r"rows.jsonl is on disk, .*leave name and split out"):
            load({"path": path} | part)
    (tmp_path / "rows.xlsx").write_text("a,b")
    for path in (str(tmp_path / "rows.xlsx"), str(tmp_path / "empty")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        sentence = f"{path}: unsupported format; use .json, .jsonl, .csv, .txt or .parquet."
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            load(path)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_broken_row_of_a_csv_is_named_or_skipped(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"text\ngood\nwith,more\ncaf\xe9\n")
    with pytest.raises(ValueError, match=r"rows.csv, row 2 cannot be read \(more cells than names\)"):
        texts(load(str(tmp_path / "rows.csv"), streaming=streaming))
    found = load(str(tmp_path / "rows.csv"), streaming=streaming, skip_bad=True)
    assert texts(found) == ["good</s>"] and "2 bad rows left out" in [*found.notes, *found.streamed()][0]


def test_a_stream_of_which_nothing_can_be_learnt_is_refused(tmp_path: Path) -> None:
    """Each row is cut before the assistant says anything; a mixed one is counted."""
    turns = [{"from": "human", "value": "why " * 99}, {"from": "gpt", "value": "Because."}]
    rows = [{"conversations": turns}] * 3
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    for packing in (False, True):
        with pytest.raises(ValueError, match=r"no row to train on .*; 3 rows left out, in which nothing"):
            load(path, longest=64, streaming=True, packing=packing)
    path = str(write_rows(tmp_path / "mixed.jsonl", [*rows, *conversations(4)]))
    found = load(path, longest=64, streaming=True)
    assert len(list(found.train)) == 4 and "; 3 rows left out, in which nothing to learn" in found.streamed()[0]


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only 3 rows, and the first 3 are held out"):
        load(str(write_rows(tmp_path / "rows.jsonl", conversations(3))), held_out=3)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"name": "x"}, "missing .* 'path'.*: give a path, or path, name, split, weight, languages, sources"),
        ({"path": "a/b", "langauges": ["en"]}, "a/b has the unknown key 'langauges': did you mean 'languages'"),
        ({"path": "a/b", "weight": 0}, "weight is 0"),
        ({"path": "a/b", "weight": float("inf")}, "weight is inf"),
        ({"path": "a/b", "name": 405}, "'name' expected str, got int"),
        ({"path": "a/b", "split": ["train"]}, "'split' expected str, got list"),
        (7, "'path' expected str, got int"),
    ],
)
def test_bad_entries_of_datasets_are_refused(entry: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DatasetEntry.from_recipe(entry)
