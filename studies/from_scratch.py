"""Wirings trained from scratch: the validation loss of small Llamas, beside the papers' order of the same rows.

    .venv/bin/python studies/from_scratch.py       # all that results/from-scratch lacks; 8 hours on one core, resumable
    .venv/bin/python studies/from_scratch.py 2 3   # these seeds alone, for another core

All have the sizes of SIZES and read the same windows of the packaged mix once, in the order of their seed; its last
fifth is held out. The papers' masks, which the package lacks, are put into `standard` here: each shard sends only some
of what it adds to the stream, and the rest is lost, forward and backward.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import torch
from adapt_smollm2 import REPO, as_flags
from quality import append, read
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

import rewired  # noqa: F401 - registers the rewired classes
from rewired.adapt import assemble
from rewired.adapt.recipe import reading
from rewired.adapt.run import adapt
from rewired.model.sharding import Shards, row_parallel
from rewired.tables import markdown
from rewired.text.conversations import Document
from rewired.text.documents import KEPT_BACK, mix, shuffled
from rewired.text.windows import Cutter

RESULT = REPO / "results" / "from-scratch" / "measured.jsonl"
MADE = REPO / "build" / "from-scratch"
PAGE = """# Trained from scratch

    .venv/bin/python studies/from_scratch.py

Llamas of 3.4 M parameters (6 layers, 192 channels, 4 shards) read 0.62 M tokens of the packaged mix once, in the order
of their seed. The loss is of held-out windows, in nats a token; mean and standard deviation of {seeds} seeds. Masks
send only some of what a shard adds. The last column: Wikitext perplexity of 1B and 3B in Ladder Residual (tables 3 and
5), or validation loss of 130M in CAAT-Net (table 2), of its p in brackets where that is another.

{table}

**So little training shows how fast models begin to learn, not where they end.** The papers' order is another.
"""
SUMS = RESULT.with_name("accumulation.jsonl")  # by accumulation.py
SUMS_PAGE = """
    .venv/bin/python studies/accumulation.py

Four ranks send 16 bits, for {steps} steps. The loss, seed by seed: {wide} if they add up in float32,
{narrow} if in 16 bits. **So short a training loses nothing by it.** CAAT-Net's longer
ones (v1) need float32.
"""
WORDS, SHARDS, WINDOW, BATCH = 4096, 4, 256, 2  # in little time, many steps of few tokens teach most
HELD_OUT = 48  # windows to judge on, of each file of the mix
SEEDS = (1, 2, 3)
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": WORDS,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": WINDOW,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "dtype": "float32",
}
TRAINING: dict[str, Any] = {
    "init": "scratch",
    "model": str(MADE / "sizes"),
    "tp_shards": SHARDS,
    "datasets": [str(MADE / "rows.jsonl")],
    "held_out": 0,
    "max_length": WINDOW,
    "num_train_epochs": 1,
    "per_device_train_batch_size": BATCH,
    "learning_rate": 2e-3,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "warmup_steps": 100,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 2e-4},
    "activation_checkpointing": False,
    "logging_steps": 20,
    "save_steps": 200,
    "save_total_limit": 1,
    "disable_tqdm": True,
}
Mask = Callable[[torch.Tensor], torch.Tensor]  # of the shards' parts [r, B, T, H], which of them are sent


def top_k(share: float, parts: torch.Tensor) -> torch.Tensor:
    sizes = parts.detach().abs()
    kept = sizes.topk(round(share * parts.shape[-1]), dim=-1, sorted=False).indices
    return torch.zeros_like(sizes).scatter_(-1, kept, 1.0)


def at_random(share: float, parts: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(parts).lt(share).to(parts.dtype)


SHARES = (0.75, 0.5, 0.25)
MASKS: dict[str, Mask] = {
    f"{name} {share}": partial(mask, share)
    for name, mask in (("top-k", top_k), ("random", at_random))
    for share in SHARES
}
# the paper's desync divides what is local by the shards
WIRINGS = ("standard", "ladder", "parallel", "desync-2x(mean)", "desync-4x(mean)", *(f"partial-{p}" for p in SHARES))
# Wikitext perplexities of 1B and 3B (Ladder Residual, tables 3 and 5), validation losses of 130M (CAAT-Net, table 2)
PAPERS = {
    "standard": "18.54, 14.48; 2.03",
    "ladder": "18.42, 14.90",
    "parallel": "18.95, 14.96",
    "desync-2x(mean)": "18.70, 14.67",
    "desync-4x(mean)": "18.58, 14.60",
    "partial-0.75": "2.02 (0.7)",
    "partial-0.5": "2.02",
    "partial-0.25": "2.03 (0.3)",
    "top-k 0.75": "2.09 (0.7)",
    "top-k 0.5": "2.15",
    "top-k 0.25": "2.27 (0.3)",
    "random 0.75": "2.11 (0.7)",
    "random 0.5": "2.30",
    "random 0.25": "2.46 (0.3)",
}


def main() -> None:
    logging.disable_progress_bar()
    RESULT.parent.mkdir(exist_ok=True)
    prepare()
    windows = torch.stack([torch.tensor(ids) for ids in json.loads((MADE / "held_out.json").read_text())])
    for seed in map(int, sys.argv[1:] or SEEDS):
        for name in (*WIRINGS, *MASKS):
            if (name, seed) not in {(row["name"], row["seed"]) for row in read(RESULT)}:
                append(RESULT, {"name": name, "seed": seed} | train(name, seed, windows))
                RESULT.with_name("README.md").write_text(page(read(RESULT), read(SUMS)))


def prepare() -> None:
    """The sizes with a tokenizer, the rows to train on, and the windows to judge on."""
    if (MADE / "held_out.json").exists():
        return
    (MADE / "sizes").mkdir(parents=True, exist_ok=True)
    ends = [len(documents) - len(documents) // KEPT_BACK for documents in mix()]
    documents = shuffled(each for file, end in zip(mix(), ends, strict=True) for each in file[:end])
    tokenizer = train_tokenizer(documents[:2000])
    tokenizer.save_pretrained(MADE / "sizes")
    (MADE / "sizes" / "config.json").write_text(json.dumps(SIZES))
    (MADE / "recipe.yaml").write_text("{}")
    cutter = Cutter(tokenizer, WINDOW)
    rows = [json.dumps({"text": tokenizer.decode(ids)}) + "\n" for ids in cutter.in_order(documents, 1_000_000)]
    (MADE / "rows.jsonl").write_text("".join(rows))
    held_out = [w for file, end in zip(mix(), ends, strict=True) for w in cutter.in_order(file[end:], HELD_OUT)]
    (MADE / "held_out.json").write_text(json.dumps([ids.tolist() for ids in held_out]))


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=WORDS, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(map(plain, documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def plain(document: Document) -> str:
    return document if isinstance(document, str) else "\n\n".join(turn["content"] for turn in document)


def train(name: str, seed: int, windows: torch.Tensor) -> dict[str, Any]:
    """Train one model, and judge it as it was trained. A run that was killed goes on."""
    mask, out = MASKS.get(name), MADE / re.sub(r"[^\w.-]+", "-", f"{name}-{seed}")
    keys = TRAINING | {"wiring": "standard" if mask else name, "seed": seed, "output_dir": str(out)}
    stages = reading.read(MADE / "recipe.yaml", as_flags(keys))
    load = assemble.load_student
    with patch.object(assemble, "load_student", lambda *args: masked(load(*args), mask)):
        final = adapt(stages, resume=True)
    torch.manual_seed(0)
    model = masked(AutoModelForCausalLM.from_pretrained(final), mask).eval()
    logged = json.loads((final / "training.json").read_text())
    record = json.loads((final / "config.json").read_text())["adapted"]
    shutil.rmtree(out)
    return {
        "loss": validation_loss(model, windows),
        "tp_shards": model.config.tp_shards if mask or model.config.depends_on_shards else None,
        "last_training_loss": mean([entry["loss"] for entry in logged if "loss" in entry][-10:]),
        "tokens": record["tokens"],
        "steps": record["steps"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(next(entry["train_runtime"] for entry in logged if "train_runtime" in entry)),
    }


def masked(model: Any, mask: Mask | None) -> Any:
    """`model`, of which every module's shards send only what `mask` lets through."""
    writers = tuple(module.writer.name for module in model.family.modules) if mask else ()
    for path, projection in model.named_modules():
        if path.endswith(writers):
            projection.forward = partial(_sum_of_masked, projection, mask)
    return model


def _sum_of_masked(projection: nn.Linear, mask: Mask, inputs: torch.Tensor) -> torch.Tensor:
    parts = row_parallel(projection, Shards(SHARDS, SHARDS), inputs)  # [r, B, T, H]
    return (parts * mask(parts)).sum(0)


def validation_loss(model: Any, windows: torch.Tensor) -> float:
    """Mean cross-entropy, nats a token."""
    with torch.no_grad():
        return mean(model(input_ids=ids[None], labels=ids[None]).loss.item() for ids in windows)


def page(rows: list[dict[str, Any]], sums: list[dict[str, Any]]) -> str:
    losses = {(row["name"], row["seed"]): row["loss"] for row in rows}
    lines = []
    for name, papers in PAPERS.items():
        seeds = [seed for seed in SEEDS if (name, seed) in losses]
        more = [losses[name, seed] - losses["standard", seed] * (name != "standard") for seed in seeds]
        if seeds:
            lines.append([name, _with_spread(more, "" if name == "standard" else "+"), papers])
    table = markdown(["wiring or mask", "loss (standard), or difference from it", "papers"], lines)
    text = PAGE.format(seeds=len({row["seed"] for row in rows}), table=table)
    wide, narrow = (", ".join(f"{row['loss']:.3f}" for row in sums if row["bits"] == bits) for bits in (32, 16))
    return text + SUMS_PAGE.format(steps=sums[0]["steps"], wide=wide, narrow=narrow) if sums else text


def _with_spread(values: list[float], sign: str) -> str:
    return f"{mean(values):{sign}.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
