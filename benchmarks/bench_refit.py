"""Memory and time of `convert --refit` on a model of Llama-3.1-8B's shape, measured and as it estimates them itself.

    .venv/bin/python benchmarks/bench_refit.py

The model has two layers instead of 32, random weights and SmolLM2's tokenizer, and its last layer is rewired. A refit
holds one layer at a time, so memory does not grow with their number; time does.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from page import parser, show
from safetensors.torch import save_file

from rewired.checkpoint.named_shapes import named_shapes
from rewired.convert import Request, convert
from rewired.tables import markdown

CONVERT = Path(sys.executable).with_name("convert")  # the installed console script
SHAPE = replace(named_shapes()["llama-3.1-8b"], num_hidden_layers=2)
_ESTIMATE = re.compile(r"about ([\d.]+) GB of host memory .*? ([\d.]+) GB for matrices.* and ([\d.,]+) TFLOP")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=65_536)
    args = made.parse_args()
    with TemporaryDirectory(prefix="bench-refit-") as folder:  # 4 GB
        make_model(Path(folder) / "llama-8b-2-layers")
        cells = measure(args.tokens, Path(folder))
    headings = ["command", "estimated GB", "measured GB", "estimated TFLOP", "minutes"]
    show(markdown(headings, [cells]), "rewired", "torch")


def make_model(folder: Path) -> None:
    """Weights of a fresh model's size, and the tokenizer of one that has text to offer."""
    smollm2 = convert("smollm2-135m", folder, Request([{"layers": "0-", "preset": "standard"}])).out
    for path in smollm2.glob("*.safetensors*"):
        path.unlink()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(float(len(shape) == 1), 0.02, generator=generator)
        for name, shape in SHAPE.tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**SHAPE.config(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def measure(tokens: int, folder: Path) -> list[str]:
    """Cells for a refit in a fresh process."""
    command = ["convert", "llama-8b-2-layers", "ladder", "--wiring", "ladder@1"]
    command += ["--refit", "mix", "--refit-tokens", str(tokens)]
    started = time.perf_counter()
    with (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen([CONVERT, *command[1:]], cwd=folder, stdout=stderr, stderr=stderr)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.05)
        stderr.seek(0)
        output = stderr.read()
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed with exit status {process.returncode}:\n{output}")
    minutes = (time.perf_counter() - started) / 60
    estimate = _ESTIMATE.search(output)
    assert estimate, "convert prints the estimate of its refit"
    activations, matrices, operations = (float(number.replace(",", "")) for number in estimate.groups())
    numbers = f"{activations + matrices:.1f}", f"{peak:.1f}", f"{operations:,.0f}", f"{minutes:.0f}"
    return [f"`{shlex.join(command)}`", *numbers]


def anonymous(pid: int) -> float:
    """GB that a process holds now, files aside; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    resident = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(resident.group(1)) * 1024 / 1e9 if resident else 0.0


if __name__ == "__main__":
    main()
