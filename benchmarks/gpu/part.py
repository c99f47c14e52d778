"""What the parts share: their arguments, the section of the page that they write, and a random checkpoint."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from rewired.cache import write_whole
from rewired.checkpoint.named_shapes import named_shapes

STARTED = time.monotonic()


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    made.add_argument("--section", type=Path, required=True, help="the file to write: Markdown")
    return made


def write(section: Path, *blocks: str) -> None:
    """Whole or not at all, however this process ends."""
    write_whole(section, "\n\n".join(block.strip() for block in blocks) + "\n")


def progress(line: str) -> None:
    print(f"{time.monotonic() - STARTED:4.0f} s  {line}", flush=True)


def random_checkpoint(shape_name: str, folder: Path, device: str) -> Path:
    """Random bfloat16 weights of a shape's size, and a tokenizer that knows a word for each token: w0, w1, ..."""
    shape = named_shapes()[shape_name]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape.config()), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(shape.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(folder)
    return folder


def random_tokens(shape_name: str, rows: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, named_shapes()[shape_name].vocab_size, (rows, length), generator=generator).tolist()
