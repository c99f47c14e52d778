"""`rewired generate`, as a user runs it: on one rank and on three, with a rank that dies, and with bad input."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rewired.convert import Request, convert
from rewired.serve.generate import Prompt, generate
from rewired.sources import checkpoint_folder, gguf

COMMAND = [Path(sys.executable).with_name("rewired"), "generate"]


@pytest.fixture
def hybrid(smollm2: Path, tmp_path: Path) -> Path:
    """A real model, its upper half peeking; it has three key-value heads."""
    wiring = [{"layers": "15-30", "preset": "ladder", "peek": True}]
    return convert(smollm2, tmp_path / "hybrid", Request(wiring)).out


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_three_ranks_print_what_one_process_returns(hybrid: Path) -> None:
    expected = generate(hybrid, Prompt("Name three colours.", max_new_tokens=24), device="cpu")
    options = ["--prompt", "Name three colours.", "--max-new-tokens", "24"]
    done = run("hybrid", "--tp", "3", "--device", "cpu", *options, cwd=hybrid.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"
    assert len(expected.split()) > 4


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_a_short_name_is_dequantised_once_for_all_ranks(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hub answers, and the package that carries the model has been taken before."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / smollm2_gguf.name).symlink_to(smollm2_gguf)
    monkeypatch.setenv("REWIRED_CACHE", str(cache))
    options = ["--prompt", "The capital of France is", "--no-chat", "--max-new-tokens", "3", "--device", "cpu"]
    done = run("smollm2-135m", "--tp", "3", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    (folder,) = (cache / "models").iterdir()
    monkeypatch.setattr(gguf, "dequantise", None)
    assert checkpoint_folder(str(smollm2_gguf)) == folder


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_all_ranks_draw_the_same_tokens(hybrid: Path) -> None:
    """Else they would fall apart."""
    prompt = Prompt("Name three colours.", max_new_tokens=12, temperature=1.0, seed=1)
    assert generate(hybrid, prompt, ranks=3, device="cpu") == generate(hybrid, prompt, device="cpu")


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_a_rank_killed_in_the_middle_ends_the_command(hybrid: Path) -> None:
    options = ["--tp", "3", "--device", "cpu", "--no-chat", "--prompt", "1 2 3 4 5 6 7", "--max-new-tokens", "4000"]
    command = subprocess.Popen(
        [*COMMAND, hybrid, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert command.stdout and command.stderr
    assert command.stdout.read(8), "it has begun to speak"
    (server,) = [child for child in psutil.Process(command.pid).children() if len(child.children()) == 3]
    ranks = server.children()
    ranks[1].kill()
    assert command.wait() == 1
    (sentence,) = [line for line in command.stderr.read().splitlines() if line.startswith("rewired generate: ")]
    assert sentence == "rewired generate: Rank 1 was killed by SIGKILL, so the other ranks were ended."
    psutil.wait_procs(ranks)
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_ctrl_c_is_one_sentence_too(hybrid: Path) -> None:
    """The terminal sends it to the command and to all of its ranks."""
    options = ["--tp", "3", "--device", "cpu", "--no-chat", "--prompt", "1 2 3 4 5 6 7", "--max-new-tokens", "4000"]
    command = subprocess.Popen(
        [*COMMAND, hybrid, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    assert command.stdout and command.stdout.read(8), "it has begun to speak"
    os.killpg(command.pid, signal.SIGINT)
    _, errors = command.communicate()
    assert command.returncode == 130
    assert "Traceback" not in errors
    assert "rewired generate: interrupted." in errors


BAD = {
    "no folder": (["./nowhere"], "'./nowhere' is not a folder here"),
    "no short name": (["smollm2-135n"], "There is no folder 'smollm2-135n' here, and it is neither a hub id"),
    "no file": (["nowhere.gguf"], "There is no file nowhere.gguf"),
    "no checkpoint": (["empty"], "empty holds no config.json"),
    "no hub": (["nobody/nothing"], "The hub does not answer, and nobody/nothing could not be read"),
    "more ranks than heads": (
        ["hybrid", "--tp", "3000", "--device", "cpu"],
        "tp_size 3000 does not divide tp_shards 3",
    ),
    "no GPU": (["hybrid", "--tp", "3", "--device", "cuda"], "3 ranks would take 3 GPUs and there are "),
    "no weights": (["weightless", "--tp", "3", "--device", "cpu"], "weightless holds no weights: "),
    "no prompt": (["hybrid", "--prompt", ""], "--prompt is empty"),
    "dtype": (["hybrid", "--dtype", "int8"], "--dtype int8 is not known"),
    "device": (["hybrid", "--device", "abacus"], "--device abacus is not known"),
}


SLOW = ("more ranks than heads", "no GPU", "no weights")


@pytest.mark.xdist_group("smollm2")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in BAD.items()],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, hybrid: Path) -> None:
    (hybrid.parent / "empty").mkdir()
    shutil.copytree(hybrid, hybrid.parent / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    arguments = arguments if "--prompt" in arguments else [*arguments, "--prompt", "x"]
    done = run(*arguments, cwd=hybrid.parent)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rewired generate: {sentence}")
    assert done.stderr.count("\n") == 1 and not done.stdout
