"""`rewired bench --engine vllm`: on one rank and two, and over a link that vLLM's sums really cross."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.bench.test_link import needs_links

from .engine import environment

SMALL = ("small", "--layers", "2", "--prompt", "64", "--new", "3", "--rounds", "3", "--device", "cpu", "--eager")


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from rewired.scripts import rewired; rewired()"
    command = [
        sys.executable,
        "-c",
        code,
        "bench",
        *SMALL,
        "--engine",
        "vllm",
        "--out",
        str(folder / "out"),
        *arguments,
    ]
    # namespaces have no lo to bind to, and a bench needs none
    variables = {name: value for name, value in environment(folder).items() if name != "GLOO_SOCKET_IFNAME"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def results_of(folder: Path, *arguments: str) -> dict[str, Any]:
    done = bench(folder, *arguments)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((folder / "out" / "results.json").read_text())
    return results


@pytest.mark.parametrize("tp", ["1", "2"])
def test_vllm_s_own_llama_and_wirings_by_the_plugin(tp: str, tmp_path: Path) -> None:
    done = bench(tmp_path, "--tp", tp, "--batch", "1,2", "--wirings", "ladder; none")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [(row["batch"], row["wiring"]) for row in rows] == [
        (batch, wiring) for batch in (1, 2) for wiring in ("stock", "standard", "ladder")
    ]
    assert "none is left out, since vLLM's collectives cannot be silenced" in done.stderr
    for row in rows:
        assert row["link"] == "shared memory"
        assert row["prefill_seconds"] > row["decode_seconds"] > 0
    assert f"TP {tp}, batch 2, shared memory:" in (tmp_path / "out" / "report.md").read_text()
    assert not list(Path("/dev/shm").glob("rewired-*"))


@needs_links
def test_over_a_slow_link_every_sum_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    """Those of shared memory would not; 20 Mbit/s are 2.5 MB a second."""
    rows = results_of(tmp_path, "--tp", "2", "--wirings", "desync-4x", "--link", "20mbit")["rows"]
    seconds = {row["wiring"]: row["prefill_seconds"] for row in rows}
    assert {row["link"] for row in rows} == {"20mbit"}
    update = 64 * 1024 * 4  # bytes: tokens, channels, float32
    for wiring, sums in {"stock": 5, "standard": 5, "desync-4x": 2}.items():  # that of the embedding is one of them
        assert seconds[wiring] > 0.9 * sums * update / 2.5e6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--profile"], "--profile traces models in transformers: leave it out, or --engine vllm."),
        (["--new", "1"], "--new is 1: with --engine vllm, the first token counts as prefill."),
        (["--tp", "3"], "--tp 3 does not divide num_attention_heads 16"),
    ],
)
def test_refused_before_anything_starts(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    done = bench(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"rewired bench: {sentence}")
    assert not (tmp_path / "out").exists()
