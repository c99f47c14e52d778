"""Whole evaluations of tiny models: what the harness says, item by item, on one process or more, once or resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from scipy import stats
from transformers import AutoModelForCausalLM

from rewired.evaluate import benchmarks, harness, measure
from rewired.evaluate.evaluate import PACKAGED_TEXT, EvaluateRequest, evaluate
from rewired.evaluate.harness import askable, load_task
from rewired.evaluate.measure import Runner
from rewired.evaluate.metrics import Metric
from rewired.evaluate.statistics import delta
from rewired.evaluate.suites import Entry

from .benchmark_rows import OLMO, carry
from .world import DENSE, LADDER, make_dense, make_rewired, make_rows, tokenizer

RUNNER = Runner("cpu", batch_size="4")
TASKS = ("piqa", "lambada_openai")
MMLU = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dense, ladder, standard (the dense weights under our class) and rows."""
    folder = tmp_path_factory.mktemp("world")
    dense = make_dense(folder / "dense")
    make_rewired(dense, folder / "ladder", LADDER)
    make_rewired(dense, folder / "standard", DENSE)
    make_rows(folder / "rows")
    return folder


def request(world: Path, *others: str, **changes: Any) -> EvaluateRequest:
    given = {"tasks": TASKS, "data": world / "rows", "texts": (), "text_tokens": 512}
    return EvaluateRequest(str(world / "dense"), [str(world / other) for other in others], **(given | changes))


def test_values_are_those_of_the_harness(world: Path, tmp_path: Path) -> None:
    """simple_evaluate on the same tasks at once, so in other batches, on a model of its own loading."""
    results = evaluate(
        request(world, "ladder", tasks=("piqa", "lambada_openai", "gsm8k_cot"), limit=4), RUNNER, tmp_path / "out"
    )
    tasks = [load_task(Entry(task.task), world / "rows", False) for task in results.tasks]
    for name in ("dense", "ladder"):
        model = AutoModelForCausalLM.from_pretrained(world / name, dtype=torch.float32)
        lm = HFLM(model, tokenizer=tokenizer(), batch_size=4)
        loaded = [one for task in tasks for one in task.loaded.values()]
        direct = simple_evaluate(
            lm, tasks=loaded, limit=4, bootstrap_iters=0, task_manager=harness._manager(whole=False)
        )
        assert direct
        for task in results.tasks:
            metric, _, filter_name = task.metric.partition(",")
            expected = direct["results"][task.task]
            key = f"{metric},{filter_name or 'none'}"
            assert task.scores[name].value == pytest.approx(expected[key], rel=1e-5), task.title
            assert task.scores[name].n == direct["n-samples"][task.task]["effective"]
    assert results.tasks[0].metric == "acc"
    assert results.tasks[1].metric == "perplexity", "the first of lambada's"


def test_the_items_of_a_group_count_alike(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MMLU, its 57 subjects of different sizes, against the harness's own aggregate."""
    rows = make_rows(tmp_path / "rows")
    subjects = [file.stem.removeprefix("mmlu_") for file in MMLU.glob("mmlu_*.yaml")]
    for number, subject in enumerate(subjects):
        for split, count in (("dev", 1), ("validation", 1), ("test", 1 + number % 3)):
            items = [
                {"question": f"{subject} {n}?", "subject": subject, "choices": list("wxyz"), "answer": n % 4}
                for n in range(count)
            ]
            carry(rows, f"{OLMO}/hails/mmlu_no_train/{subject}/{split}", items)
    asked = replace(request(world, tasks=("mmlu",)), data=rows)
    (mmlu,) = evaluate(asked, RUNNER, tmp_path / "out").tasks
    lm = HFLM(AutoModelForCausalLM.from_pretrained(world / "dense"), tokenizer=tokenizer(), batch_size=4)
    monkeypatch.setattr("datasets.load_dataset", lambda path, name: benchmarks.load_rows(rows, path, name, 0))
    direct = simple_evaluate(lm, tasks=["mmlu"], bootstrap_iters=0, task_manager=harness._manager(whole=False))
    assert direct and len(subjects) == 57
    assert mmlu.scores["dense"].n == sum(1 + number % 3 for number in range(57))
    assert mmlu.scores["dense"].value == pytest.approx(direct["groups"]["mmlu"]["acc,none"])
    assert mmlu.note == "57 tasks, of which all items count alike"


def test_the_same_weights_in_our_class_answer_the_same(world: Path, tmp_path: Path) -> None:
    asked = request(world, "standard", texts=(PACKAGED_TEXT,), control=str(world / "ladder"))
    results = evaluate(asked, RUNNER, tmp_path / "out")
    assert [model.role for model in results.models] == ["original", "rewired", "control"]
    for task in results.tasks:
        assert task.deltas["standard"].value == 0
        assert not task.significant["standard"]
    divergence = results.divergences[PACKAGED_TEXT.name]["standard"]
    assert divergence.kl == pytest.approx(0, abs=1e-9)
    assert set(divergence.agreement.values()) == {1.0}


@pytest.mark.slow
def test_two_ranks_answer_as_one(world: Path, tmp_path: Path) -> None:
    asked = request(world, "ladder", texts=(PACKAGED_TEXT,), limit=6, fresh=True)
    alone = evaluate(asked, RUNNER, tmp_path / "alone")
    together = evaluate(asked, replace(RUNNER, ranks=2), tmp_path / "together")
    for one, two in zip(alone.tasks, together.tasks, strict=True):
        for name in ("dense", "ladder"):
            assert two.scores[name].value == pytest.approx(one.scores[name].value, rel=1e-4)
    one, two = (results.divergences[PACKAGED_TEXT.name]["ladder"] for results in (alone, together))
    assert two.kl == pytest.approx(one.kl, rel=1e-4)
    assert two.perplexity == pytest.approx(one.perplexity, rel=1e-5)


def test_an_adapter_is_a_model_of_its_own(world: Path, tmp_path: Path) -> None:
    """BASE+ADAPTER, against the same weights merged by PEFT."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(world / "ladder"), LoraConfig(target_modules=["q_proj", "up_proj"])
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    tokenizer().save_pretrained(tmp_path / "merged")
    others = [f"{world / 'ladder'}+{tmp_path / 'adapter'}", str(tmp_path / "merged")]
    results = evaluate(replace(request(world), others=others), RUNNER, tmp_path / "out")
    perplexity = results.tasks[1]
    assert [model.name for model in results.others] == ["ladder+adapter", "merged"]
    assert perplexity.scores["ladder+adapter"].value == pytest.approx(perplexity.scores["merged"].value, rel=1e-4)
    assert perplexity.deltas["merged"].value != 0


def test_a_run_that_was_interrupted_goes_on_with_the_next_task(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run_task(model: Any, task: Any, *rest: Any) -> Any:
        asked.append(task.entry.task)
        if asked == list(TASKS):
            raise KeyboardInterrupt
        return real_run_task(model, task, *rest)

    real_run_task = harness.run_task
    monkeypatch.setattr(measure.harness, "run_task", run_task)
    with pytest.raises(KeyboardInterrupt):
        evaluate(request(world), RUNNER, tmp_path / "out")
    evaluate(request(world), RUNNER, tmp_path / "out")
    assert asked == ["piqa", "lambada_openai", "lambada_openai"]
    evaluate(request(world), RUNNER, tmp_path / "elsewhere")
    assert len(asked) == 3, "an original is asked once, whatever it is compared with"
    assert "dense: 2 of 2 tasks cached\n" in capsys.readouterr().err
    evaluate(request(world, tasks=["piqa"]), RUNNER, tmp_path / "elsewhere")
    assert "dense: 1 of 1 task cached\n" in capsys.readouterr().err
    evaluate(request(world, fresh=True), RUNNER, tmp_path / "elsewhere")
    assert len(asked) == 5


def test_answers_that_are_damaged_are_asked_for_anew(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = evaluate(request(world, tasks=["piqa"]), RUNNER, tmp_path / "out")
    (cached,) = (tmp_path / "cache" / "answers").glob("*.jsonl")
    for damage in (
        lambda lines: lines[:-1],
        lambda lines: [*lines, lines[0]],
        lambda lines: [lines[0]] * len(lines),
        lambda lines: [line[: len(line) // 2] for line in lines],
        lambda lines: [line.replace(b'"acc": [', b'"acc": ["x", ') for line in lines],
        lambda lines: [line.replace(b'"acc"', b'"other"') for line in lines],
        lambda lines: [],
        lambda lines: [b"7"],
        lambda lines: [b"\xff\xfe"],
    ):
        cached.write_bytes(b"\n".join(damage(cached.read_bytes().splitlines())))
        assert evaluate(request(world, tasks=["piqa"]), RUNNER, tmp_path / "out").tasks == whole.tasks
        said = capsys.readouterr().err
        assert f"{cached} " in said and " It is measured anew.\n" in said, said


def test_every_item_is_logged(world: Path, tmp_path: Path) -> None:
    evaluate(request(world, "ladder", tasks=("piqa",), limit=3), RUNNER, tmp_path / "out")
    for name in ("dense", "ladder"):
        logs = [json.loads(line) for line in (tmp_path / "out" / "samples" / name / "piqa.jsonl").open()]
        assert [log["doc"]["goal"] for log in logs] == ["Find river 0", "Find stone 1", "Find bread 2"]
        assert logs[0]["prompt"] == "Question: Find river 0\nAnswer:"
        assert set(logs[0]["metrics"]) == {"acc", "acc_norm"}


@pytest.mark.parametrize("adds_bos", [True, False])
def test_prompts_have_one_bos(adds_bos: bool, world: Path) -> None:
    """Also where a text begins with one, as chat templates' do: two would lower scores in silence."""
    own = tokenizer(adds_bos)
    asked = askable(AutoModelForCausalLM.from_pretrained(world / "dense"), own, 1)
    (together,), _ = asked.tok_batch_encode(["<s>river"])
    for ids in (asked.tok_encode("<s>river"), together.tolist()):
        assert ids == [own.bos_token_id, *own("river", add_special_tokens=False)["input_ids"]]


def test_all_models_read_the_originals_tokens(world: Path, tmp_path: Path) -> None:
    """A checkpoint saved after training may add a BOS, or have another chat template: the questions stay the same."""
    other = tmp_path / "ladder"
    shutil.copytree(world / "ladder", other)
    changed = tokenizer(adds_bos=True)
    changed.chat_template = "something else"
    changed.save_pretrained(other)
    values = [
        evaluate(replace(request(world), others=[str(folder)]), RUNNER, tmp_path / "out")
        .tasks[1]
        .scores["ladder"]
        .value
        for folder in (world / "ladder", other)
    ]
    assert values[0] == values[1]


def test_a_perplexity_that_is_five_times_worse_is_told_from_noise() -> None:
    """Its own t test would not: the exponential of a few losses has too heavy a tail."""
    generator = np.random.default_rng(0)
    losses = generator.gamma(2.0, 2.0, size=40)
    metric = Metric("perplexity", "perplexity", higher_is_better=False)
    original = np.stack([-losses, np.ones(40)], axis=1)
    worse = np.stack([-(losses + generator.gamma(0.8, 2.0, size=40)), np.ones(40)], axis=1)
    difference = delta(metric, original, worse)
    assert metric.value(worse.sum(0)) > 3 * metric.value(original.sum(0))
    assert difference.p == pytest.approx(stats.ttest_rel(worse[:, 0], original[:, 0]).pvalue)
    assert difference.p is not None and difference.p < 1e-4
