"""`rewired plan` on the command line: tables, JSON, the commands that it prints, and what it refuses."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rewired.checkpoint.named_shapes import named_shapes
from rewired.cli import new_app
from rewired.convert import cli as convert_cli
from rewired.plan.cli import add_commands
from rewired.plan.ranking import convert_command
from rewired.plan.wirings import RANKED, candidates, selected
from tests.rewired.tiny import rewired_model

TINY = ["tiny", "--prompt", "64", "--new", "8"]


def run(*arguments: object) -> Result:
    app = new_app()
    app.callback()(lambda: None)
    add_commands(app)
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "100"})


def plan(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_the_table() -> None:
    done = run("llama-3.1-70b", "--explain", "--batch", "1")
    assert done.exit_code == 0, done.output
    for words in ("batch 1: 19.5 GB of weights", "ladder+peek@", "none", "standard", "where the time of a layer goes"):
        assert words in done.output
    assert "measured on SmolLM2-135M; " in done.output
    assert done.output.count("\n    convert llama-3.1-70b ") == 3


def test_the_json_is_ranked_and_complete() -> None:
    report = plan("llama-3.1-70b", "--batch", "1,16", "--all")
    for batch in (1, 16):
        speedups = [row["speedup"] for row in report["rows"] if row["batch"] == batch]
        assert len(speedups) == 3 + 4 * len(RANKED)  # standard, none and DELAYED; each on four numbers of layers
        assert speedups == sorted(speedups, reverse=True)
    standard = next(row for row in report["rows"] if row["wiring"] == "standard")
    assert (standard["speedup"], standard["exposed_all_reduces"], standard["kl"]) == (1, 160, 0)
    assert standard["exposed_bytes"] == 160 * 8192 * 2
    ladder = next(row for row in report["rows"] if row["wiring"] == "ladder@0-80")
    low, high = ladder["speedup_range"]
    assert 1 < low < ladder["speedup"] < high
    assert (ladder["exposed_all_reduces"], ladder["kl"]) == (1, 0.911)


def test_vllm_wins_less_than_the_paper() -> None:
    """Issue 36: hiding everything at batch 1 wins about 1.13 on vLLM's kernels, and far more on NCCL's."""
    arguments = ("llama-3.1-70b", "--batch", "1", "--goal", "latency")
    bounds = {library: plan(*arguments, "--library", library)["rows"][0] for library in ("vllm", "nccl")}
    assert {row["wiring"] for row in bounds.values()} == {"none"}
    assert bounds["vllm"]["speedup"] == pytest.approx(1.13, abs=0.03)
    assert bounds["nccl"]["speedup"] > 1.3


def test_on_pcie_fewer_bytes_win_more_than_overlap() -> None:
    report = plan("llama-3.1-70b", "--hardware", "l40s", "--gpus", 4, "--goal", "ttft", "--batch", 1, "--all")
    speedups = {row["wiring"]: row["speedup"] for row in report["rows"]}
    assert speedups["desync-4x@0-80"] > speedups["desync-2x@0-80"] > speedups["ladder@0-80"]


@pytest.mark.parametrize("goal", ["ttft", "latency", "throughput"])
def test_goals_rank_by_what_they_are_called(goal: str) -> None:
    rows = plan("llama-3.1-8b", "--goal", goal, "--batch", "4", "--new", 100)["rows"]
    dense = next(row for row in rows if row["wiring"] == "standard")
    for row in rows:
        seconds = {
            "ttft": lambda one: one["ttft_seconds"],
            "latency": lambda one: one["token_seconds"],
            "throughput": lambda one: 1 / one["tokens_per_second"],
        }[goal]
        assert row["speedup"] == pytest.approx(seconds(dense) / seconds(row))
        total = row["ttft_seconds"] + 99 * row["token_seconds"]
        assert row["tokens_per_second"] == pytest.approx(4 * 100 / total)


def test_max_kl_leaves_out_and_says_so() -> None:
    report = plan(*TINY, "--max-kl", 0.3)
    rewired = [row for row in report["rows"] if row["wiring"] not in ("standard", "none")]
    assert rewired and all(row["kl"] <= 0.3 for row in rewired)
    assert report["left_out"][0].startswith("Above a KL of 0.3: ")


def test_only_what_is_named_is_priced() -> None:
    report = plan(*TINY, "--wirings", "ladder+peek; desync-4x@0-2, ladder@2-4; standard+8:.5+4:.5", "--batch", 1)
    mixed = "desync-4x@0-2, ladder@2-4"
    wirings = {"standard", "ladder+peek@0-4", mixed, "standard+8:.5+4:.5@0-4", "none"}
    assert {row["wiring"] for row in report["rows"]} == wirings
    assert any(f"convert tiny --wiring '{mixed}' " in command for command in report["commands"])
    assert [row["kl"] for row in report["rows"] if row["wiring"] == mixed] == [None]


def test_a_wiring_carries_the_gate_that_was_asked() -> None:
    wirings = "ladder+peek@16-32; ladder+peek@9-32"
    rows = plan("llama-3.1-8b", "--batch", 1, "--wirings", wirings)["rows"]
    gates = {row["wiring"]: row["gates"] for row in rows}
    assert "recommended: undecided" in gates.pop("ladder+peek@16-32") and not any(gates.values())
    printed = [run("llama-3.1-8b", "--batch", 1, "--wirings", text).output for text in wirings.split("; ")]
    assert ["recommended:" in each for each in printed] == [True, False]


@pytest.mark.parametrize(("gpus", "pays"), [(8, True), (4, False)])
def test_a_delay_of_two_is_named_where_it_wins_more_than_the_range_of_one(gpus: int, pays: bool) -> None:
    """On eight L40S in two nodes an all-reduce of a token takes longer than a module, but less than two."""
    arguments = ("llama-3.1-8b", "--hardware", "l40s", "--library", "nccl", "--gpus", gpus, "--goal", "latency")
    rows = {row["wiring"]: row for row in plan(*arguments, "--batch", 1, "--all")["rows"]}
    one, two = rows["ladder+peek@0-32"], rows["ladder+peek+delay-2@0-32"]
    assert (two["speedup"] > one["speedup_range"][1]) == pays
    named = [line for line in plan(*arguments, "--batch", 1)["left_out"] if "delay-2" in line]
    assert [f"{two['speedup']:.2f} at batch 1" in line for line in named] == [True] * pays


def test_replicas_share_the_gpus() -> None:
    one, two = plan(*TINY, "--gpus", 4, "--tp", 4), plan(*TINY, "--gpus", 8, "--tp", 4)
    assert two["rows"][0]["tokens_per_second"] == pytest.approx(2 * one["rows"][0]["tokens_per_second"])


def test_two_nodes_are_slower() -> None:
    one, two = plan("llama-2-7b", "--gpus", "8"), plan("llama-2-7b", "--gpus", "2x8")
    assert (
        two["layer_microseconds"]["1"]["decode"]["all_reduce"] > one["layer_microseconds"]["1"]["decode"]["all_reduce"]
    )


def test_nodes_are_told_apart() -> None:
    """Eight GPUs of one node, of two and of eight: each next one pays more of the network."""
    bounds = [plan("llama-3.1-8b", "--gpus", gpus)["rows"][0]["speedup"] for gpus in ("8", "1x8", "2x4", "8x1")]
    assert bounds[0] == bounds[1] < bounds[2] < bounds[3]


def test_a_number_of_gpus_fills_the_machine_s_own_nodes() -> None:
    """Of eight H100s, in inference and in training; and the title says so."""
    for goal in ("latency", "train"):
        arguments = ("llama-3.1-8b", "--goal", goal, "--batch", 16)
        assert plan(*arguments, "--gpus", 16) == plan(*arguments, "--gpus", "2x8") != plan(*arguments, "--gpus", "1x16")
    assert "on 2x8 H100 SXM, TP 16" in run("llama-2-7b", "--gpus", 16).output
    assert "--nnodes 2 --nproc-per-node 8" in run("llama-3.1-8b", "--goal", "train", "--gpus", 16).output


def test_one_gpu_has_nothing_to_win() -> None:
    rows = plan(*TINY, "--gpus", 1, "--all")["rows"]
    assert {(row["speedup"], row["exposed_all_reduces"], row["exposed_bytes"]) for row in rows} == {(1.0, 0, 0)}


def test_the_printed_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """By convert's own command line, up to the conversion itself."""
    asked: list[Any] = []

    def convert(source: str, out: str | None, request: Any, **options: object) -> None:
        asked.append(request)
        raise ValueError("far enough")

    monkeypatch.setattr(convert_cli, "convert", convert)
    app = new_app()
    app.callback()(lambda: None)
    convert_cli.add_commands(app)
    shape = named_shapes()["tiny"]
    rewired = [candidate for candidate in candidates(shape) if candidate.is_rewired]
    for candidate in rewired:
        command = shlex.split(convert_command("model", candidate, 8))
        CliRunner().invoke(app, command)
        entries = [{name: value for name, value in entry.items() if value is not None} for entry in asked[-1].wiring]
        assert shape.wiring(entries) == candidate.wiring
    assert len(asked) == len(rewired)


def test_a_batch_that_does_not_fit_is_left_out() -> None:
    report = plan("llama-3.1-70b", "--batch", "1,1024")
    assert {row["batch"] for row in report["rows"]} == {1}
    assert report["left_out"][0].startswith("Batch 1024 does not fit: 19.5 GB of weights and 96.6 GB of cache")


@pytest.mark.parametrize("goal", ["latency", "train"])
def test_brackets_are_printed_as_they_are(goal: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    source.rename("[my]-llama")
    assert "[my]-llama" in run("[my]-llama", "--goal", goal, "--gpus", "4").output


def test_one_token_is_no_tokens() -> None:
    assert "prompt 64, 1 new token; " in run("tiny", "--prompt", "64", "--new", "1").output


def test_training_prints_launch_lines() -> None:
    done = run("llama-3.1-8b", "--goal", "train", "--gpus", "4x8", "--explain")
    assert done.exit_code == 0, done.output
    assert done.output.count("torchrun --nnodes 4 --nproc-per-node 8 -m rewired.adapt RECIPE") == 3
    report = plan("llama-3.1-8b", "--goal", "train", "--gpus", "4x8")
    assert len(report["commands"]) == 3
    best = report["grids"][0]
    for term in best["terms"]:
        assert f"{term['seconds'] * 1e3:.1f}" in done.output
    assert best["communication"] == pytest.approx(sum(term["seconds"] for term in best["terms"]))


def test_a_checkpoint_s_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(tmp_path)["rows"][0]["speedup"] == plan("tiny")["rows"][0]["speedup"]


@pytest.mark.parametrize("goal", ["latency", "train"])
def test_a_rewired_folder_is_not_taken_for_the_dense_model(goal: str, tmp_path: Path) -> None:
    """Unless all of its layers are standard."""
    for preset, is_refused in (("ladder", True), ("standard", False)):
        config = rewired_model([{"layers": "0-2", "preset": preset}], 4, num_hidden_layers=2).config
        config.save_pretrained(tmp_path)
        done = run(tmp_path, "--goal", goal, "--gpus", 4)
        assert (done.exit_code == 2) == is_refused
        assert ("is rewired already: plan for the dense model that it was made from." in done.stderr) == is_refused


def test_the_frontier_of_select(tmp_path: Path) -> None:
    """Its candidates come beside ours, with the KL that was measured of this very model."""
    entry = {"name": "chosen", "wiring": [{"layers": "1-3", "preset": "ladder"}], "measured": {"refitted": 0.0001}}
    file = tmp_path / "selection.json"
    file.write_text(json.dumps({"candidates": [entry, {**entry, "name": "the last 2", "measured": None}]}))
    rows = plan(*TINY, "--frontier", file, "--max-kl", 0.0002, "--batch", 1)  # less than any other
    chosen = [row for row in rows["rows"] if row["wiring"] not in ("standard", "none")]
    assert [row["kl"] for row in chosen] == [0.0001]
    assert rows["commands"] == [f"convert tiny --wiring {tmp_path / 'wiring.json'} --tp-shards 8 --refit"]


def test_other_choices_of_a_selection_are_made_by_their_text(tmp_path: Path) -> None:
    """wiring.json beside it is the chosen one's."""
    file, shape = tmp_path / "selection.json", named_shapes()["tiny"]
    desync = [{"layers": "1-3", "preset": "desync", "every": 4, "peek": False}]
    file.write_text(json.dumps({"candidates": [{"name": name, "wiring": desync} for name in ("chosen", "the last 2")]}))
    commands = [convert_command("tiny", candidate, 8) for candidate in selected(file, shape)]
    assert commands[0] == f"convert tiny --wiring {tmp_path / 'wiring.json'} --tp-shards 8 --refit"
    assert commands[1] == "convert tiny --wiring desync-4x-peek@1-3 --tp-shards 8 --refit"


def test_the_title_names_whose_all_reduces_count(tmp_path: Path) -> None:
    numbers = {"tp": 8, "batch": 1, "prompt": 64, "prefill_seconds": 1e-3, "decode_seconds": 1e-4}
    rows = [{"wiring": wiring, "model": "tiny", **numbers} for wiring in ("standard", "none")]
    times = [{"gpus": 8, "bytes": size, "seconds": 1e-5} for size in (1e3, 1e9)]
    for content, words in (
        ({}, "all-reduces of vllm; "),
        ({"all_reduce": times}, f"all-reduces of {tmp_path}/x.json; "),
    ):
        (tmp_path / "x.json").write_text(json.dumps({"rows": rows} | content))
        assert words in run(*TINY, "--calibrate", tmp_path / "x.json").output


TEXT_AS_KL = '{"candidates": [{"name": "chosen", "wiring": [], "measured": {"refitted": "0.1"}}]}'


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"candidates": [1]}', '{"candidates": []}', '{"candidates": [{"name": 1}]}', TEXT_AS_KL],
)
def test_what_is_no_selection(content: str, tmp_path: Path) -> None:
    file = tmp_path / "selection.json"
    file.write_text(content)
    done = run(*TINY, "--frontier", file)
    assert done.exit_code == 2
    assert done.stderr.endswith("is not a selection.json of `rewired select`.\n")


def test_quality_is_interpolated_over_layers_of_the_same_wiring() -> None:
    texts = ["ladder+peek@20-30", "ladder+peek@15-30", "desync-4x", "standard+int8@15-30", "ladder@2-9", "ladder+int6"]
    found = {each.name: each.quality for each in candidates(named_shapes()["smollm2-135m"], texts)}
    known = {key: value and value.kl for key, value in found.items()}
    assert known["ladder+peek@15-30"] == 0.108
    assert known["ladder+peek@20-30"] == pytest.approx(0.041 + (0.108 - 0.041) * 2 / 7)  # 8 layers, 10 and 15
    assert known["desync-4x@0-30"] == 0.63
    assert known["standard+int8@15-30"] == pytest.approx(0.0002)  # no layers cost nothing
    assert known["standard"] == 0
    assert known["ladder@2-9"] is known["ladder+int6@0-30"] is known["none"] is None


def test_it_recommends_what_nothing_beats_and_nothing_that_harms() -> None:
    """Issue 48: for a 70B on eight H100 the most damaging wirings came first."""
    every, listed = (plan("llama-3.1-70b", "--batch", "1,16", *flags)["rows"] for flags in (["--all"], []))
    for batch in (1, 16):
        rows = [row for row in every if row["batch"] == batch and row["kl"] is not None and row["kl"] <= 0.25]
        best = [
            row["wiring"]
            for row in rows
            if not any(each["speedup"] >= row["speedup"] and each["kl"] < row["kl"] for each in rows)
        ]
        assert [row["wiring"] for row in listed if row["batch"] == batch] == ["none", *best]
    done = run("llama-3.1-70b", "--batch", "1,16")
    assert "--all lists all." in done.output
    names = [line.split()[3] for line in done.output.splitlines() if line.startswith("    convert ")]
    assert names and set(names) <= {row["wiring"] for row in listed}


def test_what_is_not_measured_is_said_to_be() -> None:
    assert "not measured" in run(*TINY, "--wirings", "ladder@1-3", "--batch", "1").output
    done = run(*TINY, "--wirings", "ladder@1-3", "--max-kl", "1")
    assert "Left out, since their KL is not measured: ladder@1-3." in done.output
    assert "No wiring within that KL is faster than standard." in done.output


def test_a_payload_alone_is_not_refitted() -> None:
    """As its KL was measured."""
    (command,) = plan(*TINY, "--wirings", "standard+int8", "--batch", 1)["commands"]
    assert command == "convert tiny --wiring standard+int8@0-4 --rotate hadamard --tp-shards 8"


BAD = {
    "parts of nodes": (
        ["llama-3.1-8b", "--gpus", "2x6", "--tp", 4],
        "--tp 4 does not fit nodes of 6 GPUs, and a model",
    ),
    "no batch": (["llama-3.1-8b", "--batch", ""], "--batch  is not a list of batches"),
    "no batch to train on": (["llama-3.1-8b", "--goal", "train", "--batch", ""], "--batch  is not a list of batches"),
    "hardware": ([*TINY, "--hardware", "h1"], "There is no hardware 'h1'"),
    "library": ([*TINY, "--library", "gloo"], "There is no library 'gloo'"),
    "shape": (["llama-9-1b"], "There is no folder 'llama-9-1b'"),
    "shards": (["llama-3.1-70b", "--gpus", "7"], "--gpus 7 does not divide num_attention_heads 64"),
    "tp": ([*TINY, "--tp", "3"], "--tp 3 does not divide --gpus 8"),
    "no tp": ([*TINY, "--tp", "0"], "--tp is 0: it must be at least 1"),
    "gpus": ([*TINY, "--gpus", "eight"], "--gpus eight is not a number of GPUs"),
    "nodes": (
        [*TINY, "--gpus", "12"],
        "--gpus 12 does not fill nodes of 8 H100 SXM: give a multiple of 8, or nodes too",
    ),
    "batch": ([*TINY, "--batch", "1,x"], "--batch 1,x is not a list of batches"),
    "prompt": ([*TINY, "--prompt", "0"], "--prompt is 0: it must be at least 1"),
    "goal": ([*TINY, "--goal", "fun"], "There is no goal 'fun'"),
    "max kl": ([*TINY, "--max-kl", "nan"], "--max-kl is nan: it must be a number of nats"),
    "memory": (["llama-3.1-405b"], "Batch 1 does not fit: 105.1 GB of weights"),
    "frontier": ([*TINY, "--frontier", "none.json"], "There is no file none.json"),
    "calibrate": ([*TINY, "--calibrate", "none.json"], "none.json is not a JSON file"),
    "train": (["tiny", "--goal", "train", "--max-kl", "1"], "--max-kl means nothing for a training"),
    "trained tokens": (["tiny", "--goal", "train", "--new", "9"], "--new means nothing for a training"),
    "trained weights": (["tiny", "--goal", "train", "--weights", "int3"], "--weights means nothing for a training"),
    "trained by": (["tiny", "--goal", "train", "--library", "nccl"], "--library means nothing for a training"),
    "wirings": ([*TINY, "--wirings", "lader"], "'lader' is no wiring"),
    "layers": ([*TINY, "--wirings", "ladder@3-9"], "Layers '3-9' lie beyond the model"),
    "steps": (["tiny", "--goal", "train", "--batch", "1,2"], "a training step has one"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str) -> None:
    arguments, sentence = BAD[case]
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_numbers_are_finite() -> None:
    for row in plan("llama-3.1-8b", "--batch", "1,64")["rows"]:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
