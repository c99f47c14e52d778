"""`rewired select` on the command line, the folder that it writes, and what `convert --wiring` takes of it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewired.select.cli import _print
from rewired.select.scores import MeasuredKL
from rewired.select.select import estimate, select
from tests.commands import run
from tests.convert.checkpoints import snapshot
from tests.select.asking import ask


def test_the_command(dense: Path, text: Path, tmp_path: Path) -> None:
    """And the one that it prints makes the model that was measured."""
    options = ["--wirings", "desync", "--budget", "1", "--text", text, "--tokens", "2048", "--tp-shards", "2"]
    done = run("rewired", "select", dense, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^desync-2x, layer \d: KL \d\.\d{4}", done.stderr, re.MULTILINE)) == 4
    out = tmp_path / "dense-select-desync-1"
    assert sorted(path.name for path in out.iterdir()) == ["scores.json", "selection.json", "wiring.json"]
    command = shlex.split(done.stdout.split("To make it:")[1])
    made = run(*command, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    config = json.loads(next(tmp_path.glob("dense-desync*/config.json")).read_text())
    told = json.loads((out / "selection.json").read_text())["candidates"][0]
    assert config["refit"]["kl"] == pytest.approx(told["measured"]["refitted"], abs=1e-6)


@pytest.mark.slow
def test_what_is_done_is_said_and_a_dry_run_says_what_would_be(dense: Path, text: Path, tmp_path: Path) -> None:
    options = ["--wirings", "mix", "--exposed", "6", "--text", text, "--tokens", "2048", "--tp-shards", "2"]
    command = ("rewired", "select", dense, *options, "--no-measure")
    dry = run(*command, "--dry-run", cwd=tmp_path)
    assert (dry.returncode, list(tmp_path.glob("dense-select*"))) == (0, []), dry.stderr
    assert re.match(
        r"16 scores of a layer to measure: [\d.]+ [MG]FLOP, about \d+ (s|min) at a third of the speed", dry.stdout
    )
    done = run(*command, cwd=tmp_path)
    said = done.stderr.splitlines()
    first = said.index("measuring layer 0 of 0 to 3: ladder, ladder+peek, parallel, desync-2x")
    assert said[0].startswith("16 scores of a layer to measure: ") and said[1] == "running the original"
    assert said[first + 1].startswith("ladder, layer 0: KL ")
    again = run(*command, "--dry-run", cwd=tmp_path)
    assert again.stdout == "All scores are known from earlier runs, and nothing is to be measured.\n"


def test_the_choices_to_measure_are_part_of_the_estimate(dense: Path, text: Path) -> None:
    plain, measured = (estimate(str(dense), ask(text, measure=measure)) for measure in (False, True))
    found = [re.search(r": ([\d.]+) ([MG])FLOP, about \d+ s at a third", said) for said in (plain, measured)]
    work = [float(each[1]) * {"M": 1e6, "G": 1e9}[each[2]] for each in found if each]
    assert plain.startswith("4 scores of a layer to measure: ") and work[1] > work[0] > 0
    assert measured.startswith("4 scores of a layer to measure and up to 2 refits of a whole choice: ")


@pytest.mark.parametrize("chosen", [0.2, 0.4])
def test_last_layers_that_measure_better_are_said(
    chosen: float, dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = select(str(dense), tmp_path / "out", ask(text, budget=1, measure=False))
    measured = [
        replace(done.candidates[0], name=name, measured=MeasuredKL(1.0, kl, 0.1))
        for name, kl in (("chosen", chosen), ("the last 1", 0.3))
    ]
    _print(replace(done, candidates=measured), ["ladder"], "convert [my]-llama ...")
    printed = capsys.readouterr().out
    assert ("Measured, the last 1 are better" in printed) == (chosen > 0.3)
    assert "convert [my]-llama ..." in printed


def test_the_last_layers_carry_smollm2s_gate(
    dense: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = select(str(dense), tmp_path / "out", ask(text, budget=2, measure=False))
    for layers, is_there in ("2-4", True), ("1-3", False):
        wiring = [{"layers": layers, "preset": "ladder", "peek": True}]
        _print(replace(done, candidates=[replace(done.candidates[0], wiring=wiring)]), ["ladder"], "convert")
        assert ("SmolLM2 recommended" in capsys.readouterr().out) == is_there


BAD = {
    "wiring": (
        ["--wirings", "laddr", "--budget", "2"],
        "'laddr' is no wiring: begin with ladder, ",
    ),
    "desync-4x": (["--wirings", "desync-4x", "--budget", "2"], "Layers cannot be chosen one by one for 'desync-4x'"),
    "no budget": ([], "Say what the choice may take"),
    "two budgets": (["--budget", "2", "--exposed", "4"], "Say what the choice may take"),
    "mix": (["--wirings", "mix", "--budget", "2"], "give --exposed or --bytes instead of --budget"),
    "too many": (["--budget", "5"], "--budget 5 does not fit: the model has 4 layers"),
    "too exposed": (["--exposed", "8"], "--exposed 8 does not fit"),
    "not exposed enough": (
        ["--wirings", "parallel", "--exposed", "3"],
        "and no choice of parallel takes less than 4",
    ),
    "no bytes": (
        ["--wirings", "int8", "--bytes", "0.4"],
        "and no choice of standard+int8 takes less than 1.",
    ),
    "all bytes": (["--wirings", "mix", "--bytes", "1"], "--bytes 1 does not fit"),
    "endless bytes": (["--wirings", "mix", "--bytes", "inf"], "--bytes inf does not fit"),
    "no number": (["--wirings", "mix", "--bytes", "nan"], "--bytes nan makes no sense: give a share from 0 to 1"),
    "no shards": (["--budget", "2", "--tp-shards", "0"], "tp_shards is 0: it must be an integer of at least 1"),
    "tokens": (["--budget", "2", "--tokens", "0"], "--tokens 0 makes no sense"),
    "text": (["--budget", "2", "--text", "nowhere.txt"], "There is no calibration text nowhere.txt"),
    "short": (["--budget", "2", "--text", "short.txt"], "short.txt is too short to calibrate on"),
    "shards": (["--budget", "2", "--tp-shards", "3"], "tp_shards 3 does not divide"),
    "out": (["--budget", "2", "--out", "there"], "there exists"),
    "a link": (["--budget", "2", "--out", "link"], "link exists"),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, dense: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rewired.cli import main

    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious.txt").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    before = snapshot(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rewired", "select", str(dense), *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    printed = capfd.readouterr()
    assert printed.err.startswith("rewired select: ") and printed.err.count("\n") == 1
    assert sentence in printed.err
    assert snapshot(tmp_path) == before


def test_what_came_meanwhile_is_not_replaced(dense: Path, text: Path, tmp_path: Path) -> None:
    def somebody_else(*_: Any) -> None:
        (tmp_path / "choice").mkdir(exist_ok=True)
        (tmp_path / "choice" / "precious.txt").write_text("mine")

    with pytest.raises(ValueError, match="exists: choose another name"):
        select(str(dense), tmp_path / "choice", ask(text), on_score=somebody_else)
    assert [path.name for path in (tmp_path / "choice").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "There is no file nothing.json."),
        ("{", "is neither YAML nor JSON that can be read"),
        ("{}", "holds no wiring"),
        ("[1]", "A wiring entry needs 'layers' and 'preset', this one has 1"),
        ('[{"layers": "0-9", "preset": "ladder"}]', "0-9"),
        ('[{"layers": "0-2", "preset": "ladder", "num_layers": 3}]', "'num_layers' is no option of layers 0-2"),
    ],
)
def test_a_broken_wiring_file_is_said(content: str, sentence: str, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "wiring.json").write_text(content)
    done = run("convert", dense, "out", "--wiring", "wiring.json" if content else "nothing.json", cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
