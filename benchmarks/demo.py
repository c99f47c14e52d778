"""`make demo`: convert a real pretrained model, train it for a minute, chat with all three versions, compare them."""

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
RECIPE = ROOT / "recipes" / "smollm2-135m-ladder-distill.yaml"
FOLDER = ROOT / "demo-out"
PROMPT = "What is the capital of France, and what is it known for?"
ORIGINAL, CONVERTED, HEALED = "smollm2-135m", "smollm2-135m-ladder-15-30", "healed/final"
SHORT = """--refit_tokens 4096 --max_steps 8 --warmup_steps 2 --max_length 256 --held_out 12 --eval_steps 8
    --logging_steps 4 --save_strategy no --disable_tqdm true"""


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(
        "This takes SmolLM2-135M, makes its upper half a ladder, refits and trains that for 8 steps, chats with all "
        f"three, and compares them: about five minutes on two CPU cores, 1 GB in {FOLDER}."
    )
    shutil.rmtree(FOLDER, ignore_errors=True)  # of an earlier demo
    FOLDER.mkdir()
    run(f"convert smollm2-135m {ORIGINAL} --standard-layers 0- --to-stock")
    run(f"convert ./{ORIGINAL} {CONVERTED} --ladder-layers 15-30")
    run("rewired data fetch calibration texts")
    run(f"adapt {RECIPE} --model ./{ORIGINAL} --datasets texts --output_dir healed {SHORT}")
    for name in (ORIGINAL, CONVERTED, HEALED):
        print(f'\n>>> model = AutoModelForCausalLM.from_pretrained("{name}")')
        print(f"{PROMPT}\n    {chat(FOLDER / name)}")
    run(f"evaluate {ORIGINAL} {CONVERTED} {HEALED} --out report")
    print(f"\nIn {FOLDER}: the models {ORIGINAL}, {CONVERTED} and {HEALED}; their comparison is report/report.html.")
    print("Those were some thousand tokens. results/quality/README.md: what a refit on more of them brings back;")
    print("docs/adapt.md: how to train on.")


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
