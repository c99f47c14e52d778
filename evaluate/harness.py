"""lm-evaluation-harness's own tasks: its prompts, its filters, its metrics, on a model that it can ask.

Only two things are ours: the rows where there is no hub (`benchmarks.py`), which a subclass of the harness's task
loads, and the sandbox for model-written code (`sandbox.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from rewired.extras import missing
from rewired.quantities import count

from . import benchmarks, code_execution
from .metrics import LOSS, OF_WORDS, Metric, metric_of, pair
from .sandbox import check_confinement
from .suites import Entry

SEED = 1234  # of shots and of sampled generations
HARNESS = version("lm_eval")

# the folders that define the tasks of our suites: their index is read at once, that of all 14,000 tasks takes seconds
_FOLDERS = (
    *("arc", "gsm8k", "hellaswag", "humaneval", "ifeval", "lambada", "mmlu/default", "openbookqa", "piqa", "sciq"),
    *("super_glue/boolq", "truthfulqa", "wikitext", "winogrande"),
)


@dataclass(frozen=True)
class Task:
    """An entry of a suite, loaded: one task of the harness, or a group whose items count alike."""

    entry: Entry
    loaded: dict[str, Any]  # the harness's tasks by name
    metric: Metric
    filter: str
    shots: int
    versions: dict[str, Any]
    note: str  # how the rows differ from the hub's

    @property
    def answers(self) -> Counter[tuple[str, str]]:
        """How many answers it has, by the harness's task and filter."""
        counts = Counter[tuple[str, str]]()
        for name, task in self.loaded.items():
            items = len(task.eval_docs) if self.entry.limit is None else min(self.entry.limit, len(task.eval_docs))
            counts.update({(name, filtered.name): items for filtered in task._filters})
        return counts

    @cached_property
    def items_sha256(self) -> str:
        """Of all its documents, and of those that shots are drawn from: rows change, and their number need not."""
        found = hashlib.sha256()
        for task in self.loaded.values():
            for document in (*task.eval_docs, *(task.sampler.df if self.shots else ())):
                found.update(json.dumps(document, sort_keys=True, default=str).encode())
        return found.hexdigest()


def load_task(entry: Entry, rows: Path | None, runs_code: bool) -> Task:
    """The entry's task, ready to run. `rows` is the folder that `benchmarks.fetch` filled; None takes the hub's.

    Raises ValueError where it is unknown, lacks rows, a metric or a package, or runs code without permission.
    """
    manager = _manager(whole=False)
    if entry.task not in manager.all_tasks:
        manager = _manager(whole=True)
    if entry.task not in manager.all_tasks:
        near = get_close_matches(entry.task, manager.all_tasks)
        hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists them."
        raise ValueError(f"There is no task '{entry.task}' in lm-eval {HARNESS}: {hint}")
    loaded = _load(manager, entry, rows, entry.shots or 0)
    shots = entry.shots if entry.shots is not None else max(task.config.num_fewshot or 0 for task in loaded.values())
    if shots and entry.shots is None:
        loaded = _load(manager, entry, rows, shots)  # rows that serve as shots are not asked
    for name, task in loaded.items():
        task.set_config("num_fewshot", shots)
        if len(task.sampler.df or ()) < shots:
            raise MissingRowsError(
                f"Task {entry.task} cannot be loaded: no package has rows for its {count(shots, 'shot')}."
            )
        if name == "ifeval":
            _check_ifeval()
    if any(getattr(task, "UNSAFE_CODE", False) for task in loaded.values()):
        if not runs_code:
            raise ValueError(
                f"Task {entry.task} runs code that the model wrote: allow it with --run-model-code (in a sandbox), or "
                "name the other tasks with --tasks."
            )
        check_confinement()
    metric, filter_name = _metric(entry, loaded)
    versions = {name: task.VERSION for name, task in loaded.items()}
    return Task(entry, loaded, metric, filter_name, shots, versions, _note(loaded, rows, shots))


def run_task(model: Any, task: Task, runs_code: bool = False) -> list[dict[str, Any]]:
    """The harness's log of each of the task's items, with all metrics, in the order of the items.

    `model` is one of the harness's own, such as `askable` gives.
    """
    from lm_eval.evaluator import evaluate

    set_seed(SEED)
    for of_harness in task.loaded.values():
        of_harness.set_fewshot_seed(SEED)
    results = evaluate(
        model,
        {"tasks": task.loaded},
        limit=task.entry.limit,
        apply_chat_template=task.entry.chat,
        fewshot_as_multiturn=task.entry.chat,
        bootstrap_iters=0,
        confirm_run_unsafe_code=runs_code,
    )
    return [_log(name, sample, model) for name, samples in results["samples"].items() for sample in samples]


def askable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int | str) -> Any:
    """A loaded model of transformers as the harness asks it."""
    from lm_eval.models.huggingface import HFLM  # takes seconds

    asked = HFLM(model, tokenizer=tokenizer, batch_size=batch_size)
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(asked, kind, partial(getattr(asked, kind), disable_tqdm=not sys.stderr.isatty()))
    return asked


class MissingRowsError(ValueError):
    """The rows of a known task cannot be loaded."""


def _load(manager: Any, entry: Entry, rows: Path | None, shots: int) -> dict[str, Any]:
    """The harness's tasks of an entry, by name: one, or all of a group's."""
    try:
        with code_execution.sandbox_for_code_eval():
            task = entry.task if rows is None else _build_on_rows(manager, entry.task, rows, shots)
            loaded: dict[str, Any] = manager.load(task)["tasks"]
    except ImportError as error:
        raise ValueError(missing("evaluate", f"Task {entry.task}", error.name or str(error))) from None
    except (ValueError, OSError, LookupError, RuntimeError) as error:  # what `datasets` raises without a dataset
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        hint = "" if rows else " Without a hub, `rewired data fetch benchmarks DIR` and --data DIR have most rows."
        raise MissingRowsError(f"Task {entry.task} cannot be loaded: {reason}.{hint}") from None
    return loaded


def _build_on_rows(manager: Any, name: str, rows: Path, shots: int) -> Any:
    """The harness's task, group or list of tasks `name`, which takes its rows from the folder `rows`."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._factory import TaskFactory

    class PackagedTask(ConfigurableTask):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config={key: value for key, value in config.items() if key != "class"})

        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = benchmarks.load_rows(rows, self.DATASET_PATH, self.DATASET_NAME, shots)

    benchmarks.register_sentence_splitter(rows)
    # `TaskManager.load` takes no overrides for a task that it knows by name; the factory behind it does
    index = manager.task_index
    return TaskFactory().build(index[name], overrides={"class": PackagedTask}, registry=index)


def _metric(entry: Entry, loaded: dict[str, Any]) -> tuple[Metric, str]:
    """The entry's metric, and the filter of the responses that it scores."""
    first = next(iter(loaded.values()))
    name, _, filter_name = (entry.metric or next(iter(first.aggregation()))).partition(",")
    filters = [ensemble.name for ensemble in first._filters]
    if filter_name and filter_name not in filters:
        raise ValueError(f"Task {entry.task} has no filter '{filter_name}' but {', '.join(filters)}.")
    try:
        metrics = [metric_of(name, task.aggregation(), task.higher_is_better()) for task in loaded.values()]
    except ValueError as error:
        raise ValueError(f"Task {entry.task} cannot be scored: {error}.") from None
    return metrics[0], filter_name or filters[0]


def _note(loaded: dict[str, Any], rows: Path | None, shots: int) -> str:
    """The remark on this task for readers of the results, or an empty string."""
    first = next(iter(loaded.values()))
    notes = [f"{len(loaded)} tasks, of which all items count alike"] if len(loaded) > 1 else []
    if rows:
        notes.append(benchmarks.find_rows(first.DATASET_PATH, first.DATASET_NAME).note(shots))
    return "; ".join(note for note in notes if note)


def _check_ifeval() -> None:
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ValueError(
            "Task ifeval needs NLTK's sentence splitter: python -m nltk.downloader punkt_tab, or --data DIR."
        ) from None


@cache
def _manager(whole: bool) -> Any:
    """The harness's index of tasks: of all, or of those in our suites."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval.tasks

    datasets.disable_progress_bars()
    theirs = Path(lm_eval.tasks.__file__).parent
    near = [str(theirs / folder) for folder in _FOLDERS]
    return lm_eval.tasks.TaskManager(include_defaults=whole, include_path=None if whole else near)


def _log(task: str, sample: dict[str, Any], model: Any) -> dict[str, Any]:
    """One item as answers hold it; the harness's hashes in its id make it the same item in another run."""
    pairs = {name: pair(sample[name]) for name in sample["metrics"]}
    if of_words := pairs.get(OF_WORDS):
        pairs[LOSS] = [of_words[0], float(len(model.tok_encode(sample["arguments"][0][0])))]
    return {
        "task": task,
        "id": f"{task}/{sample['doc_id']}/{sample['doc_hash'][:16]}/{sample['prompt_hash'][:16]}",
        "filter": sample["filter"],
        "doc": sample["doc"],
        "prompt": sample["arguments"][0][0],
        "target": sample["target"],
        "responses": sample["filtered_resps"],
        "metrics": {name: value for name, value in pairs.items() if value is not None},
    }
