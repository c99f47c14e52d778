"""`rewired generate`, as a user runs it: on one rank and on three, with a rank that dies, and with bad input."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewired.adapt.model.student import in_4bit
from rewired.convert import Request, convert
from rewired.grid.size import TpSize
from rewired.serve.generate import Prompt, generate
from rewired.sources import checkpoint_folder, gguf
from tests.adapt.world import make_chat

COMMAND = [Path(sys.executable).with_name("rewired"), "generate"]


@pytest.fixture
def hybrid(smollm2: Path, tmp_path: Path) -> Path:
    """A real model, its upper half peeking; it has three key-value heads."""
    wiring = [{"layers": "15-30", "preset": "ladder", "peek": True}]
    return convert(smollm2, tmp_path / "hybrid", Request(wiring)).out


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["3", "1x2"])
def test_ranks_print_what_one_process_returns(ranks: str, hybrid: Path) -> None:
    expected = generate(hybrid, Prompt("Name three colours.", max_new_tokens=24), device="cpu")
    options = ["--prompt", "Name three colours.", "--max-new-tokens", "24"]
    done = run("hybrid", "--tp", ranks, "--device", "cpu", *options, cwd=hybrid.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"
    assert len(expected.split()) > 4


@pytest.mark.slow
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
def test_all_ranks_draw_the_same_tokens(hybrid: Path) -> None:
    """Else they would fall apart."""
    prompt = Prompt("Name three colours.", max_new_tokens=12, temperature=1.0, seed=1)
    assert generate(hybrid, prompt, TpSize(3), device="cpu") == generate(hybrid, prompt, device="cpu")


@pytest.mark.slow
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


def test_each_line_is_a_question_of_one_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_chat(tmp_path / "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages, answers = list[dict[str, str]](), list[str]()
    for question in ("Say river.", "And stone?"):
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(said, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say river.\n\nAnd stone?\n"))
    assert generate(folder, Prompt(None, max_new_tokens=8), device="cpu") == answers[1]
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_what_generation_config_asks_for_does_not_stop_it(tmp_path: Path) -> None:
    folder = make_chat(tmp_path / "tiny")
    expected = generate(folder, Prompt("Say river.", max_new_tokens=8), device="cpu")
    asked = {"num_beams": 3, "return_dict_in_generate": True, "stop_strings": ["|"]}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    assert generate(folder, Prompt("Say river.", max_new_tokens=8), device="cpu") == expected.partition("|")[0]


def test_4_bits_that_convert_does_not_know_are_run(tmp_path: Path) -> None:
    folder = make_chat(tmp_path / "tiny", hidden_size=128, intermediate_size=256)
    in_memory = AutoModelForCausalLM.from_pretrained(folder, quantization_config=in_4bit(torch.float32))
    in_memory.save_pretrained(folder)
    done = run(str(folder), "--device", "cpu", "--prompt", "Say river.", "--max-new-tokens", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    folder = make_chat(tmp_path / "tiny")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template, which a conversation needs"):
        generate(folder, Prompt(None, max_new_tokens=8), device="cpu")


BAD = {
    "no folder": (["./nowhere"], "'./nowhere' is not a folder here"),
    "no short name": (["smollm2-135n"], "There is no folder 'smollm2-135n' here, and it is neither a hub id"),
    "no file": (["nowhere.gguf"], "There is no file nowhere.gguf"),
    "no checkpoint": (["empty"], "empty holds no config.json"),
    "no hub": (["nobody/nothing"], "The hub does not answer, and nobody/nothing could not be read"),
    "more ranks than heads": (
        ["hybrid", "--tp", "3000", "--device", "cpu"],
        "--tp 3000 does not divide tp_shards 3",
    ),
    "no grid": (["hybrid", "--tp", "2x"], "--tp is '2x': give a number of ranks, or a grid of X x Y, such as 2x2."),
    "no GPU": (["hybrid", "--tp", "3", "--device", "cuda"], "3 ranks would take 3 GPUs and there are "),
    "no weights": (["weightless", "--tp", "3", "--device", "cpu"], "weightless holds no weights: "),
    "no prompt": (["hybrid", "--prompt", ""], "--prompt is empty"),
    "no prompt to continue": (["hybrid", "--no-chat"], "--no-chat continues a text: give a --prompt."),
    "many ranks that chat": (["hybrid", "--tp", "3"], "A chat runs on one rank: give a --prompt, or leave --tp out."),
    "dtype": (["hybrid", "--dtype", "int8"], "--dtype int8 is not known"),
    "device": (["hybrid", "--device", "abacus"], "--device abacus is not known"),
}


SLOW = ("more ranks than heads", "no GPU", "no weights")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [pytest.param(*case, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, case in BAD.items()],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, hybrid: Path) -> None:
    (hybrid.parent / "empty").mkdir()
    shutil.copytree(hybrid, hybrid.parent / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    if "--prompt" not in arguments and "give a --prompt" not in sentence:
        arguments = [*arguments, "--prompt", "x"]
    done = run(*arguments, cwd=hybrid.parent)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rewired generate: {sentence}")
    assert done.stderr.count("\n") == 1 and not done.stdout
