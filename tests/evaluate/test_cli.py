"""The command as users run it: what it writes and prints, and one sentence for what it cannot do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rewired.convert import RefitRequest, Request, convert
from rewired.evaluate import cli
from rewired.evaluate.evaluate import PACKAGED_TEXT
from rewired.evaluate.measure import Runner
from rewired.evaluate.retrieval import DEPTHS, REPEATS
from rewired.extras import missing

from ..convert.checkpoints import edit_json
from .world import LADDER, make_dense, make_rewired, make_rows, tokenizer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    dense = make_dense(folder / "dense")
    make_rewired(dense, folder / "ladder", LADDER)
    make_rows(folder / "rows")
    text = folder / "calibration.txt"
    text.write_text(PACKAGED_TEXT.read_text()[:20_000])
    fitted = Request(LADDER, refit=RefitRequest(str(text), 2048))
    convert(str(dense), folder / "out" / "final", fitted)
    return folder


@pytest.fixture(autouse=True)
def _in_the_world(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    signal.signal(signal.SIGTERM, before)
    return int(ended.value.code or 0)


def test_a_whole_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a suite of our own: left out is what no package has, and the report says so."""
    suite = tmp_path / "mine.yaml"
    suite.write_text("tasks: [{task: piqa, metric: acc, column: PIQA}, {task: wikitext, column: Wikitext}]")
    out = tmp_path / "out"
    arguments = ("dense", "ladder", "--suite", str(suite), "--data", "rows", "--out", str(out))
    assert run(monkeypatch, *arguments) == 0

    printed = capsys.readouterr()
    assert "PIQA" in printed.out
    assert printed.out.endswith("report.md and results.json, and the answers to each item\n")
    assert "Left out: Task wikitext cannot be loaded: the rows of EleutherAI/wikitext_document_level" in printed.err
    assert {path.name for path in out.iterdir()} == {"report.md", "results.json", "samples"}
    results = json.loads((out / "results.json").read_text())
    assert results["command"] == "evaluate " + " ".join(arguments)
    assert [model["role"] for model in results["models"]] == ["original", "rewired"]
    assert results["tasks"][0]["scores"]["dense"]["n"] == 12
    assert results["settings"]["answers"]["seed"] == 1234
    assert results["models"][1]["config"]["wiring"][1]["preset"] == "ladder"
    assert "Wikitext: not run." in (out / "report.md").read_text()
    assert results["divergences"]["prose.txt"]["ladder"]["kl"] > 0


def test_retrieval_alone_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path) -> None:
    for name in ("dense", "ladder"):
        (tmp_path / name).symlink_to(world / name)
    monkeypatch.chdir(tmp_path)
    for models in (["dense", "ladder"], ["dense"]):
        assert run(monkeypatch, *models, "--retrieval", "256", "--no-text") == 0
        results = json.loads(Path(f"evaluation-{'-'.join(models)}-retrieval", "results.json").read_text())
        assert (results["divergences"], [list(each["scores"]) for each in results["retrieval"]]) == ({}, [models])


def test_a_gate_decides_on_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path) -> None:
    gate, out = tmp_path / "mine.yaml", tmp_path / "out"
    arguments = ("dense", "ladder", "--gate", str(gate), "--retrieval", "256,100000", "--out", str(out))
    retrieval = "lost in retrieval, where the original finds nothing"
    for bounds, status, asked in (("kl: 100", 0, []), ("kl: 0.001\nretrieval_loss: 1", 1, [retrieval])):
        gate.write_text(bounds)
        assert run(monkeypatch, *arguments, "--text-tokens", "256", "--window", "128") == status
        results = json.loads((out / "results.json").read_text())
        assert results["verdicts"] == {"ladder": "failed" if status else "passed"}
        assert [check["what"] for check in results["checks"]["ladder"]] == ["KL on prose.txt", *asked]
    report = (out / "report.md").read_text()
    assert "## Gate mine: ladder fails" in report
    assert "| KL from position | 0 | 64 |" in report
    assert f"| 256 tokens | {2 * len(DEPTHS) * REPEATS} |" in report and "100,000 tokens" not in report
    assert list(results["divergences"]["prose.txt"]["ladder"]["kl_by_position"]) == ["0", "64"]
    gate.write_text("kl: 1e-6")
    twin = shutil.copytree(world / "dense", tmp_path / "twin")
    control = ("dense", str(twin), "--control", "ladder", *arguments[2:4])
    assert run(monkeypatch, *control, "--text-tokens", "256", "--window", "128") == 0, "a control need not pass"


def test_a_gate_s_verdict_is_written_on_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path) -> None:
    gate, model = tmp_path / "mine.yaml", shutil.copytree(world / "ladder", tmp_path / "model")
    (model / "README.md").write_text("# A model\n\nIt is good.\n\n## Training\n\n5 steps\n")
    arguments = ("--card", "--out", str(tmp_path / "out"), "--text-tokens", "256", "--window", "128")
    for bound, verdict in ((0.001, "failed"), (100, "passed")):
        gate.write_text(f"kl: {bound}\n")
        run(monkeypatch, "dense", str(model), "--gate", str(gate), *arguments)
        card = (model / "README.md").read_text()
        assert card.count("## Gate") == card.count(f"## Gate mine: {verdict}") == card.count("| KL on prose.txt |") == 1
        assert card.startswith("# A model\n\nIt is good.\n\n## Gate")
        assert card.endswith("\n\n## Training\n\n5 steps\n")


def test_a_gate_alone_finds_the_original_that_a_model_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path
) -> None:
    """Also where tasks are asked: a model without anything to compare it with passes nothing."""
    (tmp_path / "mine.yaml").write_text("mean_recovery: 0\n")
    arguments = ("--gate", str(tmp_path / "mine.yaml"), "--tasks", "piqa", "--data", "rows", "--no-text")
    assert run(monkeypatch, "out/final", *arguments, "--out", str(tmp_path / "out")) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["verdicts"] == {"out/final": "passed"}
    assert [check["what"] for check in results["checks"]["out/final"]][:1] == ["mean recovery of 1 task"]


def test_a_task_that_is_named_counts_as_the_gate_s_suite_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path
) -> None:
    """By the suite's metric, which may not be the task's first one."""
    (tmp_path / "own.yaml").write_text("tasks: [{task: piqa, metric: acc_norm}, {task: sciq}]\n")
    (tmp_path / "mine.yaml").write_text(f"mean_recovery: 0\nsuite: {tmp_path / 'own.yaml'}\n")
    arguments = ("--gate", str(tmp_path / "mine.yaml"), "--tasks", "piqa", "--data", "rows", "--no-text")
    assert run(monkeypatch, "dense", "ladder", *arguments, "--out", str(tmp_path / "out")) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(task["task"], task["metric"]) for task in results["tasks"]] == [("piqa", "acc_norm")]


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        ("mean_recovery: 1", ("dense",), "dense names none: evaluate ORIGINAL dense"),
        (
            "mean_recovery: 1",
            ("dense", "ladder"),
            "asks for tasks: give --suite or --tasks, or a suite in its file",
        ),
        ("kl: 1", ("dense", "ladder", "--no-text"), "asks for the divergence on a text: leave out --no-text"),
        (
            "kl: 1",
            ("dense", "another", "--card"),
            "--card writes on the README.md in a model's folder, and another has",
        ),
        ("retrieval_loss: 1", ("dense", "ladder", "--retrieval", "100000"), "dense reads at most"),
        ("retrieval_loss: 1", ("dense", "ladder", "--retrieval", "10"), "Retrieval in 10 tokens has no room"),
    ],
)
def test_what_a_gate_would_lack_is_said_before_anything_is_measured(
    content: str, arguments: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    world: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "mine.yaml").write_text(content)
    monkeypatch.setattr(Runner, "run", lambda *_: pytest.fail("something was measured"))
    out = tmp_path / "out"
    assert run(monkeypatch, *arguments, "--gate", str(tmp_path / "mine.yaml"), "--out", str(out)) == 2
    assert sentence in capsys.readouterr().err
    assert not out.exists()


def test_a_model_alone_is_compared_with_the_original_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path
) -> None:
    """In a report that calls it what tells it from others that a trainer called `final`."""
    assert run(monkeypatch, "out/final", "--text-tokens", "256", "--out", str(tmp_path / "report")) == 0
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert [(model["name"], model["role"]) for model in results["models"]] == [
        ("dense", "original"),
        ("out/final", "rewired"),
    ]
    assert results["divergences"]["prose.txt"]["out/final"]["kl"] > 0


def test_of_an_original_that_changed_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(world / "out" / "final", tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", refit=_of_another_base(tmp_path / "model" / "config.json"))
    assert run(monkeypatch, str(tmp_path / "model")) == 2
    assert "dense, which is needed as its original: its model.safetensors is no longer" in capsys.readouterr().err


def _of_another_base(config: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(config.read_text())["refit"]
    return record | {"base": record["base"] | {"weights": {"model.safetensors": "0" * 64}}}


def test_the_folder_is_called_after_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: Path) -> None:
    for name in ("dense", "out"):
        (tmp_path / name).symlink_to(world / name)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "dense", "out/final", "--text-tokens", "256") == 0
    assert (tmp_path / "evaluation-dense-out--final-text" / "report.md").is_file()


ALONE = {
    "converted only": (["ladder"], "A text compares a model with its original, and ladder names none: evaluate ORIG"),
    "dense": (["dense"], "A text compares a model with its original, and dense names none: evaluate ORIGINAL dense."),
    "no text": (["ladder", "--no-text"], "Nothing would be measured: name --suite or --tasks, or leave out --no-text."),
    "two, no text": (["dense", "ladder", "--no-text"], "Nothing would be measured: "),
}


@pytest.mark.parametrize(("arguments", "sentence"), ALONE.values(), ids=ALONE)
def test_where_there_is_nothing_to_measure_nothing_is_written(
    arguments: list[str],
    sentence: str,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("dense", "ladder"):
        (tmp_path / name).symlink_to(world / name)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments, "--out", "report") == 2
    assert capsys.readouterr().err.startswith(f"evaluate: {sentence}")
    assert not (tmp_path / "report").exists()


BAD = {
    "unknown suite": (["--suite", "quik"], "There is no suite 'quik': take quick"),
    "unknown task": (["--tasks", "pica"], "There is no task 'pica' in lm-eval 0.4.13: did you mean "),
    "no model": (["nowhere"], "There is no folder 'nowhere' here, and it is neither"),
    "no tokenizer": (["no-tokenizer"], "no-tokenizer has no tokenizer that can be loaded: "),
    "no weights": (["no-weights"], "no-weights holds no weights: "),
    "a wiring that is not run": (["not-run"], "not-run has a wiring in its config.json but says model_type llama"),
    "another vocabulary": (["stranger"], "dense and stranger have different vocabularies"),
    "no adapter": (["ladder+dense"], "dense holds no adapter_config.json: after the + goes"),
    "twice": (["ladder", "ladder"], "Two models are called ladder: rename a folder"),
    "limit": (["ladder", "--limit", "0"], "--limit 0 makes no sense"),
    "batch size": (["ladder", "--batch-size", "many"], "--batch-size many makes no sense"),
    "dtype": (["ladder", "--dtype", "int8"], "--dtype int8 is not known"),
    "device": (["ladder", "--device", "abacus"], "--device abacus is not known"),
    "engine": (["ladder", "--engine", "steam"], "--engine steam is not known: choose transformers or vllm."),
    "no vLLM": (["ladder", "--engine", "vllm"], "--engine vllm needs the package 'vllm', which is not installed: "),
    "no GPU": (["ladder", "--device", "cuda", "--tp", "2"], "2 ranks would take 2 GPUs and there are "),
    "ranks": (["ladder", "--tp", "3"], "--tp 3 does not divide "),
    "no text": (["ladder", "--text", "nothing.txt"], "The text nothing.txt cannot be read: "),
    "short text": (["ladder", "--text", "short.txt"], "The text is too short"),
    "long windows": (["ladder", "--window", "600"], "dense reads at most 512 tokens: give a --window up to that."),
    "no data": (["ladder", "--tasks", "piqa", "--data", "dense"], "dense does not hold the benchmarks"),
    "code": (["ladder", "--tasks", "humaneval", "--data", "rows"], "Task humaneval runs code that the model wrote"),
    "no template": (
        ["ladder", "--suite", "chat.yaml", "--data", "rows"],
        "The chat template of dense cannot be used: ",
    ),
    "out": (["ladder", "--out", "dense"], "dense exists and is not an earlier evaluation: name another --out."),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    sentence: str,
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And nothing is written, no model loaded."""
    shutil.copytree(world / "ladder", tmp_path / "ladder")
    shutil.copytree(world / "dense", tmp_path / "dense")
    (tmp_path / "rows").symlink_to(world / "rows")
    monkeypatch.chdir(tmp_path)
    _make_bad(tmp_path)
    monkeypatch.setattr("rewired.evaluate.measure.load_model", lambda *_: pytest.fail("a model was loaded"))
    before = {path.name for path in tmp_path.iterdir()}
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "out"]
    assert run(monkeypatch, "dense", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"evaluate: {sentence}")
    assert printed.err.count("\n") == 1 and not printed.out
    assert {path.name for path in tmp_path.iterdir()} - before <= {"cache"}


def _make_bad(folder: Path) -> None:
    ladder = folder / "ladder"
    shutil.copytree(ladder, folder / "no-tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(ladder, folder / "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(ladder, folder / "not-run")
    edit_json(folder / "not-run" / "config.json", model_type="llama")
    shutil.copytree(ladder, folder / "stranger")
    other = tokenizer()
    other.add_tokens(["<extra>"])
    other.save_pretrained(folder / "stranger")
    (folder / "short.txt").write_text("")
    (folder / "chat.yaml").write_text("tasks: [{task: piqa, chat: true}]")
    for name in ("dense", "ladder"):
        edit_json(folder / name / "tokenizer_config.json", chat_template=None)
        (folder / name / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_the_next_task(world: Path, tmp_path: Path) -> None:
    """SIGKILL after the first task's answers are kept; what is under way leaves nothing behind that counts."""
    command = [Path(sys.executable).parent / "evaluate", "dense", "--tasks", "piqa,gsm8k_cot", "--data", "rows"]
    command += ["--no-text", "--batch-size", "1", "--limit", "5", "--out", tmp_path / "out"]
    environment = os.environ | {"REWIRED_CACHE": str(tmp_path / "cache")}
    running = subprocess.Popen(command, cwd=world, env=environment, stderr=subprocess.DEVNULL)
    while not list((tmp_path / "cache" / "answers").glob("piqa-*")) and running.poll() is None:
        time.sleep(0.01)
    running.kill()
    running.wait()
    assert not (tmp_path / "out").exists()
    done = subprocess.run(command, cwd=world, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dense: 1 of 2 tasks cached" in done.stderr
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]) == 2


def test_a_missing_package_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    code = "import sys; sys.modules['scipy'] = None; from rewired.scripts import evaluate; evaluate()"
    command = [sys.executable, "-c", code, "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == f"evaluate: {missing('evaluate', 'Comparing models', 'scipy')}\n"


@pytest.mark.slow
def test_the_folders_name_does_not_hide_hugging_faces_package(tmp_path: Path) -> None:
    """`import evaluate` is theirs, at the repository's root too: our folder is no package by that bare name."""
    command = [sys.executable, "-c", "import evaluate; print(evaluate.__file__)"]
    for folder in (tmp_path, Path(__file__).parents[2]):
        theirs = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert "site-packages" in theirs.stdout, theirs.stderr


def test_data_fetch_names_what_it_knows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from rewired.cli import main

    monkeypatch.setattr(sys, "argv", ["rewired", "data", "fetch", "bench", "somewhere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    known = "benchmarks, calibration, instruct"
    assert capsys.readouterr().err == f"rewired data fetch: 'bench' is not known: there are {known}.\n"
