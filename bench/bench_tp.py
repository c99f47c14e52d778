"""Tensor parallelism against transformers' own: the speed of `standard` and of other wirings beside stock Llama.

Stock Llama and its conversions are loaded with `tp_plan="auto"` on the same ranks, from the same random weights. Each
is timed in turns with stock (A B, B A, A B, ...), all ranks starting together, on rank 0's clock, and a figure is the
median of the pairs' own ratios: a machine that slows down slows both of a pair. `stock again`, a second copy of stock,
shows what is noise. Before anything is timed, `standard` must give stock's logits, and the others must not.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from paired import Pairs, decode_run, interleaved, milliseconds, prefill_run, speed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

import rewired  # noqa: F401 - registers the rewired classes
from rewired.convert import Request, convert
from rewired.ranks import run_on_ranks

RESULT = Path(__file__).resolve().parents[1] / "results" / "bench-tp.md"
WIRINGS: dict[str, dict[str, Any]] = {
    "stock again": {},
    "standard": {"preset": "standard"},
    "ladder": {"preset": "ladder"},
    "desync, every 2": {"preset": "desync", "every": 2},
    "desync, every 4": {"preset": "desync", "every": 4},
    "parallel": {"preset": "parallel"},
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}  # of the largest logit
VOCABULARY = 4096


@dataclass(frozen=True)
class Row:
    name: str
    difference: float  # of the logits from stock's, as a part of the largest
    prefill: Pairs
    decode: Pairs

    def __str__(self) -> str:
        prefill, decode = (f"{milliseconds(pairs)} | {speed(pairs)}" for pairs in (self.prefill, self.decode))
        return f"| {self.name} | {prefill} | {decode} | {self.difference:.0e} |"


def main() -> None:
    args = parse_arguments()
    logging.disable_progress_bar()
    load = os.getloadavg()[0]
    with TemporaryDirectory(prefix="rewired-bench-") as folder:
        try:
            make_checkpoints(Path(folder), args)
            rows = run_on_ranks(measure, args.ranks, Path(folder), args, device_type=args.device_type)[0]
        except ValueError as error:
            sys.exit(str(error))
    text = report(rows, args, load)
    print(text)
    if args.write:
        RESULT.write_text(text, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks (default 2)")
    parser.add_argument("--layers", type=int, default=8, help="(default 8)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, in heads of 64 (default 512)")
    parser.add_argument("--device-type", choices=("cpu", "cuda"), default="cpu", help="(default cpu)")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32", help="(default float32)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prefill (default 512)")
    parser.add_argument("--steps", type=int, default=8, help="decode steps in one timed run (default 8)")
    parser.add_argument("--pairs", type=int, default=25, help="pairs of runs (default 25)")
    parser.add_argument("--write", action="store_true", help="also write results/bench-tp.md")
    return parser.parse_args()


def make_checkpoints(folder: Path, args: argparse.Namespace) -> None:
    """Stock Llama with random weights, twice, and every conversion of it, each in a folder of its name."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(args.hidden // 128, args.ranks),
    )
    torch.manual_seed(0)
    stock = folder / "stock"
    LlamaForCausalLM(config).to(getattr(torch, args.dtype)).save_pretrained(stock)
    (folder / "stock again").symlink_to(stock)
    for name, entry in WIRINGS.items():
        if entry:
            convert(stock, folder / name, Request([{"layers": "0-", **entry}], tp_shards=args.ranks))


def measure(folder: Path, args: argparse.Namespace) -> list[Row]:
    """What every rank runs: each wiring beside stock."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.device_type == "cpu":
        torch.set_num_threads(1)
    stock = load(folder / "stock", args)
    return [measure_beside(stock, load(folder / name, args), name, args) for name in WIRINGS]


def load(folder: Path, args: argparse.Namespace) -> Any:
    plan = DistributedConfig(tp_size=args.ranks, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=args.dtype).eval()


@torch.no_grad()
def measure_beside(stock: Any, model: Any, name: str, args: argparse.Namespace) -> Row:
    """Raises ValueError where the two do not agree and should, or agree and should not."""
    tokens = torch.randint(VOCABULARY, (1, args.prompt), generator=torch.Generator().manual_seed(1)).to(model.device)
    expected, logits = stock(tokens).logits, model(tokens).logits
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    rounding, same = TOLERANCE[args.dtype], name in ("stock again", "standard")
    if not (difference <= rounding if same else rounding < difference < math.inf):
        raise ValueError(f"The logits of {name} differ from stock's by {difference:.1e} of the largest: not timed.")
    prefill = interleaved(*(prefill_run(each, tokens) for each in (stock, model)), args.pairs)
    decode = interleaved(*(decode_run(each, tokens, args.steps) for each in (stock, model)), args.pairs)
    return Row(name, difference, prefill, decode)


def report(rows: list[Row], args: argparse.Namespace, load: float) -> str:
    cpu = f"{platform.machine()} CPU, one thread a rank"
    device = torch.cuda.get_device_name() if args.device_type == "cuda" else cpu
    command = shlex.join(["bench/bench_tp.py", *sys.argv[1:]])
    return f"""# Tensor parallelism: rewired against transformers' own

`python {command}`, {date.today()}; {args.ranks} ranks, {device}, {os.cpu_count()} CPUs, load average {load:.2f} at the
start; torch {torch.__version__}, transformers {transformers.__version__}.

{args.layers} layers of hidden size {args.hidden}, {args.dtype}, random weights, batch 1, eager mode, every layer
rewired. Prefill of {args.prompt} tokens, then decode of {args.steps}, with a dynamic cache. Speed is stock's time by
the model's, above 1 where the model is faster: the median of {args.pairs} interleaved pairs, and their quartiles.
`stock again` is stock against itself. Logits: their largest difference from stock's, as a part of the largest.

| model | prefill ms: stock's, its own | speed | {args.steps} decode steps ms | speed | logits |
|---|---|---|---|---|---|
{chr(10).join(map(str, rows))}
"""


if __name__ == "__main__":
    main()
