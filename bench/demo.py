"""`make demo`: rewire a real pretrained model, load it, chat with both, and measure what it cost."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

import rewired  # noqa: F401 - registers the rewired classes

PROMPT = "What is the capital of France, and what is it known for?"
PAGE = (Path(__file__).parents[1] / "evaluate" / "texts" / "prose.txt").read_text()
TOKENS = 1024  # of the page


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="rewired-demo-") as folder:
        # the model as it is, for comparison; then the hybrid
        run(folder, "convert", "smollm2-135m", "smollm2-135m", "--standard-layers", "0-", "--to-llama")
        run(folder, "convert", "./smollm2-135m", "--ladder-layers", "15-30", "--peek")
        perplexities = []
        for name in ("smollm2-135m", "smollm2-135m-ladder-peek-15-30"):
            print(f'\n>>> model = AutoModelForCausalLM.from_pretrained("{name}")')
            model = AutoModelForCausalLM.from_pretrained(Path(folder) / name, dtype=torch.float32).eval()
            tokenizer = AutoTokenizer.from_pretrained(Path(folder) / name)
            print(f"{type(model).__name__}: {PROMPT}\n    {chat(model, tokenizer)}")
            perplexities.append(perplexity(model, tokenizer))
    original, hybrid = perplexities
    print(f"\nPerplexity on a page of prose ({TOKENS} tokens): original {original:.1f}, rewired {hybrid:.1f}.")
    print("No weight has changed yet: the rewired model is a starting point. Fine-tune it as you would any Llama, or")
    print("fit its weights to their new wiring in some minutes, without training: convert ... --refit")


def run(folder: str, *command: str) -> None:
    """Show a command and run it in `folder`, as a user would."""
    print("\n$ " + " ".join(command), flush=True)
    subprocess.run([Path(sys.executable).parent / command[0], *command[1:]], cwd=folder, check=True)


def chat(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """The model's greedy answer to the prompt."""
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    input_ids = tokenizer(PAGE, return_tensors="pt").input_ids[:, :TOKENS]
    with torch.no_grad():
        return math.exp(model(input_ids, labels=input_ids).loss.item())


if __name__ == "__main__":
    main()
