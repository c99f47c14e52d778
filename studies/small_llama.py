"""A small Llama of another shape than SmolLM2, trained from scratch: the second model that refits are tried on.

.venv/bin/rewired data fetch instruct .instruct
.venv/bin/python studies/small_llama.py OUT [--minutes 60]

It has 12 layers, 8 heads and 8 KV heads, 11 M parameters and a vocabulary of 4,096 tokens, and reads the conversations
of ShareGPT once. It learns little in an hour, but it is a language model (`quality.py --model OUT`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rewired.text.conversations import read_row

TEXT = Path(".instruct/sharegpt.jsonl")
WORDS, WINDOW, BATCH = 4096, 256, 2  # little text: many steps of few tokens learn most from it
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
)
LEARNING_RATE, WARMUP = 1e-3, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    model = train(tokenizer, args.minutes * 60)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def texts() -> Iterator[str]:
    with TEXT.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            document = read_row(json.loads(line), f"{TEXT}, row {number}")
            yield document if isinstance(document, str) else "\n\n".join(turn["content"] for turn in document)


def train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=WORDS, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(islice(texts(), 2000), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def train(tokenizer: PreTrainedTokenizerFast, seconds: float) -> LlamaForCausalLM:
    """The learning rate falls with the time that is left, so a faster machine reads more."""
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    started, losses = time.monotonic(), list[float]()
    for step, batch in enumerate(batches(tokenizer)):
        spent = (time.monotonic() - started) / seconds
        if spent >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * spent))
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 400 == 399:
            print(f"{(step + 1) * BATCH * WINDOW:,} tokens, loss {sum(losses[-400:]) / 400:.3f}", flush=True)
    return model.eval()


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[torch.Tensor]:  # [BATCH, WINDOW]
    windows, ids = list[torch.Tensor](), list[int]()
    for text in texts():
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        while len(ids) >= WINDOW:
            windows.append(torch.tensor(ids[:WINDOW]))
            ids = ids[WINDOW:]
        if len(windows) >= 64 * BATCH:
            random.Random(0).shuffle(windows)
            while len(windows) >= BATCH:
                yield torch.stack([windows.pop() for _ in range(BATCH)])


if __name__ == "__main__":
    main()
