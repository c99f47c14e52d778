"""Quantise a rewired checkpoint with llm-compressor, as docs/quantise.md says, in an environment that has it.

python examples/quantise.py SOURCE OUT W8A8                                # or FP8_DYNAMIC; by rounding
python examples/quantise.py SOURCE OUT W4A16 --text TEXT [--group 64]      # by GPTQ, which sees a text
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

import rewired  # noqa: F401 - registers the classes

WINDOW = 512
WINDOWS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("scheme")
    parser.add_argument("--group", type=int, help="weights that share a scale")
    parser.add_argument("--text", type=Path, help="calibrate GPTQ on it")
    args = parser.parse_args()
    scheme = preset_name_to_scheme(args.scheme, ["Linear"])
    if args.group:
        scheme.weights.group_size = args.group
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(args.source)
    modifier, data = (GPTQModifier, calibration(tokenizer, args.text)) if args.text else (QuantizationModifier, {})
    recipe = modifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    oneshot(model=model, processor=tokenizer, recipe=recipe, output_dir=args.out, **data)


def calibration(tokenizer, text: Path) -> dict:
    ids = tokenizer(text.read_text("utf-8")).input_ids
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW, WINDOW)]
    windows = windows[:: max(1, len(windows) // WINDOWS)][:WINDOWS]
    rows = {"input_ids": windows, "attention_mask": [[1] * WINDOW] * len(windows)}
    return {
        "dataset": Dataset.from_dict(rows),
        "num_calibration_samples": len(windows),
        "max_seq_length": WINDOW,
    }


if __name__ == "__main__":
    main()
