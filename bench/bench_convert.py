"""What `convert` costs beside a Llama-3.1-8B and a Llama-3.1-405B: wall time and peak memory of each command.

Every run is a fresh process of the installed console script. The checkpoints have real headers and an index, and holes
where the tensors would be, so that 827 GB of weights need no disk. A linked conversion reads no tensor and cannot tell;
the outputs are checked to be hard links, and the commands never to import torch or transformers.
"""

from __future__ import annotations

import argparse
import json
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

from rewired.convert.llama import LlamaShape

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sys.executable).parent  # where pip installs `convert` and `rewired`
NEVER_IMPORTED = {"torch", "transformers"}
COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    layers: int
    heads: int
    mlp: int
    shards: int
    ladder: str
    target: tuple[float, int]  # seconds, MB


MODELS = (
    Model("Llama-3.1-8B", 4096, 32, 32, 14336, shards=4, ladder="16-32", target=(1.5, 200)),
    Model("Llama-3.1-405B", 16384, 126, 128, 53248, shards=191, ladder="63-126", target=(3.0, 300)),
)


@dataclass(frozen=True)
class Row:
    command: str
    seconds: list[float]
    megabytes: list[float]
    target: tuple[float, int] | None

    @property
    def missed(self) -> bool:
        return self.target is not None and (
            median(self.seconds) > self.target[0] or max(self.megabytes) > self.target[1]
        )

    def __str__(self) -> str:
        low, middle, high = min(self.seconds), median(self.seconds), max(self.seconds)
        target = f"{self.target[0]} s, {self.target[1]} MB" if self.target else "-"
        times = f"{low:.2f} | {middle:.2f} | {high:.2f}"
        verdict = " (missed)" if self.missed else ""
        return f"| `{self.command}` | {times} | {max(self.megabytes):.0f} | {target}{verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="runs of each command, after one warm-up (default 7)")
    parser.add_argument("--workdir", type=Path, default=REPO / "build", help="where to make the checkpoints")
    parser.add_argument("--write", action="store_true", help="also write results/bench-convert.md")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    args.workdir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bench-convert-", dir=args.workdir) as folder:
        rows = [row for model in MODELS for row in bench_model(model, Path(folder), args.runs)]
        rows.append(bench(["convert", "--help"], Path(folder), args.runs))
        text = report(rows, floor=measure(["true"], Path(folder))[1], runs=args.runs, load=load)
    print(text)
    if args.write:
        (REPO / "results" / "bench-convert.md").write_text(text, encoding="utf-8")
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
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 128256,
        "hidden_size": model.hidden, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": 8, "intermediate_size": model.mlp, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = LlamaShape.from_config(config).tensors()
    sizes = {name: 2 * rows * (columns[0] if columns else 1) for name, (rows, *columns) in shapes.items()}
    total, position = sum(sizes.values()), 0
    shards: list[dict[str, Any]] = [{} for _ in range(model.shards)]
    for name, size in sizes.items():
        shard = shards[position * model.shards // total]
        begin = next(reversed(shard.values()))["data_offsets"][1] if shard else 0
        shard[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, begin + size]}
        position += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{model.shards:05}.safetensors"
        write_hollow(path, shard)
        weight_map |= dict.fromkeys(shard, path.name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for file, content in {"config.json": config, "model.safetensors.index.json": index, **dict.fromkeys(COMPANIONS, {})}.items():
        (folder / file).write_text(json.dumps(content, indent=2), encoding="utf-8")


def write_hollow(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file with a header, and a hole for its data."""
    header = json.dumps(tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + max(entry["data_offsets"][1] for entry in tensors.values()))


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
