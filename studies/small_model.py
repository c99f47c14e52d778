"""A small Qwen3, trained from scratch: of that family no small real one is at hand offline.

.venv/bin/rewired data fetch instruct .instruct
.venv/bin/python studies/small_model.py OUT [--minutes 50]

12 layers, 8 heads, 4 KV heads, 6 M parameters, 4,096 words. It reads the packaged mix less its held-out end, and
10,000 conversations of ShareGPT. It learns little, but it is a language model; `studies/families.py --small OUT`
measures it.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rewired.text import MIX
from rewired.text.conversations import Document
from rewired.text.documents import shuffled, sources
from rewired.text.windows import Cutter

TEXTS = (MIX, ".instruct/sharegpt.jsonl")
WORDS, WINDOW, BATCH = 4096, 256, 2  # in little time, many steps of few tokens teach most
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}
LEARNING_RATE, WARMUP, REPORT = 2e-3, 200, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=50.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    documents = shuffled(chain.from_iterable(source for text in TEXTS for source in sources(text)))
    tokenizer = train_tokenizer(documents[:2000])
    windows = shuffled(Cutter(tokenizer, WINDOW).in_order(documents, 1_000_000))
    print(f"{len(windows) * WINDOW:,} tokens in all", flush=True)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    train(model, torch.stack(windows).split(BATCH), args.minutes * 60)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=WORDS, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(map(plain, documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def plain(document: Document) -> str:
    return document if isinstance(document, str) else "\n\n".join(turn["content"] for turn in document)


def train(model: Any, batches: tuple[torch.Tensor, ...], seconds: float) -> None:
    """The learning rate falls with the time that is left; a fast machine reads more, at most all once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    started, losses = time.monotonic(), list[float]()
    for step, batch in enumerate(batches, start=1):
        spent = (time.monotonic() - started) / seconds
        if spent >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * spent))
        with torch.autocast("cpu", torch.bfloat16):  # twice as fast
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % REPORT == 0:
            print(f"{step * BATCH * WINDOW:,} tokens, loss {sum(losses[-REPORT:]) / REPORT:.3f}", flush=True)


if __name__ == "__main__":
    main()
