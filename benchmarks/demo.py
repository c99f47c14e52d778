"""`make demo`: convert a real pretrained model, refit it, chat with all three versions, compare them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import rewired  # noqa: F401 - registers the rewired classes

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "demo-out"
PROMPT = "What is the capital of France, and what is it known for?"
ORIGINAL, CONVERTED, REFITTED = "smollm2-135m", "ladder-peek", "ladder-peek-refitted"
WIRING = "--wiring ladder+peek@15-30"


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(
        "This takes SmolLM2-135M, rewires its upper half, fits the weights to that, chats with all three models, and "
        f"compares them: about three minutes on two CPU cores, 1 GB in {FOLDER}."
    )
    shutil.rmtree(FOLDER, ignore_errors=True)  # of an earlier demo
    FOLDER.mkdir()
    run(f"convert smollm2-135m {ORIGINAL} --standard-layers 0- --to-stock")
    run(f"convert ./{ORIGINAL} {CONVERTED} {WIRING}")
    run(f"convert ./{ORIGINAL} {REFITTED} {WIRING} --refit --refit-tokens 8192")
    for name in (ORIGINAL, CONVERTED, REFITTED):
        print(f'\n>>> model = AutoModelForCausalLM.from_pretrained("{name}")')
        print(f"{PROMPT}\n    {chat(FOLDER / name)}")
    run(f"evaluate {ORIGINAL} {CONVERTED} {REFITTED} --out report")
    print(f"\nIn {FOLDER}: the models {ORIGINAL}, {CONVERTED} and {REFITTED}; their comparison is report/report.md.")
    print("The fit had 8,192 tokens, a quarter of the default. docs/adapt.md: how to train on.")


def run(command: str) -> None:
    """Show a command and run it in the demo's folder, as a user would."""
    parts = shlex.split(command)
    print(f"\n$ {shlex.join(parts)}", flush=True)
    subprocess.run([Path(sys.executable).parent / parts[0], *parts[1:]], cwd=FOLDER, check=True)


def chat(path: Path) -> str:
    """A model's greedy answer to the prompt."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    main()
