"""Rows of files whatever their suffix, their order and what is broken in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pyarrow import parquet

from rewired.text import documents
from rewired.text.rows import Row, is_on_hub, read_rows


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"], ids=["", "CRLF", "blank lines"])
def test_json_is_read_line_by_line_or_as_a_list_whatever_its_suffix(name: str, end: str, tmp_path: Path) -> None:
    """To refit on as it is to train on."""
    rows = [{"text": f"{number:03d}"} for number in range(5)]
    for content in (json.dumps(rows, indent=1), end.join(map(json.dumps, rows))):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert [row.parse("row") for row in read_rows(tmp_path / name)] == rows
        (found,) = documents.sources(str(tmp_path / name))
        assert sorted(map(str, found)) == ["000", "001", "002", "003", "004"]


def test_rows_have_the_numbers_of_their_lines_or_places(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('\n"a"\n\n"b"\n')
    (tmp_path / "list.json").write_text('\n["a",\n\n"b"]\n')
    assert [row.number for row in read_rows(tmp_path / "lines.jsonl")] == [2, 4]
    assert [row.number for row in read_rows(tmp_path / "list.json")] == [1, 2]


def test_a_broken_row_costs_none_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'"a"\n{"text": \n"caf\xe9"\n7\n' + b"[" * 100_000 + b"\n" + b'"b"\n')
    rows = list(read_rows(tmp_path / "rows.jsonl"))
    assert [rows[place].parse("it") for place in (0, 5)] == [{"text": "a"}, {"text": "b"}]
    for row, problem in zip(rows[1:5], ("as JSON", "utf-8", "not a mapping", "as JSON"), strict=True):
        with pytest.raises(ValueError, match=f"^it (cannot be read|is) .*{problem}"):
            row.parse("it")


def test_a_group_of_rows_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be larger than memory; what is lost with a part that cannot be read is counted."""
    Dataset.from_list([{"text": str(number)} for number in range(2_500)]).to_parquet(tmp_path / "rows.parquet")
    whole = [row.json for row in read_rows(tmp_path / "rows.parquet") if not row.problem]
    assert whole == [json.dumps({"text": str(number)}) for number in range(2_500)]
    iter_batches = parquet.ParquetFile.iter_batches

    def breaking(self: parquet.ParquetFile, size: int, **options: Any) -> Iterator[Any]:
        batches = iter_batches(self, size, **options)
        yield next(batches)
        raise OSError("a hole in the file")

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", breaking)
    found = list(read_rows(tmp_path / "rows.parquet"))
    assert [row.json for row in found[:1_000]] == whole[:1_000]
    assert found[1_000:] == [Row(number, "", "a hole in the file") for number in range(1_001, 2_501)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", True),
        ("folder/rows.jsonl", False),
        ("folder/notes.txt", False),
        ("./name", False),
        ("a/b/c", False),
    ],
)
def test_a_name_that_is_no_file_may_be_a_dataset(name: str, expected: bool) -> None:
    assert is_on_hub(name) is expected


@pytest.mark.parametrize(("name", "package"), [("rows.parquet", "pyarrow"), ("owner/name", "datasets")])
def test_a_missing_package_is_said_with_the_command_that_installs_it(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not is_on_hub(name):
        Path(name).write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"Reading {name} needs the package '{package}'.*: pip install .*\[adapt\]"):
        list(documents.sources(name))
