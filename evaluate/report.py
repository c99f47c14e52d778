"""The report of an evaluation: results.json and report.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rewired import tables
from rewired.divergence import Divergence
from rewired.model.regions import parse_regions
from rewired.model.wiring_text import wiring_text
from rewired.quantities import count

from .gates import FAILED, PASSED, UNDECIDED, Check, verdict
from .results import Average, Results, TaskResult
from .retrieval import DEPTHS
from .statistics import LEVEL
from .suites import Paper


def write_report(results: Results, command: str, date: str, folder: Path) -> None:
    """All files of an evaluation but the per-item logs, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    verdicts = {name: verdict(found) for name, found in results.checks.items()}
    record = {"command": command, "date": date, **asdict(results), "verdicts": verdicts}
    (folder / "results.json").write_text(json.dumps(record, indent=2, default=str), encoding="utf-8")
    (folder / "report.md").write_text(markdown(results, command, date), encoding="utf-8")


def markdown(results: Results, command: str, date: str) -> str:
    """The report's text."""
    parts = [f"# {plain(_title(results))}", "    " + " ".join(command.split()), _settings(results, date)]
    for name, found in results.checks.items():
        title = f"## Gate {plain(str(results.gate))}: {plain(name)} {_VERDICTS[verdict(found)]}"
        parts += [title, checks_table(found)]
    if results.tasks:
        parts += ["## Tasks", plain(results.about), _tasks_table(results), _how_to_read(results)]
    if results.retrieval:
        parts += ["## Retrieval from long texts", _retrieval_table(results)]
    if results.paper and results.tasks:
        parts += ["## What the paper published", _paper_table(results, results.paper)]
    for text, by_model in results.divergences.items():
        parts += [f"## Divergence on {plain(text)}", _divergence_table(results, by_model)]
    remarks = [f"{title}: not run. {why}" for title, why in results.left_out.items()] + results.notes
    remarks += [f"{task.title}: {task.note}." for task in results.tasks if task.note]
    if remarks:
        parts += ["## Remarks", "\n".join(f"- {plain(remark)}" for remark in remarks)]
    return "\n\n".join(part for part in parts if part) + "\n"


_VERDICTS = {PASSED: "passes", FAILED: "fails", UNDECIDED: "is undecided"}


def checks_table(found: Sequence[Check]) -> str:
    rows = [
        [
            plain(check.what),
            "" if check.value is None else f"{check.value:.4g}",
            "" if check.error is None else " to ".join(f"{end:.4g}" for end in check.interval),
            "" if check.bound is None else f"{'at least' if check.at_least else 'at most'} {check.bound:g}",
            check.verdict,
            f"{check.items_to_decide:,}" if check.items_to_decide else "",
        ]
        for check in found
    ]
    return _table(["measure", "value", "95 %", "asked", "verdict", "items that would decide"], rows)


def _retrieval_table(results: Results) -> str:
    names = [model.name for model in results.models]
    rows = [
        [task.title, f"{task.scores[names[0]].n}", *(_score(task, name) for name in names)]
        for task in results.retrieval
    ]
    how = (
        f"Passkeys and values of keys at {len(DEPTHS)} depths; right where greedy decoding gives all digits. "
        "± is one standard error."
    )
    return f"{how}\n\n" + _table(["task", "n", *map(plain, names)], rows)


def _title(results: Results) -> str:
    others = ", ".join(model.name for model in results.others)
    return f"{results.original.name} against {others}" if others else results.original.name


def plain(name: str) -> str:
    """Text escaped for Markdown: names come from folders, which may be called anything."""
    name = "".join(letter if letter.isprintable() else " " for letter in name)
    name = re.sub(r"([\\`*\[\]!~]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", name)
    return re.sub("[&<>|]", lambda match: f"&#{ord(match[0])};", name)


def _settings(results: Results, date: str) -> str:
    settings = results.settings
    on = settings["answers"]
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
    rows = f"rows from {'the hub' if on['rows'] == 'hub' else 'packages'}, " if results.tasks else ""
    suite = f"suite {results.suite}, " if results.suite else ""
    models = "\n".join(
        f"- {model.role} **{plain(model.name)}**, sha256 {model.sha256[:12]}{_wiring(model.config)}"
        for model in results.models
    )
    return (
        f"{date}: {suite}{on['dtype']} on {on['device']}, {count(on['tp'], 'rank')}, "
        f"batch size {on['batch_size']}, {rows}seed {on['seed']}; {versions}.\n\n{models}"
    )


def _wiring(config: dict[str, object]) -> str:
    entries: Any = config.get("wiring")  # of all layers
    if not entries:
        return ""
    layers = max(int(number) for entry in entries for number in re.findall(r"\d+", entry["layers"]))
    return f", wiring `{wiring_text(parse_regions(entries, layers))}`, tp_shards {config.get('tp_shards')}"


def _tasks_table(results: Results) -> str:
    """One table for each model that is compared with the original; the original's scores if there is none."""
    original = results.original.name
    if not results.others:
        rows = [[*_asked(task), _score(task, original)] for task in results.tasks]
        return _table(["task", "metric", "shots", "n", plain(original)], rows)
    return "\n\n".join(_pair_table(results, model.name) for model in results.others)


def _pair_table(results: Results, name: str) -> str:
    original = results.original.name
    rows = [_task_row(task, original, name) for task in results.tasks]
    if results.average:
        rows.append(_average_row(results.average, original, name))
    return _table(
        ["task", "metric", "shots", "n", plain(original), plain(name), "delta", "significant", "relative"], rows
    )


def _task_row(task: TaskResult, original: str, name: str) -> list[str]:
    before, after, delta = task.scores[original], task.scores[name], task.deltas[name]
    verdict = "yes" if task.significant[name] else "no"
    return [
        *_asked(task),
        _score(task, original),
        _score(task, name),
        _with_error(delta.value, delta.standard_error, task.scale, "+.2f"),
        "too few items" if delta.p is None else f"{verdict}, p {_p(delta.p)}",
        _relative(after.value, before.value, delta.standard_error, task.higher_is_better),
    ]


def _asked(task: TaskResult) -> list[str]:
    n = next(iter(task.scores.values())).n
    return [plain(task.title), task.metric, str(task.shots), f"{n:,}"]


def _score(task: TaskResult, name: str) -> str:
    return _with_error(task.scores[name].value, task.scores[name].standard_error, task.scale)


def _average_row(average: Average, original: str, name: str) -> list[str]:
    error = average.delta_standard_errors[name]
    scores = [_with_error(average.values[each], average.standard_errors[each], 100) for each in (original, name)]
    return [
        *("**average**", "", "", f"{average.tasks} tasks"),
        *scores,
        _with_error(average.deltas[name], error, 100, "+.2f"),
        "",
        _relative(average.values[name], average.values[original], error, True),
    ]


def _relative(value: float, original: float, error: float | None, higher_is_better: bool) -> str:
    """The error is the delta's, as if the original's value were known."""
    if not original:
        return ""
    if not higher_is_better:
        return f"x {value / original:.3f}"
    return _with_error(value / original, error and error / original, 100, ".1f") + " %"


def _how_to_read(results: Results) -> str:
    if not results.others:
        return "± is one standard error."
    return (
        "± is one standard error; that of a delta is paired, from the differences on the same items. *significant*: by "
        "McNemar's exact test where items are right or wrong, else by a paired t test (of a perplexity's log), at "
        f"{LEVEL} over a model's {count(len(results.tasks), 'task')} together (Holm). *no* means that this many items "
        "show no difference, not that there is none. *relative* is the model's value divided by the original's; "
        "nothing is subtracted for what guessing would score."
    )


def _paper_table(results: Results, paper: Paper) -> str:
    titles = [task.title for task in results.tasks]
    published = {name: paper.row(name) for name in paper.rows}
    ours = {
        f"**{plain(model.name)}**": {task.title: task.scale * task.scores[model.name].value for task in results.tasks}
        for model in results.models
    }
    about = f"{paper.source}: {paper.model}. The average is over the columns shown."
    averaged = [column for column in paper.columns if column not in paper.lower_is_better]
    if not set(averaged) <= set(titles):
        whole = ", ".join(f"{name} {paper.average(values):.2f}" for name, values in published.items())
        about += f" Over all that the paper averages, which is {', '.join(averaged)}: {whole}."
    rows = []
    for name, values in (published | ours).items():
        shown = {title: values[title] for title in titles if title in values}
        average = paper.average(shown)
        cells = [f"{shown[title]:.2f}" if title in shown else "" for title in titles]
        rows.append([name, *cells, "" if average is None else f"{average:.2f}"])
    return f"{about}\n\n" + _table(["", *map(plain, titles), "average"], rows)


def _divergence_table(results: Results, by_model: Mapping[str, Divergence]) -> str:
    first = next(iter(by_model.values()))
    head = [
        "model",
        "perplexity",
        "KL(original &#124;&#124; model)",
        "p95 of KL",
        *(f"top-{k}" for k in first.agreement),
    ]
    rows = [[plain(results.original.name), f"{first.perplexity_original:.2f}", "", "", *("" for _ in first.agreement)]]
    for name, divergence in by_model.items():
        rows.append(
            [
                plain(name),
                f"{divergence.perplexity:.2f}",
                _with_error(divergence.kl, divergence.kl_standard_error, form=".4f"),
                f"{divergence.kl_p95:.3f}",
                *(f"{100 * share:.1f} %" for share in divergence.agreement.values()),
            ]
        )
    how = (
        f"{count(first.tokens, 'predicted token')} in windows of {results.settings['window']}; KL in nats per token, "
        "± one standard error over windows; top-k is the share of the original's k likeliest tokens among the model's."
    )
    return f"{how}\n\n{_table(head, rows)}\n\n{_positions_table(by_model)}".rstrip()


def _positions_table(by_model: Mapping[str, Divergence]) -> str:
    starts = list(next(iter(by_model.values())).kl_by_position)
    rows = [
        [plain(name), *(f"{kl:.4f}" for kl in divergence.kl_by_position.values())]
        for name, divergence in by_model.items()
    ]
    return _table(["KL from position", *(f"{start:,}" for start in starts)], rows) if len(starts) > 1 else ""


def _with_error(value: float, error: float | None, scale: float = 1, form: str = ".2f") -> str:
    """A value and its standard error, None of a single item."""
    shown = f"{scale * value:{form}}"
    return shown if error is None else f"{shown} ± {scale * error:{form.lstrip('+')}}"


def _p(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return tables.markdown(head, rows).rstrip()
