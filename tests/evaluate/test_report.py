"""What an evaluation writes: every number is in its cell, and nobody's name breaks a table or leaves the page."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rewired.evaluate import report
from rewired.evaluate.answers import earlier
from rewired.evaluate.divergence import Divergence
from rewired.evaluate.harness import Task
from rewired.evaluate.metrics import Metric
from rewired.evaluate.papers import Paper, load_paper
from rewired.evaluate.report import markdown, write_report
from rewired.evaluate.results import Average, ModelInfo, Results, TaskResult, average_of, compile_tasks
from rewired.evaluate.statistics import Delta, Score
from rewired.evaluate.suites import Entry

COMMAND, DATE = "evaluate dense hybrid tuned --suite mine", "2030-01-02 03:04 UTC"
WIRING = [{"layers": "2-4", "preset": "ladder"}]
SETTINGS = {
    "answers": {
        "seed": 1234,
        "rows": ["a==1"],
        "dtype": "float32",
        "device": "cpu",
        "tokenizer": "7",
        "versions": {"rewired": "0.1.0", "lm_eval": "0.4.13"},
    },
    "limit": None,
    "text_tokens": 8192,
    "window": 512,
    "batch_size": "auto",
    "tp": 2,
}


def task(title: str, scores: dict[str, Score], deltas: dict[str, Delta], verdicts: dict[str, bool]) -> TaskResult:
    return TaskResult(
        title, "its_task", "acc_norm", 5, False, None, True, True, {"its_task": 1.0}, "", scores, deltas, verdicts
    )


MMLU = task(
    "MMLU",
    {"dense": Score(0.681412345, 0.0123, 1500), "hybrid": Score(0.5, 0.013, 1500), "tuned": Score(0.67, 0.0125, 1500)},
    {"hybrid": Delta(-0.181412345, 0.0081, 1e-9), "tuned": Delta(-0.011412345, 0.0072, 0.1234)},
    {"hybrid": True, "tuned": False},
)
PERPLEXITY = replace(
    task(
        "WikiText",
        {"dense": Score(10.0, 0.25, 62), "hybrid": Score(12.5, 0.5, 62), "tuned": Score(9.9, 0.25, 62)},
        {"hybrid": Delta(2.5, 0.125, 0.0), "tuned": Delta(-0.1, 0.04, 0.0124)},
        {"hybrid": True, "tuned": True},
    ),
    task="wikitext",
    metric="word_perplexity",
    shots=0,
    is_share=False,
    higher_is_better=False,
    note="WikiText-2",
)
PAPER = Paper("A Paper, arXiv 0", "Llama-9", ("MMLU", "WikiText"), {"published": (68.14, 13.51)}, ("WikiText",))
DIVERGENCE = Divergence(8176, 10.5, 11.25, 0.123456789, 0.0045, 0.678, {1: 0.9, 5: 0.85, 10: 0.8})


def results(**changes: Any) -> Results:
    whole = {
        "suite": "mine",
        "about": "What it is for.",
        "models": [
            ModelInfo("dense", "original", "0123456789abcdef" * 4),
            ModelInfo("hybrid", "rewired", "1" * 64, 0, {"wiring": WIRING, "tp_shards": 4}),
            ModelInfo("tuned", "rewired", "2" * 64, 300),
        ],
        "tasks": [MMLU, PERPLEXITY],
        "average": None,
        "divergences": {"prose.txt": {"hybrid": DIVERGENCE, "tuned": replace(DIVERGENCE, kl=0.01)}},
        "left_out": {"HE+": "No package has its rows."},
        "notes": ["Answers of dense are from earlier results."],
        "settings": SETTINGS,
        "paper": PAPER,
    }
    return Results(**(whole | changes))


def shares(*titles: str) -> dict[str, Any]:
    """Tasks that are shares, and their average."""
    tasks = [replace(MMLU, title=title) for title in titles]
    return {"tasks": tasks, "average": average_of(tasks, ["dense", "hybrid", "tuned"])}


def alone(of: Results) -> Results:
    """The same of the original alone."""
    own = [replace(each, scores={"dense": each.scores["dense"]}, deltas={}, significant={}) for each in of.tasks]
    return replace(of, models=of.models[:1], tasks=own, divergences={"prose.txt": {}})


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def tables(text: str) -> list[list[dict[str, str]]]:
    """Each table's rows, as column -> cell."""
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE)
    parsed = []
    for block in blocks:
        head, rule, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        assert rule == ["---"] * len(head)
        parsed.append([dict(zip(head, row, strict=True)) for row in rows])
    return parsed


# the tables


def test_each_model_is_compared_with_the_original_in_a_table_of_its_own() -> None:
    hybrid, tuned = tables(section(markdown(results(), COMMAND, DATE), "Tasks"))
    assert hybrid == [
        {
            "task": "MMLU",
            "metric": "acc_norm",
            "shots": "5",
            "n": "1,500",
            "dense": "68.14 ± 1.23",
            "hybrid": "50.00 ± 1.30",
            "delta": "-18.14 ± 0.81",
            "significant": "yes, p < 0.0001",
            "kept": "73.4 ± 1.2 %",
        },
        {
            "task": "WikiText",
            "metric": "word_perplexity",
            "shots": "0",
            "n": "62",
            "dense": "10.00 ± 0.25",
            "hybrid": "12.50 ± 0.50",
            "delta": "+2.50 ± 0.12",
            "significant": "yes, p < 0.0001",
            "kept": "x 1.250",
        },
    ]
    assert [row["tuned"] for row in tuned] == ["67.00 ± 1.25", "9.90 ± 0.25"]
    assert [row["delta"] for row in tuned] == ["-1.14 ± 0.72", "-0.10 ± 0.04"]
    assert [row["significant"] for row in tuned] == ["no, p 0.1234", "yes, p 0.0124"]
    assert [row["kept"] for row in tuned] == ["98.3 ± 1.1 %", "x 0.990"]


def test_a_single_item_has_no_error_and_no_verdict() -> None:
    single = task(
        "one",
        {"dense": Score(0.5, None, 1), "hybrid": Score(0.25, None, 1), "tuned": Score(0.5, None, 1)},
        {"hybrid": Delta(-0.25, None, None), "tuned": Delta(0.0, None, None)},
        {"hybrid": False, "tuned": False},
    )
    row = tables(markdown(results(tasks=[single]), COMMAND, DATE))[0][0]
    assert (row["dense"], row["hybrid"], row["delta"]) == ("50.00", "25.00", "-25.00")
    assert row["significant"] == "too few items"


def test_a_difference_of_which_nothing_varies_still_has_its_error() -> None:
    same = replace(
        MMLU,
        deltas={name: Delta(0.0, 0.0, 1.0) for name in ("hybrid", "tuned")},
        significant={"hybrid": False, "tuned": False},
    )
    row = tables(markdown(results(tasks=[same]), COMMAND, DATE))[0][0]
    assert (row["delta"], row["significant"]) == ("+0.00 ± 0.00", "no, p 1.0000")


def test_of_an_original_that_got_nothing_right_nothing_can_be_kept() -> None:
    none = replace(MMLU, scores=MMLU.scores | {"dense": Score(0.0, 0.0, 1500)})
    assert tables(markdown(results(tasks=[none]), COMMAND, DATE))[0][0]["kept"] == ""


def test_the_average_is_a_row_below_the_tasks() -> None:
    average = Average(
        2,
        {"dense": 0.6, "hybrid": 0.45, "tuned": 0.61},
        {"dense": 0.01, "hybrid": 0.02, "tuned": 0.011},
        {"hybrid": -0.15, "tuned": 0.01},
        {"hybrid": 0.0051, "tuned": None},
    )
    hybrid, tuned = tables(section(markdown(results(average=average), COMMAND, DATE), "Tasks"))
    assert hybrid[-1] == {
        "task": "**average**",
        "metric": "",
        "shots": "",
        "n": "2 tasks",
        "dense": "60.00 ± 1.00",
        "hybrid": "45.00 ± 2.00",
        "delta": "-15.00 ± 0.51",
        "significant": "",
        "kept": "75.0 ± 0.9 %",
    }
    assert (tuned[-1]["delta"], tuned[-1]["kept"]) == ("+1.00", "101.7 %")


def test_the_papers_rows_stand_above_ours() -> None:
    """With averages over what is a share."""
    piqa = replace(MMLU, title="PIQA", scores={name: Score(0.25, 0.01, 9) for name in MMLU.scores})
    tasks = [MMLU, piqa, PERPLEXITY]
    rows = {"published": (68.14, 70.0, 13.51), "their hybrid": (60.0, 50.0, 14.0)}
    paper = Paper("A Paper, arXiv 0", "Llama-9", ("MMLU", "PIQA", "WikiText"), rows, ("WikiText",))
    whole = results(tasks=tasks, average=average_of(tasks, ["dense", "hybrid", "tuned"]), paper=paper)
    text = section(markdown(whole, COMMAND, DATE), "What the paper published")
    assert "A Paper, arXiv 0: Llama-9." in text
    assert tables(text) == [
        [
            {"": "published", "MMLU": "68.14", "PIQA": "70.00", "WikiText": "13.51", "average": "69.07"},
            {"": "their hybrid", "MMLU": "60.00", "PIQA": "50.00", "WikiText": "14.00", "average": "55.00"},
            {"": "**dense**", "MMLU": "68.14", "PIQA": "25.00", "WikiText": "10.00", "average": "46.57"},
            {"": "**hybrid**", "MMLU": "50.00", "PIQA": "25.00", "WikiText": "12.50", "average": "37.50"},
            {"": "**tuned**", "MMLU": "67.00", "PIQA": "25.00", "WikiText": "9.90", "average": "46.00"},
        ]
    ]


def test_the_papers_average_and_ours_are_over_the_same_tasks() -> None:
    """A task of the user's own is in no column of the paper, and would move our average away from its."""
    other = replace(MMLU, title="arc_easy", scores={name: Score(0.1, 0.01, 9) for name in MMLU.scores})
    tasks = [MMLU, replace(MMLU, title="PIQA"), other]
    paper = Paper("A Paper", "Llama-9", ("MMLU", "PIQA"), {"published": (68.14, 68.14)})
    whole = results(tasks=tasks, average=average_of(tasks, ["dense", "hybrid", "tuned"]), paper=paper)
    published, dense, *_ = tables(section(markdown(whole, COMMAND, DATE), "What the paper published"))[0]
    assert (published["arc_easy"], dense["arc_easy"]) == ("", "10.00")
    assert (published["average"], dense["average"]) == ("68.14", "68.14")


def test_the_papers_own_averages_are_there_where_not_all_of_its_columns_were_asked() -> None:
    tasks = [MMLU, PERPLEXITY]
    average = average_of(tasks, ["dense", "hybrid", "tuned"])
    all_of_it = results(tasks=tasks, average=average, paper=load_paper("ladder-table4"))
    text = section(markdown(all_of_it, COMMAND, DATE), "What the paper published")
    assert (
        "HE+, IFEval, AlpacaEval: original 56.11, 16L zero-shot 41.65, 16L retrained 56.24, 20L retrained 53.86" in text
    )
    asked = results(tasks=tasks, average=average, paper=PAPER)
    assert "Over all" not in section(markdown(asked, COMMAND, DATE), "What the paper published")


def test_divergence_has_a_row_for_each_model() -> None:
    text = section(markdown(results(), COMMAND, DATE), "Divergence on prose.txt")
    assert "8,176 predicted tokens in windows of 512" in text
    [[dense, hybrid, tuned]] = tables(text)
    kl = "KL(original &#124;&#124; model)"
    assert list(dense.values()) == ["dense", "10.50", "", "", "", "", ""]
    assert hybrid == {
        "model": "hybrid",
        "perplexity": "11.25",
        kl: "0.1235 ± 0.0045",
        "p95 of KL": "0.678",
        "top-1": "90.0 %",
        "top-5": "85.0 %",
        "top-10": "80.0 %",
    }
    assert (tuned["model"], tuned[kl]) == ("tuned", "0.0100 ± 0.0045")


def test_the_report_says_what_was_run_and_what_was_not() -> None:
    text = markdown(results(), COMMAND, DATE)
    assert text.startswith(
        f"# dense against hybrid, tuned\n\n    {COMMAND}\n\n{DATE}: suite mine, float32 on cpu, 2 ranks,"
    )
    assert "- original **dense**, sha256 0123456789ab\n" in text
    assert f"- rewired **hybrid**, sha256 111111111111, wiring `{json.dumps(WIRING)}`, tp_shards 4\n" in text
    assert "rewired 0.1.0, lm_eval 0.4.13" in text
    assert "0.05 over a model's 2 tasks together (Holm)" in text
    assert section(text, "Remarks").split("\n")[1:-1] == [
        "- HE+: not run. No package has its rows.",
        "- Answers of dense are from earlier results.",
        "- WikiText: WikiText-2.",
    ]


def test_an_original_alone_has_scores_and_no_deltas() -> None:
    text = markdown(alone(results()), COMMAND, DATE)
    assert text.startswith("# dense\n")
    [rows] = tables(section(text, "Tasks"))
    assert rows == [
        {"task": "MMLU", "metric": "acc_norm", "shots": "5", "n": "1,500", "dense": "68.14 ± 1.23"},
        {"task": "WikiText", "metric": "word_perplexity", "shots": "0", "n": "62", "dense": "10.00 ± 0.25"},
    ]
    for word in ("delta", "ignificant", "Divergence", "kept"):
        assert word not in text


def test_a_divergence_alone_has_no_tasks() -> None:
    text = markdown(results(suite=None, about="", tasks=[], left_out={}, notes=[]), COMMAND, DATE)
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == ["Divergence on prose.txt"]


# the files


def as_json(value: Any) -> Any:
    """What a value is in JSON, where every key is text."""
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.usefixtures("_undrawn")
def test_results_json_holds_everything_unrounded(tmp_path: Path) -> None:
    whole = results()
    write_report(whole, COMMAND, DATE, tmp_path / "new" / "folder")
    found = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert (found.pop("command"), found.pop("date")) == (COMMAND, DATE)
    assert found == as_json(asdict(whole))
    assert set(found) == {field.name for field in fields(Results)}
    assert found["tasks"][0]["scores"]["dense"] == {"value": 0.681412345, "standard_error": 0.0123, "n": 1500}
    assert found["divergences"]["prose.txt"]["hybrid"]["kl"] == 0.123456789


@pytest.mark.usefixtures("_undrawn")
def test_results_that_were_written_are_an_earlier_evaluation(tmp_path: Path) -> None:
    write_report(results(), COMMAND, DATE, tmp_path)
    assert [(model.name, model.sha256, model.step) for model in earlier(tmp_path)] == [
        (model.name, model.sha256, model.step) for model in results().models
    ]


@pytest.fixture
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plots, which take their time."""
    monkeypatch.setattr(report, "draw", lambda results, folder: [])


def drawn(folder: Path) -> list[str]:
    """The plots in a folder, every one a picture with something on it."""
    for path in folder.glob("*.png"):
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            low, high = picture.convert("L").getextrema()
            assert low < high
    return sorted(path.name for path in folder.glob("*.png"))


def test_plots_stand_in_the_report(tmp_path: Path) -> None:
    write_report(results(**shares("MMLU", "PIQA")), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png", "tasks.png"]
    text = (tmp_path / "report.md").read_text()
    assert re.findall(r"!\[.*\]\((.*)\)", text) == ["tasks.png", "recovery.png"]
    assert text.startswith(markdown(results(**shares("MMLU", "PIQA")), COMMAND, DATE))


def test_a_divergence_alone_is_drawn_along_training(tmp_path: Path) -> None:
    write_report(results(tasks=[]), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png"]


def models(*others: tuple[str, int | None]) -> list[ModelInfo]:
    """The original, and hybrid and tuned with these roles and steps."""
    infos = [
        ModelInfo(name, role, "1" * 64, step) for name, (role, step) in zip(("hybrid", "tuned"), others, strict=True)
    ]
    return [ModelInfo("dense", "original", "0" * 64), *infos]


@pytest.mark.parametrize(
    "among",
    [
        models(("rewired", None), ("rewired", None)),
        models(("rewired", None), ("rewired", 300)),
        models(("rewired", 100), ("control", 100)),
    ],
    ids=["no step", "one step", "one step and the control's, which is another training"],
)
def test_recovery_is_drawn_where_two_models_of_a_training_are_compared(among: list[ModelInfo], tmp_path: Path) -> None:
    write_report(results(**shares("MMLU", "PIQA"), models=among), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]


@pytest.mark.parametrize(
    "divergences",
    [{}, {"prose.txt": {}}, {"prose.txt": {"tuned": DIVERGENCE}}],
    ids=["no text", "an original from earlier results", "a model from earlier results"],
)
def test_recovery_is_not_drawn_where_there_is_nothing_to_draw(divergences: dict[str, Any], tmp_path: Path) -> None:
    """One task has no average, and earlier results have no weights to measure a divergence with."""
    write_report(results(tasks=[MMLU], divergences=divergences), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]


def test_an_original_that_gets_nothing_right_is_reported(tmp_path: Path) -> None:
    """Which tiny models do, on hard tasks."""
    nothing = {name: Score(0.0, 0.0, 10) for name in MMLU.scores}
    tasks = [replace(MMLU, title=title, scores=nothing) for title in ("GSM", "HE+")]
    average = average_of(tasks, ["dense", "hybrid", "tuned"])
    write_report(results(tasks=tasks, average=average), COMMAND, DATE, tmp_path)
    assert (tmp_path / "report.html").is_file()


def test_an_original_alone_is_written_whole(tmp_path: Path) -> None:
    write_report(alone(results()), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["tasks.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md", "report.html", "tasks.png"}


# the page


class Page(HTMLParser):
    """What a browser makes of it: elements, what they refer to, and text by element."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self._open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts[tag] = self.texts.get(tag, "") + data
        if {"td", "th"} & set(self._open):
            self.cells[-1] += data


def renamed(name: str) -> Results:
    """Everything that was hybrid's under another name, which is also a task's."""

    def swap(by_model: dict[str, Any]) -> dict[str, Any]:
        return {name if model == "hybrid" else model: value for model, value in by_model.items()}

    whole = results(**shares("MMLU", "PIQA"))
    average = Average(*(swap(value) if isinstance(value, dict) else value for value in vars(whole.average).values()))
    tasks = [
        replace(each, scores=swap(each.scores), deltas=swap(each.deltas), significant=swap(each.significant))
        for each in whole.tasks
    ]
    return replace(
        whole,
        models=[replace(model, name=name) if model.name == "hybrid" else model for model in whole.models],
        tasks=[replace(tasks[0], title=name), *tasks[1:]],
        average=average,
        divergences={text: swap(found) for text, found in whole.divergences.items()},
    )


def test_the_page_is_one_file(tmp_path: Path) -> None:
    """It can be sent: its pictures are in it, and it asks nobody for anything."""
    write_report(results(**shares("MMLU", "PIQA")), COMMAND, DATE, tmp_path)
    page = Page(tmp_path / "report.html")
    assert len(page.references) == 2
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    raw = (tmp_path / "report.html").read_text()
    assert "://" not in raw
    assert not re.search(r"@import|url\(", raw)
    assert {"table", "style", "title", "h1", "h2", "img"} <= set(page.elements)
    assert page.texts["title"] == page.texts["h1"] == "dense against hybrid, tuned"
    assert "73.4 ± 1.2 %" in page.cells


NAMES = {
    "a script": "<script>alert(1)</script>",
    "the end of the title": "</title><img src=x onerror=alert(1)>",
    "a cell's end": "a|b",
    "a script in a cell": "x | <script>",
    "an entity": "&lt;b&gt;",
    "a format": "{body}{0}",
    "a link": "[x](http://localhost/)",
    "a picture": "![x](http://localhost/x.png)",
    "an address": "<http://localhost/>",
    "emphasis": "a*b*c",
    "underscores": "__init__",
    "code": "`a`",
}


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_is_shown_as_it_is_whatever_it_looks_like(name: str, tmp_path: Path) -> None:
    """Folders and columns are called as users like, and results may be somebody else's."""
    write_report(renamed(name), COMMAND, DATE, tmp_path)
    page = Page(tmp_path / "report.html")
    assert page.references == []
    assert {"script", "a", "img"}.isdisjoint(page.elements)
    assert page.texts["title"] == page.texts["h1"] == f"dense against {name}, tuned"
    assert page.cells.count(name) == 6, "as task and as model, in both tables of tasks, the paper's and the text's"


@pytest.mark.usefixtures("_undrawn")
def test_what_a_suite_says_runs_no_code(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    noted = replace(MMLU, note=script)
    write_report(
        results(about=script, left_out={"HE+": script}, notes=[script], tasks=[noted]), script, script, tmp_path
    )
    page = Page(tmp_path / "report.html")
    assert "script" not in page.elements
    assert page.references == []


def test_a_name_that_looks_like_a_formula_is_drawn(tmp_path: Path) -> None:
    write_report(renamed("$\\frac$"), COMMAND, DATE, tmp_path)
    assert drawn(tmp_path) == ["recovery.png", "tasks.png"]


@pytest.mark.parametrize("name", ["a|b", "x | <script>", "a`b|c`"])
def test_a_name_moves_no_cell_of_the_markdown(name: str) -> None:
    text = markdown(renamed(name), COMMAND, DATE)
    row = tables(section(text, "Tasks"))[0][0]
    assert (row["metric"], row["kept"]) == ("acc_norm", "73.4 ± 1.2 %")


# from logs to results

WORDS = Metric("word_perplexity", "perplexity", higher_is_better=False)


def loaded(title: str, metric: Metric | None, filter_name: str = "none", note: str = "") -> Task:
    return Task(Entry(f"{title}_task", column=title, limit=9), {}, metric, filter_name, 3, {title: 2.0}, note)


def log(item: int, metrics: dict[str, list[float]], filter_name: str = "none") -> dict[str, Any]:
    return {"id": f"t/{item}", "filter": filter_name, "metrics": metrics}


def right(items: Sequence[int], of: int = 20, filter_name: str = "none") -> list[dict[str, Any]]:
    return [log(item, {"acc": [float(item in items), 1.0]}, filter_name) for item in range(of)]


def test_results_come_from_items_that_pair_however_they_are_ordered() -> None:
    tasks = [loaded("A", Metric("acc", "mean"), note="differs"), loaded("outputs only", None)]
    logs = {"A": {"dense": right(range(10)), "hybrid": right([*range(5), 19])[::-1]}}
    [found] = compile_tasks(tasks, logs, ["dense", "hybrid"])
    assert (found.title, found.task, found.metric, found.shots, found.limit) == ("A", "A_task", "acc", 3, 9)
    assert (found.note, found.versions) == ("differs", {"A": 2.0})
    assert {name: score.value for name, score in found.scores.items()} == {"dense": 0.5, "hybrid": 0.3}
    assert found.deltas["hybrid"].value == pytest.approx(-0.2)
    assert found.deltas["hybrid"].p == pytest.approx(2 * 7 / 64), "5 lost, 1 gained"
    assert found.significant == {"hybrid": False}


def test_only_the_filter_that_is_asked_for_counts() -> None:
    tasks = [loaded("A", Metric("acc", "mean"), "strict-match")]
    logs = [*right(range(20), filter_name="flexible"), *right(range(5), filter_name="strict-match")]
    [found] = compile_tasks(tasks, {"A": {"dense": logs}}, ["dense"])
    assert (found.scores["dense"].value, found.scores["dense"].n) == (0.25, 20)
    assert found.metric == "acc,strict-match"


def test_verdicts_are_over_all_tasks_of_a_model_and_each_model_alone() -> None:
    """6 of 6 lost is p 0.03: enough for a task alone, not for one of two, but again where the other is certain."""
    tasks = [loaded(title, Metric("acc", "mean")) for title in "AB"]
    before, after, none = right(range(20)), right(range(6, 20)), right([])
    logs = {
        "A": {"dense": before, "hybrid": before, "tuned": none},
        "B": {"dense": before, "hybrid": after, "tuned": after},
    }
    alone = compile_tasks(tasks[1:], logs, ["dense", "hybrid"])
    assert [found.significant for found in alone] == [{"hybrid": True}]
    together = compile_tasks(tasks, logs, ["dense", "hybrid", "tuned"])
    assert [found.significant for found in together] == [{"hybrid": False, "tuned": True}] * 2
    logs["B"]["tuned"] = before
    together = compile_tasks(tasks, logs, ["dense", "hybrid", "tuned"])
    assert [found.significant["tuned"] for found in together] == [True, False], "each task has its own"


def test_the_average_is_over_shares_that_should_be_high() -> None:
    accuracies = [
        replace(
            MMLU,
            scores={"dense": Score(value, 0.03, 9), "hybrid": Score(value / 2, error, 9)},
            deltas={"hybrid": Delta(-value / 2, 0.01, 1.0)},
        )
        for value, error in ((0.4, 0.04), (0.8, None))
    ]
    lower = replace(MMLU, higher_is_better=False)
    found = average_of([*accuracies, lower, PERPLEXITY], ["dense", "hybrid"])
    assert found is not None
    assert found.tasks == 2
    assert found.values == pytest.approx({"dense": 0.6, "hybrid": 0.3})
    assert found.deltas == pytest.approx({"hybrid": -0.3})
    assert found.standard_errors == {"dense": pytest.approx(math.hypot(0.03, 0.03) / 2), "hybrid": None}
    assert found.delta_standard_errors == {"hybrid": pytest.approx(math.hypot(0.01, 0.01) / 2)}


def test_one_share_has_no_average() -> None:
    assert average_of([MMLU, PERPLEXITY], ["dense", "hybrid", "tuned"]) is None
