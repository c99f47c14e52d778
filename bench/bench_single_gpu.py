"""One GPU, no tensor parallelism: prefill and decoding of rewired Llamas beside stock Llama.

All models of a shape share one set of random bfloat16 weights in memory. Each is timed in turns with stock, as
`bench_tp.py` does it: prefill, decode in eager mode with a dynamic cache, and decode compiled whole
(`mode="reduce-overhead"`: CUDA graphs) with a static one. transformers compiles no flash attention, so neither do we.
`--device cpu --shape tiny --pairs 2 --prompt 64 --attention sdpa eager` takes every path on any machine.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from paired import Pairs, decode_run, interleaved, prefill_run, ratios, speed
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache
from transformers.utils import is_flash_attn_2_available

from rewired.model.configuration_rewired_llama import RewiredLlamaConfig
from rewired.model.residual_stream import PeekGain

RESULT = Path(__file__).resolve().parents[1] / "results" / "single-gpu.md"
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**dict(zip(SIZES, (64, 4, 8, 8, 128), strict=True)), "vocab_size": 256},
    "1b": {**dict(zip(SIZES, (2048, 16, 32, 8, 8192), strict=True)), "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {**dict(zip(SIZES, (4096, 32, 32, 8, 14336), strict=True)), "vocab_size": 128256},
}
MEASURES = ("prefill", "decode, eager", "decode, compiled")
CLOSE = 0.98  # of stock's speed
BFLOAT16_ROUNDING = 2e-2  # of the largest logit

Run = Callable[[], None]


@dataclass(frozen=True)
class Row:
    shape: str
    attention: str
    model: str
    pairs: dict[str, Pairs]  # of each measure
    tokens: dict[str, int]  # in one run of it

    def worst(self) -> float:
        return min(median(ratios(pairs)) for pairs in self.pairs.values())

    def __str__(self) -> str:
        cells = [self._cells(measure) for measure in MEASURES]
        return f"| {self.shape} | {self.attention} | {self.model} | {' | '.join(cells)} |"

    def _cells(self, measure: str) -> str:
        if measure not in self.pairs:
            return "- | -"
        rate = self.tokens[measure] / median(seconds for _, seconds in self.pairs[measure])
        return f"{rate:.0f} | {speed(self.pairs[measure])}"


@torch.no_grad()
def main() -> None:
    args = parse_arguments()
    torch._dynamo.config.recompile_limit = 64  # the models share the code of their forward
    if args.device == "cpu":
        torch.set_num_threads(1)  # threads that wait for each other time the machine's other users
    start, rows, checks = time.perf_counter(), [], []
    for shape in args.shape:
        for line in bench_shape(shape, args):
            (rows if isinstance(line, Row) else checks).append(line)
            print(f"{time.perf_counter() - start:4.0f} s  {line}", file=sys.stderr, flush=True)
        torch.compiler.reset()
        gc.collect()  # this shape's weights and graphs, before the next
    text = report(rows, checks, args, time.perf_counter() - start)
    print(text)
    if args.write:
        RESULT.write_text(text, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    flash = ["flash_attention_2"] if is_flash_attn_2_available() else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b", "8b"], help="(default 1b 8b)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument("--attention", nargs="+", default=["sdpa", *flash], help="(default sdpa, and flash if here)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prefill (default 2048)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps in one timed run (default 16)")
    parser.add_argument("--pairs", type=int, default=21, help="pairs of runs (default 21)")
    parser.add_argument("--write", action="store_true", help="also write results/single-gpu.md")
    args = parser.parse_args()
    if args.write and args.device != "cuda":
        parser.error("--write is for figures of a GPU: it needs --device cuda")
    return args


def bench_shape(shape: str, args: argparse.Namespace) -> Iterator[Row | str]:
    """What the check of the logits found, then a row of each model, for each attention implementation."""
    stock = build(LlamaConfig(**SHAPES[shape]), args.device)
    models = {"stock again": stock, **{name: rewire(stock, shape, wiring) for name, wiring in wirings(shape).items()}}
    tokens = torch.randint(SHAPES[shape]["vocab_size"], (1, args.prompt), device=args.device)
    tokens_of_a_run = dict(zip(MEASURES, (args.prompt, args.steps, args.steps), strict=True))
    for attention in args.attention:
        for model in models.values():
            model.set_attn_implementation(attention)
        yield f"{shape}, {attention}: {check_logits(stock, models, tokens[:, :64])}"
        stock_runs = make_runs(stock, tokens, args)
        for name, model in models.items():
            runs = stock_runs if model is stock else make_runs(model, tokens, args)
            pairs = {measure: interleaved(stock_runs[measure], run, args.pairs) for measure, run in runs.items()}
            yield Row(shape, attention, name, pairs, tokens_of_a_run)


def wirings(shape: str) -> dict[str, list[dict[str, Any]]]:
    upper = f"{SHAPES[shape]['num_hidden_layers'] // 2}-"
    return {
        "standard": [],
        "ladder, upper half": [{"layers": upper, "preset": "ladder"}],
        "ladder, all layers": [{"layers": "0-", "preset": "ladder"}],
        "desync every 4 of 8 shards, upper half": [{"layers": upper, "preset": "desync", "every": 4}],
    }


def build(config: Any, device: str) -> Any:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def rewire(stock: Any, shape: str, wiring: list[dict[str, Any]]) -> Any:
    """A rewired model on stock's own weights."""
    model = build(RewiredLlamaConfig(**SHAPES[shape], wiring=wiring, tp_shards=8), "meta")
    model.load_state_dict(stock.state_dict(), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = stock.model.rotary_emb  # its buffers are in no state dict
    for module in model.modules():
        if isinstance(module, PeekGain):
            module.weight = nn.Parameter(torch.full_like(module.weight, module.initial, device=stock.device))
    assert not any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers()))
    return model


def check_logits(stock: Any, models: dict[str, Any], tokens: torch.Tensor) -> str:
    """How `standard` agrees with stock. Exits where it does not, or another model is stock or gives no numbers."""
    expected = stock(tokens).logits
    logits = {name: model(tokens).logits for name, model in models.items() if model is not stock}
    differences = {
        name: ((of_model - expected).abs().max() / expected.abs().max()).item() for name, of_model in logits.items()
    }
    standard = differences.pop("standard")
    if not standard <= BFLOAT16_ROUNDING:
        sys.exit(f"The logits of standard are {standard:.1e} of the largest away from stock's; nothing was timed.")
    if not all(BFLOAT16_ROUNDING < difference < float("inf") for difference in differences.values()):
        sys.exit(f"Rewired logits should differ from stock's, and be finite: {differences}.")
    exact = torch.equal(logits["standard"], expected)
    how = "bit for bit" if exact else f"but for rounding, {standard:.1e} of the largest"
    return f"standard's logits are stock's {how}"


def make_runs(model: Any, tokens: torch.Tensor, args: argparse.Namespace) -> dict[str, Run]:
    runs = {"prefill": prefill_run(model, tokens), "decode, eager": decode_run(model, tokens, args.steps)}
    if "flash" not in model.config._attn_implementation:
        runs["decode, compiled"] = compiled_run(model, tokens, args)
    return runs


def compiled_run(model: Any, tokens: torch.Tensor, args: argparse.Namespace) -> Run:
    """Decodes a run's steps after the prompt, and rewinds the cache; compiled when it first runs."""
    cache = StaticCache(config=model.config, max_cache_len=args.prompt + args.steps)
    model(tokens, past_key_values=cache, logits_to_keep=1)  # eager: it gives the cache its fixed addresses
    mode = "reduce-overhead" if args.device == "cuda" else "default"
    step = torch.compile(model, mode=mode, fullgraph=True, dynamic=False)
    token = tokens[:, :1].clone()

    def run() -> None:
        for _ in range(args.steps):
            torch.compiler.cudagraph_mark_step_begin()
            step(token, past_key_values=cache)
        for layer in cache.layers:
            layer.cumulative_length.fill_(args.prompt)

    return run


def report(rows: list[Row], checks: list[str], args: argparse.Namespace, elapsed: float) -> str:
    cpu = f"{platform.machine()} CPU, compile mode default"
    device = torch.cuda.get_device_name() if args.device == "cuda" else cpu
    command = shlex.join(["bench/bench_single_gpu.py", *sys.argv[1:]])
    ours = [row for row in rows if row.model.startswith(("standard", "ladder"))]
    worst = min(ours, key=Row.worst)
    verdict = "yes" if worst.worst() >= CLOSE else "no"
    heads = " | ".join(f"{measure}, tokens/s | speed" for measure in MEASURES)
    return f"""# One GPU: rewired against stock Llama

`python {command}`, {date.today()}; {device};
torch {torch.__version__}, transformers {transformers.__version__}; {elapsed:.0f} s in all.

Random bfloat16 weights, shared by the models of a shape; batch 1, prefill of {args.prompt} tokens, decode after that.
Speed is stock's time by the model's, above 1 where the model is faster: the median of {args.pairs} interleaved pairs,
and their quartiles. `stock again` is stock against itself.

{chr(10).join(f"- {check}" for check in checks)}

| shape | attention | model | {heads} |
|{"---|" * 9}
{chr(10).join(map(str, rows))}

The slowest median of these is {worst.worst():.3f}: {worst.model}, {worst.shape}, {worst.attention}.

ladder and standard decode and prefill within 2 % of stock: {verdict}
"""


if __name__ == "__main__":
    main()
