"""Rows of datasets: read, filtered, mixed, and refused by file and number."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from pyarrow import parquet
from torch.utils.data import DataLoader
from trl import SFTConfig

from rewired.adapt import corpus
from rewired.adapt.data import Source
from rewired.adapt.recipe import Recipe
from tests.evaluate.world import tokenizer

from .world import CHATML, conversations, write_rows


def load(*datasets: Any, longest: int | None = None, packing: bool = False, **keys: Any) -> corpus.Corpus:
    tokens = tokenizer()
    tokens.chat_template = CHATML
    options = {"max_length": longest, "packing": packing, "assistant_only_loss": True, "seed": 3}
    config = SFTConfig(output_dir="unused", use_cpu=True, bf16=False, **options)
    recipe = Recipe(model="unused", datasets=list(datasets), **{"held_out": 0} | keys)
    return corpus.load(recipe, config, tokens)


def texts(found: corpus.Corpus) -> list[str]:
    return [tokenizer().decode(row["input_ids"]) for row in found.train]


def test_every_shape_of_row_is_read(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    shapes: dict[str, Any] = {
        "messages": {"messages": turns},
        "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "alpaca": {"instruction": "q", "input": "", "output": "a"},
    }
    expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    shapes["an empty text beside"] = shapes["messages"] | {"text": ""}
    for name, row in shapes.items():
        assert texts(load(str(write_rows(tmp_path / f"{name}.jsonl", [row])))) == [expected], name
    assert texts(load(str(write_rows(tmp_path / "text.jsonl", [{"text": "plain"}])))) == ["plain</s>"]
    for name in ("messages", "sharegpt", "alpaca"):
        row = shapes[name] | {"system": "Be kind."}
        (told,) = texts(load(str(write_rows(tmp_path / f"system-{name}.jsonl", [row]))))
        assert told == f"<|im_start|>system\nBe kind.<|im_end|>\n{expected}", name


def test_parquet_and_folders_are_read(tmp_path: Path) -> None:
    rows = conversations(6)
    write_rows(tmp_path / "a.jsonl", rows[:2])
    Dataset.from_list(rows[2:]).to_parquet(tmp_path / "b.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    assert texts(load(str(tmp_path))) == texts(load(str(write_rows(tmp_path.parent / "all.jsonl", rows))))


def test_streamed_rows_are_the_same_and_shuffled(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", conversations(30)))
    whole, streamed, again = load(path, held_out=2), *(load(path, held_out=2, streaming=True) for _ in range(2))
    assert sorted(texts(streamed)) == sorted(texts(whole)) and texts(streamed) != texts(whole)
    assert texts(again) == texts(streamed), "in the order that the seed gives"
    assert streamed.held_out is not None and whole.held_out is not None
    assert streamed.held_out["input_ids"] == whole.held_out["input_ids"]


def test_streamed_rows_are_counted(tmp_path: Path) -> None:
    rows = [{"text": "x" * 9}, {"text": " "}, {"text": "x" * 29}, {"text": "x" * 39}]
    found = load(str(write_rows(tmp_path / "rows.jsonl", rows)), streaming=True, skip_bad=True, longest=20)
    texts(found), texts(found)
    (note,) = found.streamed()
    assert "4 rows read" in note and "1 bad rows left out, the first because" in note and "row 2" in note
    assert "2 rows are longer than 20 tokens and lose 30 in all" in note


def test_rows_are_filtered_by_language_and_source(tmp_path: Path) -> None:
    rows = [
        row | {"langdetect": language, "source": source}
        for row, (language, source) in zip(
            conversations(4), [("en", "x"), ("de", "x"), ("en", "y"), ("en", "x")], strict=True
        )
    ]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    everything = texts(load(path))
    found = load({"path": path, "languages": ["en"], "sources": ["x"]})
    assert texts(found) == [everything[0], everything[3]]
    assert "2 rows filtered out" in found.notes[0]


def test_mixed_datasets_are_drawn_by_weight(tmp_path: Path) -> None:
    first = str(write_rows(tmp_path / "a.jsonl", [{"text": "a"}] * 400))
    second = str(write_rows(tmp_path / "b.jsonl", [{"text": "b"}] * 400))
    counts = Counter(text[0] for text in texts(load({"path": first, "weight": 3.0}, {"path": second, "weight": 1.0})))
    assert 2 < counts["a"] / counts["b"] < 4.5
    assert len(texts(load(first, second))) == 800
    few = str(write_rows(tmp_path / "c.jsonl", [{"text": "c"}] * 40))
    alike = load({"path": first, "weight": 1.0}, {"path": few, "weight": 1.0})
    assert 0.5 < Counter(text[0] for text in texts(alike))["a"] / 40 < 2
    assert "drawn by weight" in alike.notes[-1]


def test_each_dataset_holds_out_its_share(tmp_path: Path) -> None:
    rows = {name: [{"text": f"{name}{number}"} for number in range(9)] for name in "ab"}
    paths = [str(write_rows(tmp_path / f"{name}.jsonl", some)) for name, some in rows.items()]
    found = load(*paths, held_out=5)
    assert found.held_out is not None
    assert Counter(tokenizer().decode(ids)[0] for ids in found.held_out["input_ids"]) == {"a": 2, "b": 3}
    assert len(found.train) == 13


def test_a_file_that_begins_with_unwanted_rows_is_read(tmp_path: Path) -> None:
    rows = [row | {"source": "x" if number < 1100 else "y"} for number, row in enumerate(conversations(1103))]
    assert len(load({"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "sources": ["y"]}).train) == 3


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"conversations": []}, "empty conversation"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "no turn of the assistant"),
        ({"conversations": [{"from": "wizard", "value": "q"}]}, "unknown role 'wizard'"),
        ({"conversations": [{"from": "gpt", "value": "a"}] * 2}, "turns out of order"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": " "}]}, "empty turn"),
        ({"conversations": [{"from": "human", "text": "q"}]}, "no text that is understood"),
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
    assert "1 bad rows left out" in found.notes[0] and problem in found.notes[0]


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
    assert "1 bad rows left out" in [*found.notes, *found.streamed()][0]


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


def test_rows_of_one_file_need_not_be_alike(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert texts(load(str(write_rows(path, [{"text": "a", "id": 1}, {"id": "x", "text": "b"}])))) == ["a</s>", "b</s>"]


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


def test_streamed_rows_that_are_held_out_are_never_trained_on(tmp_path: Path) -> None:
    """Of a folder and a file, shuffled."""
    (tmp_path / "folder").mkdir()
    for name in ("folder/a", "folder/b", "c"):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": f"{name[-1]}{number}"} for number in range(6)])
    found = load(str(tmp_path / "folder"), str(tmp_path / "c.jsonl"), held_out=6, streaming=True)
    assert found.held_out is not None
    held_out = {tokenizer().decode(ids) for ids in found.held_out["input_ids"]}
    assert len(held_out) == 6
    assert sorted([*texts(found), *held_out]) == sorted(f"{name}{number}</s>" for name in "abc" for number in range(6))


def test_a_stream_is_dealt_to_ranks_row_by_row(tmp_path: Path) -> None:
    """Also where there are as many files as ranks, and one of them is small: together they read what one rank reads."""
    for name, count in (("big", 40), ("small", 4)):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": f"{name} {number}"} for number in range(count)])
    ranks = []
    for rank in range(2):
        rows: Any = load(str(tmp_path), streaming=True).endless()
        loader = prepare_data_loader(
            DataLoader(rows, batch_size=2, collate_fn=list), num_processes=2, process_index=rank, dispatch_batches=False
        )
        ranks.append([row["input_ids"] for batch in islice(loader, 22) for row in batch])
    alone = [row["input_ids"] for row in islice(load(str(tmp_path), streaming=True).endless(), 88)]
    together = [ids for n in range(0, 44, 2) for rank in ranks for ids in rank[n : n + 2]]
    assert together == alone and len(set(map(tuple, alone))) == 44
    assert set(Counter(map(tuple, alone)).values()) == {2}


def test_a_stream_that_is_drawn_by_weight_reads_all_of_the_bigger_one(tmp_path: Path) -> None:
    """The smaller one begins anew without it."""
    big = str(write_rows(tmp_path / "big.jsonl", [{"text": f"b{number}"} for number in range(40)]))
    few = str(write_rows(tmp_path / "few.jsonl", [{"text": f"f{number}"} for number in range(4)]))
    found = load({"path": big, "weight": 1.0}, {"path": few, "weight": 1.0}, streaming=True)
    drawn = [tokenizer().decode(row["input_ids"]) for row in islice(found.endless(), 1000)]
    assert len(set(drawn)) == 44
    assert 400 < sum(text.startswith("f") for text in drawn) < 600


def test_a_mended_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(ValueError, match="row 2 cannot be read"):
        load(str(path))
    path.write_text('{"text": "a"}\n{"text": "mended", "id": 1}\n{"text": "c", "id": "d"}\n')
    assert texts(load(str(path)))[1] == "mended</s>"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no .*nowhere"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"There is no instruct/rows.jsonl"):  # which is no repository's name
        load("instruct/rows.jsonl")
    with pytest.raises(ValueError, match=r"There is no kept/alpaca.jsonl: `rewired data fetch instruct kept` makes it"):
        load("kept/alpaca.jsonl")
    path = str(write_rows(tmp_path / "rows.jsonl", conversations(4)))
    for part in ({"split": "test"}, {"name": "7M"}):
        with pytest.raises(ValueError, match=r"rows.jsonl is on disk, .*leave name and split out"):
            load({"path": path} | part)
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"rows.csv is no data that is read"):
        load(str(tmp_path / "rows.csv"))


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 9}, {"text": "x" * 29}, {"text": "x" * 39}]))
    note = load(path, longest=20).notes[0]  # 10, 30 and 40 tokens
    assert "3 rows, 80 tokens" in note and "2 rows are longer than 20 tokens and lose 30 in all (37.5%)" in note


def test_rows_that_are_cut_before_the_answer_are_left_out(tmp_path: Path) -> None:
    question = {"from": "human", "value": "q" * 50}
    rows = [{"conversations": [question, {"from": "gpt", "value": "a"}]}, *conversations(1)]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    found = load(path, longest=80)
    assert len(found.train) == 1 and "in 1 of them nothing to learn is left" in found.notes[0]
    with pytest.raises(ValueError, match=r"No row can be trained on.*nothing to learn"):
        load(path, longest=20)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_row_with_nothing_to_predict_is_left_out(streaming: bool, tmp_path: Path) -> None:
    """Nothing predicts the first token."""
    path = str(write_rows(tmp_path / "rows.jsonl", [{"text": "abc"}, {"text": "d"}]))
    with pytest.raises(ValueError, match=r"in 2 of them nothing to learn is left"):
        load(path, longest=1, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_answers_that_are_dates_are_text(streaming: bool, tmp_path: Path) -> None:
    """Of which datasets makes dates, where all are alike."""
    rows = [{"instruction": f"When {number}?", "output": f"1969-07-{number + 10}"} for number in range(8)]
    found = sorted(texts(load(str(write_rows(tmp_path / "rows.jsonl", rows)), streaming=streaming)))
    assert [text.split("assistant\n")[1][:10] for text in found] == [f"1969-07-{number + 10}" for number in range(8)]


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", conversations(12)))
    found = load(path, held_out=4)
    assert found.held_out is not None
    everything = texts(load(path))
    assert [tokenizer().decode(ids) for ids in found.held_out["input_ids"]] == everything[:4]
    assert texts(found) == everything[4:]
    windows = found.windows(longest=32)
    assert windows is not None
    flat = torch.tensor(
        [token for ids in found.held_out["input_ids"] for token in ids[:32]]
    )  # as it would be trained on
    assert torch.equal(windows.flatten(), flat[: windows.numel()]) and windows.shape[1] == 32


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_stand_twice_are_not_trained_on_if_one_is_held_out(streaming: bool, tmp_path: Path) -> None:
    """In the same dataset or in another one."""
    some = conversations(8)
    paths = [
        str(write_rows(tmp_path / name, rows)) for name, rows in (("a.jsonl", [*some, *some[:2]]), ("b.jsonl", some))
    ]
    found = load(*paths, held_out=4, streaming=streaming)
    assert found.held_out is not None
    held_out = {tuple(ids) for ids in found.held_out["input_ids"]}
    assert len(held_out) == 2, "the first two rows of both"
    trained = [tuple(row["input_ids"]) for row in found.train.take(12)]
    assert len(trained) == 12 and not held_out & set(trained)


def test_a_stream_of_which_nothing_can_be_learnt_is_refused(tmp_path: Path) -> None:
    """Each row is cut before the assistant says anything; a mixed one is counted."""
    turns = [{"from": "human", "value": "why " * 99}, {"from": "gpt", "value": "Because."}]
    rows = [{"conversations": turns}] * 3
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    for packing in (False, True):
        with pytest.raises(ValueError, match=r"no row of the stream .*; in 3 of them nothing to learn is left"):
            load(path, longest=64, streaming=True, packing=packing)
    path = str(write_rows(tmp_path / "mixed.jsonl", [*rows, *conversations(4)]))
    found = load(path, longest=64, streaming=True)
    assert len(list(found.train)) == 4 and "; in 3 of them nothing to learn is left" in found.streamed()[0]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_fingerprint_is_of_the_rows_and_their_order(streaming: bool, tmp_path: Path) -> None:
    rows = conversations(12)
    files = [rows, rows, [*rows[:6], *rows[6:][::-1]]]
    paths = [str(write_rows(tmp_path / f"{number}.jsonl", found)) for number, found in enumerate(files)]
    same, again, other = (load(path, held_out=2, streaming=streaming).fingerprint for path in paths)
    assert same == again != other


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only 3 rows, and the first 3 are held out"):
        load(str(write_rows(tmp_path / "rows.jsonl", conversations(3))), held_out=3)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"name": "x"}, "has no path"),
        ({"path": "a/b", "langauges": ["en"]}, "did you mean 'languages'"),
        ({"path": "a/b", "weight": 0}, "weight 0"),
        ({"path": "a/b", "weight": float("inf")}, "weight inf"),
        ({"path": "a/b", "name": 405}, "name 405, which is no string: put it in quotes"),
        ({"path": "a/b", "split": ["train"]}, "split .* is no string"),
        (7, "has no path"),
    ],
)
def test_bad_entries_of_datasets_are_refused(entry: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Source.from_recipe(entry)
