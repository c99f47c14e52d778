"""A small world to evaluate in: a tiny Llama with a tokenizer, the same rewired, and rows like those of real tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rewired.convert.convert import Request, convert

from .benchmark_rows import CASES, OLMO, carry, mark_complete

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
LADDER = [{"layers": "1-4", "preset": "ladder"}]
DENSE = [{"layers": "0-4", "preset": "standard"}]


def make_dense(folder: Path, adds_bos: bool = False, **changes: Any) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).save_pretrained(folder)
    tokenizer(adds_bos).save_pretrained(folder)
    return folder


def make_rewired(dense: Path, folder: Path, wiring: list[dict[str, Any]]) -> Path:
    return convert(str(dense), folder, Request(wiring)).out


def tokenizer(adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    bytewise = Tokenizer(models.BPE(vocabulary, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    if adds_bos:
        bytewise.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = CHAT
    return made


def make_rows(folder: Path, count: int = 12) -> Path:
    """Rows of PIQA, LAMBADA and GSM8K, each different."""
    by_task = {case.task: case for case in CASES}
    words = ["river", "stone", "bread", "cloud"]
    carry(
        folder,
        f"{OLMO}/piqa/plain_text/validation",
        [
            {"goal": f"Find {words[n % 4]} {n}", "sol1": f"go {n}", "sol2": "wait a while", "label": n % 2}
            for n in range(count)
        ],
    )
    carry(
        folder,
        by_task["lambada_openai"].file,
        [{"query": f"They saw {n} and the {words[n % 4]} saw the", "choices": [words[n % 3]]} for n in range(count)],
    )
    carry(
        folder,
        by_task["gsm8k_cot"].file,
        [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(count)],
    )
    carry(folder, by_task["humaneval"].file, [by_task["humaneval"].carried])
    return mark_complete(folder)
