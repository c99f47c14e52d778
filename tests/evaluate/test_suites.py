"""Suites and papers: those that come along fit together, and a file with a mistake gets one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rewired.evaluate import suites
from rewired.evaluate.suites import Entry, Suite, choose, load_paper, load_suite

SUITES = sorted(file.stem for file in suites.FOLDER.glob("*.yaml"))
PAPERS = sorted(file.stem for file in suites.PAPERS.glob("*.yaml"))


# those that come along


def test_the_shipped_suites_are_those_that_the_command_names() -> None:
    assert SUITES == ["caat-table1", "gate", "ladder-table3", "ladder-table4", "quick"]


@pytest.mark.parametrize("name", SUITES)
def test_every_shipped_suite_loads_whole(name: str) -> None:
    suite = load_suite(name)
    written = yaml.safe_load((suites.FOLDER / f"{name}.yaml").read_text())
    assert suite.name == name
    assert suite.about and suite.about == suite.about.strip()
    assert len(suite.entries) == len(written["tasks"])
    for entry, item in zip(suite.entries, written["tasks"], strict=True):
        assert {key: getattr(entry, key) for key in item} == item
    titles = [entry.title for entry in suite.entries]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", [name for name in SUITES if name not in ("gate", "quick")])
def test_a_papers_suite_has_its_columns_in_its_order(name: str) -> None:
    """Some may be missing; none is made up, and so every row of the report finds its published number."""
    suite = load_suite(name)
    assert suite.paper is not None
    published = suite.paper.columns
    columns = [entry.column for entry in suite.entries]
    assert columns == [column for column in published if column in columns]
    assert columns


def test_every_table_is_some_suites() -> None:
    papers = [load_suite(name).paper for name in SUITES]
    assert all(load_paper(name) in papers for name in PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_every_published_row_is_whole(name: str) -> None:
    paper = load_paper(name)
    assert "arXiv" in paper.source and paper.model
    assert len(set(paper.columns)) == len(paper.columns)
    assert set(paper.lower_is_better) <= set(paper.columns)
    for row, values in paper.rows.items():
        assert len(values) == len(paper.columns), row
        assert all(0 < value < 100 for value in values), row


@pytest.mark.parametrize(
    ("name", "row", "published"),
    [
        ("ladder-table4", "original", 56.11),
        ("ladder-table4", "16L zero-shot", 41.65),
        ("ladder-table4", "16L retrained", 56.24),
        ("ladder-table4", "20L retrained", 53.86),
        ("ladder-table3", "ladder 1B", 58.92),
        ("ladder-table3", "standard 3B", 64.11),
    ],
)
def test_rows_average_to_what_the_paper_published(name: str, row: str, published: float) -> None:
    """A typo in one of a row's numbers would show."""
    paper = load_paper(name)
    average = paper.average(paper.row(row))
    assert average is not None and abs(average - published) <= 0.005 + 1e-9


def test_an_average_is_over_the_columns_asked_for_and_without_perplexities() -> None:
    paper = load_paper("caat-table1")
    assert paper.average({"PIQA": 67.79, "BoolQ": 55.69, "WikiText": 19.59, "unknown": 1.0}) == (67.79 + 55.69) / 2
    assert paper.average({"WikiText": 19.59, "unknown": 1.0}) is None


def test_a_published_number_is_found_by_row_and_column() -> None:
    paper = load_paper("ladder-table4")
    assert paper.row("20L retrained")["HE+"] == 48.80
    assert paper.row("original")["MMLU"] == 68.14


# files with a mistake


def write(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return str(folder / "mine.yaml")


def test_a_suite_of_the_users_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "about: |\n  Mine.\npaper: ladder-table4\ntasks:\n  - {task: piqa}\n"
        "  - {task: gsm8k, shots: 0, metric: 'exact_match,strict-match', chat: true, limit: 1, column: GSM}\n",
    )
    whole = Entry("gsm8k", "exact_match,strict-match", 0, True, 1, "GSM")
    assert load_suite(path) == Suite("mine", "Mine.", (Entry("piqa"), whole), load_paper("ladder-table4"))
    assert [entry.title for entry in load_suite(path).entries] == ["piqa", "GSM"]


def test_columns_that_would_share_a_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "tasks: [{task: piqa, column: a/b}, {task: sciq, column: a--b}]\n")
    with pytest.raises(ValueError, match="has two tasks called a--b: give each a 'column' of its own"):
        load_suite(path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("quik", "There is no suite 'quik': take quick, or the path of a .yaml file."),
        (
            "ladder-table5",
            "There is no suite 'ladder-table5': take ladder-table4 or ladder-table3, or the path of a .yaml file.",
        ),
        (
            "???",
            "There is no suite '???': take caat-table1, gate, ladder-table3, ladder-table4 or quick, or the path ",
        ),
        ("nowhere/mine.yaml", "There is no suite 'nowhere/mine.yaml': take "),
        ("", "There is no suite '': take "),
    ],
)
def test_an_unknown_suite_is_refused_with_what_may_be_meant(name: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        load_suite(name)
    assert str(refused.value).startswith(sentence)


PIQA = "tasks: [{task: piqa}]"
FILES = {
    "no YAML": ("tasks: [", "The suite {path} is not readable YAML: "),
    "a YAML tag that would run code": ("!!python/object/apply:os.getcwd []", "The suite {path} is not readable YAML: "),
    "empty": ("", "The suite {path} needs a list 'tasks' with an entry for each task."),
    "a list": ("- task: piqa", "The suite {path} needs a list 'tasks' with an entry for each task."),
    "no tasks": ("about: mine", "The suite {path} needs a list 'tasks' with an entry for each task."),
    "tasks that are no list": ("tasks: piqa", "The suite {path} needs a list 'tasks' with an entry for each task."),
    "tasks that are empty": ("tasks: []", "The suite {path} needs a list 'tasks' with an entry for each task."),
    "a key misspelled": (
        PIQA + "\nabuot: mine",
        "The suite {path} has the key 'abuot', which is not known: did you mean about?",
    ),
    "a key unlike any": (
        PIQA + "\nzzz: 1",
        "The suite {path} has the key 'zzz', which is not known: did you mean about, paper or tasks?",
    ),
    "a key that is a number": (PIQA + "\n7: 1", "The suite {path} has the key '7', which is not known: did you mean "),
    "an entry that is not a mapping": ("tasks: [piqa]", "In the suite {path}, an entry has no 'task': piqa."),
    "an entry without a task": ("tasks: [{shots: 0}]", "In the suite {path}, an entry has no 'task': {'shots': 0}."),
    "a task that is no text": ("tasks: [{task: 5}]", "In the suite {path}, an entry has no 'task': {'task': 5}."),
    "an entry's key misspelled": (
        "tasks: [{task: piqa, shot: 5}]",
        "Task piqa of the suite {path} has the key 'shot', which is not known: did you mean shots?",
    ),
    "an entry's key unlike any": (
        "tasks: [{task: piqa, zzz: 5}]",
        "Task piqa of the suite {path} has the key 'zzz', which is not known: did you mean task, metric, shots, chat, ",
    ),
}
VALUES = {  # as the file has it -> as the sentence has it
    "shots: -1": "shots: -1",
    "shots: 0.5": "shots: 0.5",
    "shots: true": "shots: True",
    "limit: 0": "limit: 0",
    "limit: -5": "limit: -5",
    "limit: '10'": "limit: 10",
    "limit: true": "limit: True",
    "chat: 1": "chat: 1",
    "chat: 'yes'": "chat: yes",
    "metric: 5": "metric: 5",
    "metric: [acc]": "metric: ['acc']",
    "column: 7": "column: 7",
    "column: {a: 1}": "column: {'a': 1}",
}
FILES |= {
    value: (
        "tasks: [{task: winogrande}, {task: piqa, " + value + "}]",
        "Task piqa of the suite {path} has '" + printed + "', which makes no sense.",
    )
    for value, printed in VALUES.items()
}


@pytest.mark.parametrize(("text", "sentence"), FILES.values(), ids=FILES)
def test_a_file_with_a_mistake_is_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as refused:
        load_suite(path)
    assert str(refused.value).startswith(sentence.replace("{path}", path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_bytes(b"\xff\xfe\x00tasks")
    with pytest.raises(ValueError, match="is not readable YAML: "):
        load_suite(str(tmp_path / "mine.yml"))


@pytest.mark.parametrize("paper", ["ladder-tabel4", "7", "[ladder-table4]"])
def test_a_suite_of_an_unknown_paper_is_refused_before_anything_is_asked(paper: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.yaml"):
        load_suite(write(tmp_path, f"{PIQA}\npaper: {paper}"))


@pytest.mark.parametrize(
    "tasks",
    [
        "[{task: piqa, shots: 0}, {task: piqa, shots: 5}]",
        "[{task: piqa, column: A}, {task: sciq, column: A}]",
        "[{task: piqa}, {task: sciq, column: piqa}]",
    ],
)
def test_two_entries_of_one_title_are_refused(tasks: str, tmp_path: Path) -> None:
    """Answers are told apart by their titles: the second entry's would stand in both rows."""
    with pytest.raises(ValueError, match=r"suite .*mine\.yaml"):
        load_suite(write(tmp_path, f"tasks: {tasks}"))


# what is asked

MMLU = Entry("mmlu", "acc", 5, column="MMLU")
HELLASWAG = Entry("hellaswag", "acc_norm", 10, limit=100, column="HS")
PIQA_ENTRY = Entry("piqa", limit=40)
SUITE = Suite("mine", "", (MMLU, HELLASWAG, PIQA_ENTRY))


def test_a_suite_is_asked_whole() -> None:
    assert choose(SUITE, [], None) == SUITE.entries
    assert choose(None, [], None) == ()


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        (["mmlu"], (MMLU,)),
        (["MMLU"], (MMLU,)),
        (["piqa", "HS"], (PIQA_ENTRY, HELLASWAG)),
        (["hellaswag", "hellaswag"], (HELLASWAG,)),
        (["HS", "hellaswag"], (HELLASWAG,)),
        (["arc_easy", "MMLU"], (Entry("arc_easy"), MMLU)),
        (["Mmlu"], (Entry("Mmlu"),)),
    ],
    ids=["by name", "by column", "in the order given", "twice", "by both", "the harness's own", "case counts"],
)
def test_tasks_are_chosen_by_name_or_column(tasks: list[str], expected: tuple[Entry, ...]) -> None:
    assert choose(SUITE, tasks, None) == expected


def test_without_a_suite_tasks_are_the_harnesss_own() -> None:
    assert choose(None, ["mmlu", "piqa"], 7) == (Entry("mmlu", limit=7), Entry("piqa", limit=7))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, [None, 100, 40]), (1, [1, 1, 1]), (50, [50, 50, 40]), (100, [100, 100, 40]), (1000, [1000, 100, 40])],
)
def test_a_limit_lowers_and_never_raises(limit: int | None, expected: list[int | None]) -> None:
    assert [entry.limit for entry in choose(SUITE, [], limit)] == expected
    assert [entry.limit for entry in SUITE.entries] == [None, 100, 40], "the suite stays as it is"
