"""`rewired bench` on the command line: what it writes, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from transformers import LlamaForCausalLM
from typer.testing import CliRunner, Result

from rewired.bench.cli import add_commands
from rewired.cli import new_app
from rewired.plan import cli as plan_cli
from tests.bench.test_link import needs_links
from tests.rewired.tiny import llama_config, rewired_model

TRAINED = ("tiny", "--wirings", "ladder;none", "--prompt", "8", "--rounds", "3", "--device", "cpu")
SMALL = (*TRAINED, "--new", "2")


def run(command: str, *arguments: object) -> Result:
    app = new_app()
    app.callback()(lambda: None)
    add_commands(app)
    plan_cli.add_commands(app)
    return CliRunner().invoke(app, [command, *map(str, arguments)], env={"COLUMNS": "120"})


def bench(out: Path, *arguments: object) -> dict[str, Any]:
    done = run("bench", *arguments, "--out", out)
    assert done.exit_code == 0, done.output
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    return results


def test_on_two_ranks(tmp_path: Path) -> None:
    results = bench(tmp_path, *SMALL, "--tp", "2", "--batch", "1,2", "--eager")
    rows = results["rows"]
    assert [(row["batch"], row["wiring"]) for row in rows] == [
        (batch, wiring) for batch in (1, 2) for wiring in ("stock", "standard", "ladder", "none")
    ]
    for row in rows:
        assert (row["tp"], row["prompt"], row["new"], row["layers"], row["link"]) == (2, 8, 2, 4, "loopback")
        assert row["prefill_seconds"] > 0
        assert row["decode_seconds"] > 0
        assert "decode_compiled_seconds" not in row
        if row["wiring"] == "standard":
            assert row["speedup"]["prefill"]["standard"] == 1
    assert results["environment"]["torch"]
    report = (tmp_path / "report.md").read_text()
    assert "TP 2, batch 2, loopback:" in report
    assert report.count("| ladder |") == 2

    planned = run("plan", "tiny", "--gpus", "2", "--prompt", "64", "--calibrate", tmp_path / "results.json")
    assert planned.exit_code == 0, planned.output


def test_training_on_two_ranks(tmp_path: Path) -> None:
    results = bench(tmp_path, *TRAINED, "--tp", "2", "--train")
    assert [row["wiring"] for row in results["rows"]] == ["stock", "standard", "ladder", "none"]
    for row in results["rows"]:
        assert row["training_step_seconds"] > 0
        assert row.keys().isdisjoint({"prefill_seconds", "decode_seconds"})
        assert row["tokens_per_second"] == pytest.approx(8 / row["training_step_seconds"])
        assert row["waits"].keys() == {"training_step"}
    sent = {row["wiring"]: row["bytes_sent"]["training_step"] for row in results["rows"]}
    # of 4 layers 2 sums forward and 2 backward, float32, H 64; then what the embedding and the head add
    assert sent["standard"] == sent["ladder"] > 4 * 4 * 8 * 64 * 4
    assert sent["none"] == 0
    report = (tmp_path / "report.md").read_text()
    assert " waits |\n" in report

    planned = run("plan", "tiny", "--gpus", "2", "--calibrate", tmp_path / "results.json")
    assert planned.exit_code == 2
    assert "without wiring, model, tp, batch, prompt, prefill_seconds" in planned.stderr


@pytest.mark.parametrize(
    "mode",
    [
        ("--eager", "--new", "2"),
        pytest.param(("--train",), marks=pytest.mark.slow),
        pytest.param(("--train", "--fsdp", "2"), marks=pytest.mark.slow),
    ],
)
def test_on_a_grid_beside_the_stock_model_on_as_many_ranks(mode: tuple[str, ...], tmp_path: Path) -> None:
    """Nothing is timed unless `standard` on the grid gives stock's logits."""
    options = ("--wirings", "ladder; int8; none", "--tp", "1x2", *mode)
    done = run("bench", *TRAINED, *options, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "bench: int8 is left out: --tp 1x2 splits hidden_size 64, in groups of 64 over Y = 2" in done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    wirings = ["stock", "standard", "ladder", "none"]
    assert [(row["tp"], row["wiring"]) for row in results["rows"]] == [("1x2", wiring) for wiring in wirings]
    for measure in ("prefill", "decode") if "--eager" in mode else ("training_step",):
        sent = {row["wiring"]: row["bytes_sent"][measure] for row in results["rows"]}
        assert sent["ladder"] == sent["standard"] > sent["stock"] > sent["none"] == 0
    assert f"TP 1x2{' x FSDP 2' * ('--fsdp' in mode)}, batch 1, loopback:" in (tmp_path / "report.md").read_text()
    assert bench(tmp_path, *TRAINED, *options)["rows"] == results["rows"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    {
        ("--tp", "3x2"): "--tp 3x2 splits 8 heads, 8 KV heads and MLP width",
        ("--tp", "2x"): "--tp is '2x': give a number of ranks, or a grid of X x Y, such as 2x2.",
        ("--tp", "2", "--fsdp", "2"): "--fsdp shares out weights while they are trained: add --train",
        ("--tp", "2", "--fsdp", "0", "--train"): "--fsdp is 0: it must be at least 1.",
        ("--tp", "2x2", "--emulated"): "--tp 2x2 is a grid of ranks that transformers runs: leave out --emulated, or",
    }.items(),
)
def test_what_no_grid_does_is_refused(options: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    refused = run("bench", *TRAINED, *options, "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert sentence in refused.stderr
    assert not (tmp_path / "out").exists()


def test_traces(tmp_path: Path) -> None:
    bench(tmp_path, *SMALL, "--wirings", "ladder+int4/int8; none", "--tp", "2", "--eager", "--profile")
    traces = {f"{name}.rank{rank}.json.gz" for name in ("stock", "standard", "ladder+int4-int8") for rank in (0, 1)}
    assert {file.name for file in (tmp_path / "traces").iterdir()} == traces


def test_a_bench_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    first = bench(tmp_path, *SMALL, "--tp", "1", "--batch", "2", "--eager")
    more = bench(tmp_path, *SMALL, "--tp", "1", "--batch", "1,2", "--eager")
    assert [row["batch"] for row in more["rows"]] == [1] * 3 + [2] * 3  # of one rank there is no `none`
    assert more["rows"][3:] == first["rows"]
    refused = run("bench", *SMALL, "--tp", "1", "--new", "3", "--eager", "--out", tmp_path)
    assert refused.exit_code == 2
    assert f"{tmp_path} holds another bench, with another new" in refused.stderr


@pytest.mark.parametrize(
    "ranks",
    [("--tp", "1x2", "--new", "2"), pytest.param(("--tp", "2", "--fsdp", "2", "--train"), marks=pytest.mark.slow)],
)
def test_a_checkpoint_that_is_split_otherwise(ranks: tuple[str, ...], tmp_path: Path) -> None:
    """By FSDP2, too, or in the two blocks of a wiring. Its weights are those of stock, whose logits are checked."""
    checkpoint = tmp_path / "mine"
    LlamaForCausalLM(llama_config(tie_word_embeddings=True, num_hidden_layers=2)).save_pretrained(checkpoint)
    wirings = ("--wirings", "partial-0.5; none", "--prompt", "8", "--rounds", "3", "--eager")
    results = bench(tmp_path / "out", checkpoint, *ranks, *wirings, "--device", "cpu")
    assert [row["wiring"] for row in results["rows"]] == ["stock", "standard", "partial-0.5", "none"]


@pytest.mark.slow
def test_compiled_decoding_of_a_rewired_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mine"
    rewired_model([{"layers": "0-2", "preset": "ladder"}], 4, num_hidden_layers=2).save_pretrained(checkpoint)
    results = bench(
        tmp_path / "out", checkpoint, "--tp", "1", "--wirings", "own", "--prompt", "8", "--new", "2", "--rounds", "3"
    )
    assert [row["wiring"] for row in results["rows"]] == ["stock", "standard", "own"]
    for measure in ("prefill_compiled", "decode_compiled"):
        assert all(row[f"{measure}_seconds"] > 0 for row in results["rows"])


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "rewired", "bench", *SMALL, "--eager", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {(row["tp"], row["wiring"]) for row in rows} == {
        (2, wiring) for wiring in ("stock", "standard", "ladder", "none")
    }
    assert done.stdout.count("TP 2, batch 1, loopback") == 1  # the first rank's


def test_one_rank_among_emulated_ones(tmp_path: Path) -> None:
    """Eight ranks of which one runs; by hardware that was measured, and by the all-reduces of another bench."""
    results = bench(tmp_path / "alone", *SMALL, "--tp", "8", "--eager", "--emulated", "--link", "l40s:nccl")
    links = ["l40s:nccl", "l40s:nccl x 0.5", "l40s:nccl x 2"]
    assert [(row["tp"], row["link"], row["wiring"]) for row in results["rows"]] == [
        (8, link, wiring) for link in links for wiring in ("stock", "standard", "ladder", "none")
    ]
    assert all("link_adds" not in row for row in results["rows"])
    assert {entry["link"] for entry in results["all_reduce"]} == set(links)

    again = ("--tp", "8", "--eager", "--emulated", "--link", tmp_path / "alone" / "results.json")
    assert bench(tmp_path / "again", *SMALL, *again)["rows"]


def test_an_emulation_needs_the_times_of_as_many_ranks(tmp_path: Path) -> None:
    link = tmp_path / "two.json"
    times = [{"gpus": 2, "bytes": size, "seconds": 1e-5} for size in (1e3, 1e6)]
    link.write_text(json.dumps({"rows": [], "all_reduce": times}))
    options = (*SMALL, "--tp", "2,8", "--eager", "--emulated", "--link", link, "--out", tmp_path / "out")
    refused = run("bench", *options)
    assert (refused.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "has all-reduces of 2 ranks, and none of 8: bench with --tp 8, or give --tp 2 here." in refused.stderr


@needs_links
def test_over_a_slow_link(tmp_path: Path) -> None:
    results = bench(tmp_path, *SMALL, "--eager", "--link", "1gbit")
    assert results["link"] == "1gbit"
    assert {row["link"] for row in results["rows"]} == {entry["link"] for entry in results["all_reduce"]}
    assert {entry["link"] for entry in results["all_reduce"]} == {"loopback", "1gbit"}
    ladder = next(row for row in results["rows"] if (row["link"], row["wiring"]) == ("1gbit", "ladder"))
    assert set(ladder["link_adds"]) == {"prefill", "decode"}
    report = (tmp_path / "report.md").read_text()
    assert "what 1gbit adds to the machine's own link:" in report
    assert "| 16,777,216 |" in report


def test_two_benches_do_not_write_one_folder(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".running"):
        done = run("bench", *SMALL, "--tp", "1", "--out", tmp_path)
        assert (done.exit_code, [file.name for file in tmp_path.iterdir()]) == (2, [".running"])
    sentence = f"{tmp_path} is being written by another run: wait for it to end, or give another --out."
    assert done.stderr == f"rewired bench: {sentence}\n"


def test_an_output_that_is_a_file_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "sub" / "sub"):
        done = run("bench", *SMALL, "--out", out)
        sentence = f"rewired bench: {tmp_path / 'out'} is a file: give --out a folder.\n"
        assert (done.exit_code, done.stderr) == (2, sentence)


REFUSED = {
    "model": (["llama-9"], "There is no folder 'llama-9' here"),
    "shapes named": (["llama-9"], "Shapes without a checkpoint: llama-"),
    "wiring": (["tiny", "--wirings", "lader"], "--wirings lader: 'lader' is no wiring"),
    "empty wiring": (["tiny", "--wirings", "ladder;;none"], "has an empty wiring"),
    "own": (["tiny", "--wirings", "own"], "this model has none"),
    "tp": (["tiny", "--tp", "3"], "--tp 3 does not divide num_attention_heads 8"),
    "tp words": (["tiny", "--tp", "two"], "--tp is 'two': give a number of ranks"),
    "batch": (["tiny", "--batch", "0"], "--batch 0 is not a list of batches"),
    "prompt": (["tiny", "--prompt", "0"], "--prompt is 0: it must be at least 1"),
    "rounds": (["tiny", "--rounds", "2"], "--rounds is 2: quartiles need at least 3"),
    "layers": (["tiny", "--layers", "5"], "--layers is 5, and the model has 4"),
    "engine": (["tiny", "--engine", "sglang"], "--engine sglang is not known: choose transformers or vllm"),
    "emulated engine": (["tiny", "--emulated", "--engine", "vllm"], "--emulated is for one process that runs"),
    "emulated link": (["tiny", "--emulated", "--link", "1gbit"], "There is no hardware '1gbit': choose one of a100, "),
    "emulated file": (["tiny", "--emulated", "--link", "none.json"], "none.json is not a JSON file"),
    "no vLLM": (["tiny", "--engine", "vllm"], "--engine vllm needs the package 'vllm', which is not installed: "),
    "one token": (["tiny", "--engine", "vllm", "--new", "1"], "the first token counts as prefill"),
    "one token to learn": (["tiny", "--train", "--prompt", "1"], "give --prompt at least 2"),
    "training traced": (["tiny", "--train", "--profile"], "--profile traces a prefill, and --train times none"),
    "training that decodes": (["tiny", "--train", "--new", "7"], "leave out --new and --compiled"),
    "no ranks": (["tiny", "--tp", ""], "--tp is '': give a number of ranks"),
    "training in vLLM": (["tiny", "--train", "--engine", "vllm"], "--train times models in transformers"),
    "training's memory": (["llama-3.1-405b", "--train"], "take fewer --layers, a smaller --batch, or more ranks"),
    "dtype": (["tiny", "--dtype", "int8"], "--dtype int8 is not known"),
    "rate": (["tiny", "--link", "fast"], '"fast" is not the rate of a link: write it like 1gbit'),
    "no GPU": (["tiny", "--link", "no-p2p"], "--link no-p2p is for NVIDIA GPUs"),
    "memory": (["llama-3.1-405b"], "take fewer --layers, a smaller --batch, or more ranks"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("bench", *arguments, "--out", out, "--device", "cpu")
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert not out.exists()
