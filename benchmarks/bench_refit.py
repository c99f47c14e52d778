"""Memory and time of `convert --refit` on a model of Llama-3.1-8B's shape, measured and as it estimates them itself.

.venv/bin/python benchmarks/bench_refit.py --write

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
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from page import parser, publish
from safetensors.torch import save_file

from rewired.checkpoint.shape import Shape
from rewired.convert import Request, convert
from rewired.tables import markdown

REPO = Path(__file__).resolve().parents[1]
CONVERT = Path(sys.executable).with_name("convert")  # the installed console script
LIMIT = 24.0  # GB of host memory that an 8B model with 64 k tokens may take
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
_ESTIMATE = re.compile(r"about ([\d.]+) GB of host memory .*? ([\d.]+) GB for matrices.* and ([\d.,]+) TFLOP")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokens", type=int, default=65_536)
    made.add_argument("--workdir", type=Path, default=REPO / "build", help="where to make the model (4 GB)")
    args = made.parse_args()
    args.workdir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="bench-refit-", dir=args.workdir) as folder:
        make_model(Path(folder) / "llama-8b-2-layers")
        cells, peak = measure(args.tokens, Path(folder))
    headings = ["command", "estimated GB", "measured GB", "estimated TFLOP", "minutes"]
    text = _TEXT.format(words=CONFIG["vocab_size"]) + markdown(headings, [cells])
    publish("What a refit needs", text, ("rewired", "torch"), args.write)
    sys.exit(peak > LIMIT)


def make_model(folder: Path) -> None:
    """Weights of a fresh model's size, and the tokenizer of one that has text to offer."""
    smollm2 = convert("smollm2-135m", folder, Request([{"layers": "0-", "preset": "standard"}])).out
    for path in smollm2.glob("*.safetensors*"):
        path.unlink()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(float(len(shape) == 1), 0.02, generator=generator)
        for name, shape in Shape.from_config(CONFIG).tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))


def measure(tokens: int, folder: Path) -> tuple[list[str], float]:
    """Cells for a refit in a fresh process, and the GB of its peak."""
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
    return [f"`{shlex.join(command)}`", *numbers], peak


def anonymous(pid: int) -> float:
    """GB that a process holds now, files aside; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    resident = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(resident.group(1)) * 1024 / 1e9 if resident else 0.0


_TEXT = """A model of Llama-3.1-8B's shape with two layers, of which the last is rewired, {words:,} words and
tp_shards 8; float32 on the CPU. Memory is what the process holds at its peak, files aside: weights are
read from files. A refit holds one layer at a time: with 32 layers memory is the same, and the operations are those of
the layers.

"""

if __name__ == "__main__":
    main()
