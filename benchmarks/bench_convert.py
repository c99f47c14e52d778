"""Wall time and peak memory of each command of `convert`, on a Llama-3.1-8B and a Llama-3.1-405B.

Every run is a fresh process of the installed console script. The checkpoints have real headers and an index but sparse
files, so that 827 GB of weights need no disk: a linked conversion reads no tensor. The outputs are checked to be hard
links, and the commands not to import torch or transformers.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from page import parser, publish

from rewired.checkpoint.shape import Shape
from rewired.tables import markdown

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sys.executable).parent  # where pip installs `convert` and `rewired`
NEVER_IMPORTED = {"torch", "transformers"}
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Model:
    name: str
    sizes: tuple[int, int, int, int]  # hidden, layers, heads, MLP
    shards: int
    ladder: str
    target: tuple[float, int]  # seconds, MB


MODELS = (
    Model("Llama-3.1-8B", (4096, 32, 32, 14336), 4, "16-32", (1.5, 200)),
    Model("Llama-3.1-405B", (16384, 126, 128, 53248), 191, "63-126", (3.0, 300)),
)


@dataclass(frozen=True)
class Row:
    command: str
    seconds: list[float]
    megabytes: list[float]
    target: tuple[float, int] | None

    @property
    def missed(self) -> bool:
        limit = self.target or (math.inf, math.inf)
        return median(self.seconds) > limit[0] or max(self.megabytes) > limit[1]

    def cells(self) -> list[str]:
        times = (f"{pick(self.seconds):.2f}" for pick in (min, median, max))
        target = f"{self.target[0]} s, {self.target[1]} MB" if self.target else "-"
        return [f"`{self.command}`", *times, f"{max(self.megabytes):.0f}", target + " (missed)" * self.missed]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--runs", type=int, default=7, help="runs of each command, after one warm-up (default 7)")
    made.add_argument("--workdir", type=Path, default=REPO / "build", help="where to make the checkpoints")
    args = made.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bench-convert-", dir=args.workdir) as folder:
        rows = [row for model in MODELS for row in bench_model(model, Path(folder), args.runs)]
        rows.append(bench(["convert", "--help"], Path(folder), args.runs))
        floor = measure(["true"], Path(folder))[1]
    if floor >= min(min(row.megabytes) for row in rows):
        sys.exit(f"Peaks cannot be told apart from the {floor:.0f} MB that the measuring process itself holds.")
    table = markdown(["command", "min s", "median s", "max s", "peak MB", "target"], [row.cells() for row in rows])
    text = _TEXT.format(runs=args.runs, floor=floor) + table
    publish("What `convert` costs", text, ("rewired", "typer", "rich"), args.write)
    sys.exit(any(row.missed for row in rows))


def bench_model(model: Model, folder: Path, runs: int) -> list[Row]:
    make_checkpoint(model, folder / model.name)
    out = folder / f"{model.name}-ladder"
    command = ["convert", model.name, out.name, "--ladder-layers", model.ladder]
    converted = bench(command, folder, runs, out, model.target)
    check_links(folder / model.name, out, model.shards)
    return [converted, bench(["rewired", "info", out.name], folder, runs)]


def make_checkpoint(model: Model, folder: Path) -> None:
    """A checkpoint of this shape whose weight files hold a header and a hole."""
    folder.mkdir()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    config |= {"vocab_size": 128256, "num_key_value_heads": 8, **dict(zip(names, model.sizes, strict=True))}
    shapes = Shape.from_config(config).tensors()
    total, position = sum(map(math.prod, shapes.values())), 0
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(model.shards)]
    for name, shape in shapes.items():  # in order, into files of about one size
        shards[position * model.shards // total][name] = shape
        position += math.prod(shape)
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
) -> Row:
    """A row for `command`, run in `folder`; what it wrote to `out` is removed before each run, and the last is left."""
    check_imports(command, folder)  # the warm-up, too
    figures = []
    for _ in range(runs):
        if out:
            shutil.rmtree(out)
        figures.append(measure([str(SCRIPTS / command[0]), *command[1:]], folder))
    seconds, megabytes = map(list, zip(*figures, strict=True))
    return Row(shlex.join(command), seconds, megabytes, target)


def measure(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Wall seconds and peak MB of one process. Linux counts what this one held at exec, too: see the floor."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed with exit status {process.returncode}.")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def check_imports(command: Sequence[str], folder: Path) -> None:
    """Runs `command` once, listing what it imports."""
    listed = [sys.executable, "-X", "importtime", str(SCRIPTS / command[0]), *command[1:]]
    done = subprocess.run(listed, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    if done.returncode or "rewired" not in imported or imported & NEVER_IMPORTED:
        sys.exit(f"{shlex.join(command)} failed, or imported one of {', '.join(sorted(NEVER_IMPORTED))}.")


def check_links(source: Path, out: Path, shards: int) -> None:
    files = sorted(out.glob("*.safetensors"))
    linked = [file for file in files if file.samefile(source / file.name) and file.stat().st_nlink == 2]
    if len(linked) != shards:
        sys.exit(f"{len(linked)} of {out.name}'s {len(files)} weight files are hard links: {shards} should be.")


_TEXT = """{runs} runs of each after a warm-up, each a fresh process, on weight files with real headers and no data. A
peak is the largest of the runs; `true`, started the same way, shows {floor:.0f} MB. Weight files came out as hard
links, and no command imported torch or transformers.

"""

if __name__ == "__main__":
    main()
