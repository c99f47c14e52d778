"""Rows of datasets: read, filtered, mixed, and refused by file and number."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader

from rewired.adapt.data.corpus import Corpus
from rewired.adapt.data.tokens import Encoder
from tests.adapt.world import conversations, load, texts, write_rows
from tests.evaluate.world import tokenizer


def test_every_shape_of_row_is_read(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    shapes: dict[str, Any] = {
        "messages": {"messages": turns},
        "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        "alpaca": {"instruction": "q", "input": "", "output": "a"},
    }
    expected = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    shapes["an empty text beside"] = shapes["messages"] | {"text": ""}
    shapes["a text beside"] = shapes["alpaca"] | {"text": "### Instruction: q ### Response: a"}
    for name, row in shapes.items():
        assert texts(load(str(write_rows(tmp_path / f"{name}.jsonl", [row])))) == [expected], name
    for number, row in enumerate(({"text": "plain"}, {"text": "plain", "messages": [], "instruction": None})):
        assert texts(load(str(write_rows(tmp_path / f"text-{number}.jsonl", [row])))) == ["plain</s>"]
    assert texts(load(str(write_rows(tmp_path / "strings.jsonl", ["plain"])))) == ["plain</s>"]
    for name in ("messages", "sharegpt", "alpaca"):
        row = shapes[name] | {"system": "Be kind."}
        (told,) = texts(load(str(write_rows(tmp_path / f"system-{name}.jsonl", [row]))))
        assert told == f"<|im_start|>system\nBe kind.<|im_end|>\n{expected}", name


def learnt(found: Corpus) -> list[str]:
    return [tokenizer().decode([token for token in row["labels"] if token >= 0]) for row in found.train]


@pytest.mark.parametrize("assistant_only", [True, False])
def test_of_a_prompt_and_its_completion_the_completion_is_learnt(
    assistant_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts as they are, and turns as the chat template writes them, which is what TRL does."""
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
    rows = [
        {"prompt": "One and", "completion": " two."},
        {"prompt": turns, "completion": [{"role": "assistant", "content": "yes"}]},
    ]
    of = Encoder.of
    monkeypatch.setattr(Encoder, "of", lambda tokens, _: of(tokens, assistant_only))
    found = load(str(write_rows(tmp_path / "rows.jsonl", rows)))
    chat = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    assert texts(found) == ["One and two.</s>", f"{chat}<|im_start|>assistant\nyes<|im_end|>\n"]
    assert learnt(found) == [" two.</s>", "yes<|im_end|>" + ("" if assistant_only else "\n")]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_csv_and_plain_text_are_read(streaming: bool, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('\ufeffprompt,completion\n"a, ",b\n"c\n","d ""e"""\n')
    found = load(str(tmp_path / "rows.csv"), streaming=streaming)
    assert sorted(texts(found)) == ["a, b</s>", 'c\nd "e"</s>']
    assert sorted(learnt(found)) == ["b</s>", 'd "e"</s>']
    (tmp_path / "books").mkdir()
    book = "".join(f"Line {number} of a book.\n" for number in range(1000))
    (tmp_path / "books" / "book.txt").write_text("\ufeff" + book)
    pieces = [text.removesuffix("</s>") for text in texts(load(str(tmp_path / "books"), streaming=streaming))]
    assert sorted("\n".join(pieces).split("\n")) == sorted(book.split("\n"))
    assert len(pieces) == 3 and all(7_990 < len(piece) < 8_100 for piece in sorted(pieces, key=len)[1:])
    (tmp_path / "dump.txt").write_text("".join(f"{letter * 9_000}\n" for letter in "abc"))
    found = load(str(tmp_path / "dump.txt"), streaming=streaming)
    assert sorted(texts(found)) == [f"{letter * 9_000}</s>" for letter in "abc"]


def test_parquet_and_folders_are_read(tmp_path: Path) -> None:
    rows = conversations(6)
    write_rows(tmp_path / "a.jsonl", rows[:2])
    Dataset.from_list(rows[2:]).to_parquet(tmp_path / "b.parquet")
    (tmp_path / "notes.txt").write_text("not data")
    assert texts(load(str(tmp_path))) == texts(load(str(write_rows(tmp_path.parent / "all.jsonl", rows))))


def test_streamed_rows_are_the_same_and_shuffled(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", conversations(30)))
    whole, streamed, again = (
        load(path, held_out=2),
        *(load(path, held_out=2, streaming=True) for _ in range(2)),
    )
    assert sorted(texts(streamed)) == sorted(texts(whole)) and texts(streamed) != texts(whole)
    assert texts(again) == texts(streamed), "in the order that the seed gives"
    assert streamed.held_out is not None and whole.held_out is not None
    assert streamed.held_out["input_ids"] == whole.held_out["input_ids"]


def test_streamed_rows_are_counted(tmp_path: Path) -> None:
    rows = [{"text": "x" * 9}, {"text": " "}, {"text": "x" * 29}, {"text": "x" * 39}]
    found = load(str(write_rows(tmp_path / "rows.jsonl", rows)), streaming=True, skip_bad=True, longest=20)
    texts(found), texts(found)
    (note,) = found.streamed()
    assert "4 rows read" in note and "1 bad row left out, the first because" in note and "row 2" in note
    assert "2 rows cut to 20 tokens, 30 fewer in all" in note


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


def test_rows_of_one_file_need_not_be_alike(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert texts(load(str(write_rows(path, [{"text": "a", "id": 1}, {"id": "x", "text": "b"}])))) == [
        "a</s>",
        "b</s>",
    ]


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


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 9}, {"text": "x" * 29}, {"text": "x" * 39}]))
    note = load(path, longest=20).notes[0]  # 10, 30 and 40 tokens
    assert "3 rows, 80 tokens" in note and "2 rows cut to 20 tokens, 30 fewer in all (37.5%)" in note


def test_rows_that_are_cut_before_the_answer_are_left_out(tmp_path: Path) -> None:
    question = {"from": "human", "value": "q" * 50}
    rows = [{"conversations": [question, {"from": "gpt", "value": "a"}]}, *conversations(1)]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    found = load(path, longest=80)
    assert len(found.train) == 1 and "1 row left out, in which nothing to learn is left" in found.notes[0]
    with pytest.raises(ValueError, match=r"No row can be trained on.*nothing to learn"):
        load(path, longest=20)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_a_row_with_nothing_to_predict_is_left_out(streaming: bool, tmp_path: Path) -> None:
    """Nothing predicts the first token."""
    path = str(write_rows(tmp_path / "rows.jsonl", [{"text": "abc"}, {"text": "d"}]))
    with pytest.raises(ValueError, match="2 rows left out, in which nothing to learn is left"):
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
    cut = [ids[:32] for ids in found.held_out["input_ids"]]  # as they would be trained on, each by itself
    assert [ids.tolist() for ids in found.held_out_texts(longest=32)] == cut


def test_a_row_of_one_token_predicts_nothing_that_could_be_measured() -> None:
    held_out = Dataset.from_list([{"input_ids": [5]}, {"input_ids": [5, 6]}])
    corpus = Corpus(Dataset.from_list([]), held_out, notes=[])
    assert [ids.tolist() for ids in corpus.held_out_texts(longest=32)] == [[5, 6]]
    assert not corpus.held_out_texts(longest=1)


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


@pytest.mark.parametrize("streaming", [False, True])
def test_the_fingerprint_is_of_the_rows_and_their_order(streaming: bool, tmp_path: Path) -> None:
    rows = conversations(12)
    files = [rows, rows, [*rows[:6], *rows[6:][::-1]]]
    paths = [str(write_rows(tmp_path / f"{number}.jsonl", found)) for number, found in enumerate(files)]
    same, again, other = (load(path, held_out=2, streaming=streaming).fingerprint for path in paths)
    assert same == again != other
