"""Wall time and peak memory of each command of `convert`, on a Llama-3.1-8B and a Llama-3.1-405B.

    .venv/bin/python benchmarks/bench_convert.py

Every run is a fresh process of the installed console script. The checkpoints have real headers and an index but sparse
files, so that 827 GB of weights need no disk: a linked conversion reads no tensor.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from page import parser, show

from rewired.checkpoint.named_shapes import named_shapes
from rewired.tables import markdown

SCRIPTS = Path(sys.executable).parent  # where pip installs `convert` and `rewired`
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
HEADINGS = ("command", "min s", "median s", "max s", "peak MB", "target")


class Model(NamedTuple):
    name: str
    shards: int
    ladder: str
    target: tuple[float, int]  # seconds, MB


MODELS = (
    Model("Llama-3.1-8B", 4, "16-32", (1.5, 200)),
    Model("Llama-3.1-405B", 191, "63-126", (3.0, 300)),
)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=7, help="runs of each command, after one warm-up (default 7)")
    args = made.parse_args()
    with TemporaryDirectory(prefix="bench-convert-") as scratch:
        folder, rows = Path(scratch), []
        for model in MODELS:
            make_checkpoint(model, folder / model.name)
            out = folder / f"{model.name}-ladder"
            command = ["convert", model.name, out.name, "--ladder-layers", model.ladder]
            rows.append(bench(command, folder, args.runs, out, model.target))
            rows.append(bench(["rewired", "info", out.name], folder, args.runs))
        rows.append(bench(["convert", "--help"], folder, args.runs))
        floor = measure(["true"], folder)[1]
    show(
        f"`true`, started the same way, shows {floor:.0f} MB.\n\n{markdown(HEADINGS, rows)}", "rewired", "typer", "rich"
    )


def make_checkpoint(model: Model, folder: Path) -> None:
    """A checkpoint of this shape whose weight files hold a header and a hole."""
    folder.mkdir()
    shape = named_shapes()[model.name.lower()]
    config = {**shape.config(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    shapes = shape.tensors()
    total, position = sum(map(math.prod, shapes.values())), 0
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(model.shards)]
    for name, size in shapes.items():  # in order, into files of about one size
        shards[position * model.shards // total][name] = size
        position += math.prod(size)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{model.shards:05}.safetensors"
        write_hollow(path, shard)
        weight_map |= dict.fromkeys(shard, path.name)
    index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
    files = {"config.json": config, "model.safetensors.index.json": index, **{name: {} for name in COMPANIONS}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def write_hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file with a header, and a hole for its data."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + end)


def bench(
    command: list[str], folder: Path, runs: int, out: Path | None = None, target: tuple[float, int] | None = None
) -> list[str]:
    """A row of the table for `command`, run in `folder`; what it wrote to `out` is removed before the next run."""
    figures = []
    for _ in range(1 + runs):  # the first one warms up
        if out:
            shutil.rmtree(out, ignore_errors=True)
        figures.append(measure([str(SCRIPTS / command[0]), *command[1:]], folder))
    seconds, megabytes = zip(*figures[1:], strict=True)
    asked = ""
    if target:
        is_missed = median(seconds) > target[0] or max(megabytes) > target[1]
        asked = f"{target[0]} s, {target[1]} MB" + " (missed)" * is_missed
    times = (f"{pick(seconds):.2f}" for pick in (min, median, max))
    return [f"`{shlex.join(command)}`", *times, f"{max(megabytes):.0f}", asked]


def measure(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Wall seconds and peak MB of one process. Linux counts what this one held at exec, too: see `true`."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed with exit status {process.returncode}.")
    return seconds, usage.ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()
