"""The report of an evaluation: every number is in its cell, and in the file."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from rewired.evaluate.cli import _print
from rewired.evaluate.report import markdown, write_report
from rewired.evaluate.results import Average, Results, average_of
from rewired.evaluate.statistics import Delta, Score
from rewired.evaluate.suites import Paper, load_suite

from .made_up_results import (
    COMMAND,
    DATE,
    DIVERGENCE,
    MMLU,
    PAPER,
    PERPLEXITY,
    alone,
    results,
    section,
    tables,
    task,
)

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
            "relative": "73.4 ± 1.2 %",
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
            "relative": "x 1.250",
        },
    ]
    assert [row["tuned"] for row in tuned] == ["67.00 ± 1.25", "9.90 ± 0.25"]
    assert [row["delta"] for row in tuned] == ["-1.14 ± 0.72", "-0.10 ± 0.04"]
    assert [row["significant"] for row in tuned] == ["no, p 0.1234", "yes, p 0.0124"]
    assert [row["relative"] for row in tuned] == ["98.3 ± 1.1 %", "x 0.990"]


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
    assert tables(markdown(results(tasks=[none]), COMMAND, DATE))[0][0]["relative"] == ""


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
        "relative": "75.0 ± 0.9 %",
    }
    assert (tuned[-1]["delta"], tuned[-1]["relative"]) == ("+1.00", "101.7 %")


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
    all_of_it = results(tasks=tasks, average=average, paper=load_suite("ladder-table4").paper)
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


def test_a_divergence_may_be_of_one_token() -> None:
    divergences = {"prose.txt": {"hybrid": replace(DIVERGENCE, tokens=1)}}
    assert "1 predicted token in windows" in markdown(results(divergences=divergences), COMMAND, DATE)


def test_the_report_says_what_was_run_and_what_was_not() -> None:
    text = markdown(results(), COMMAND, DATE)
    assert text.startswith(
        f"# dense against hybrid, tuned\n\n    {COMMAND}\n\n{DATE}: suite mine, float32 on cpu, 2 ranks,"
    )
    assert "- original **dense**, sha256 0123456789ab\n" in text
    assert "- rewired **hybrid**, sha256 111111111111, wiring `ladder@2-4`, tp_shards 4\n" in text
    assert "rewired 0.1.0, lm_eval 0.4.13" in text
    assert "0.05 over a model's 2 tasks together (Holm)" in text
    assert section(text, "Remarks").split("\n")[1:-1] == [
        "- HE+: not run. No package has its rows.",
        "- Perplexity ran in transformers.",
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
    for word in ("delta", "ignificant", "Divergence", "relative"):
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


def test_results_json_holds_everything_unrounded(tmp_path: Path) -> None:
    whole = results()
    write_report(whole, COMMAND, DATE, tmp_path / "new" / "folder")
    record = json.loads((tmp_path / "new" / "folder" / "results.json").read_text())
    assert (record.pop("command"), record.pop("date"), record.pop("verdicts")) == (COMMAND, DATE, {})
    assert record == as_json(asdict(whole))
    assert set(record) == {field.name for field in fields(Results)}
    assert record["tasks"][0]["scores"]["dense"] == {"value": 0.681412345, "standard_error": 0.0123, "n": 1500}
    assert record["divergences"]["prose.txt"]["hybrid"]["kl"] == 0.123456789


def test_an_original_that_gets_nothing_right_is_reported() -> None:
    """Which tiny models do, on hard tasks."""
    nothing = {name: Score(0.0, 0.0, 10) for name in MMLU.scores}
    tasks = [replace(MMLU, title=title, scores=nothing) for title in ("GSM", "HE+")]
    average = average_of(tasks, ["dense", "hybrid", "tuned"])
    assert "0.00 ± 0.00" in markdown(results(tasks=tasks, average=average), COMMAND, DATE)


def test_an_original_alone_is_written_whole(tmp_path: Path) -> None:
    write_report(alone(results()), COMMAND, DATE, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md"}


def test_where_rows_come_from_is_said_only_where_there_are_tasks() -> None:
    assert "rows from" in markdown(results(), COMMAND, DATE)
    assert "rows from" not in markdown(results(tasks=[]), COMMAND, DATE)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_no_name_is_cut_on_a_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = markdown(results(), COMMAND, DATE)
    _print(text)
    printed = capsys.readouterr().out
    assert "…" not in printed
    for cells in tables(text):
        for row in cells:
            assert next(iter(row.values())).strip("*") in printed
