"""A study of what else a refit could do: every variant of variants.py beside what is shipped, and other texts.

.venv/bin/python studies/refit_variants.py            # all that results/quality/variants.jsonl lacks
.venv/bin/python studies/refit_variants.py "ridge"    # only those whose names begin so
.venv/bin/python studies/refit_variants.py --model small-llama   # the model of studies/small_llama.py

On a plain ladder, since that one lacks most.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from quality import FOLDER, MODEL, WINDOWS, WIRINGS, as_row, compare, held_out
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.utils import logging
from variants import VARIANTS, Continues, Variant

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.convert import Request, convert
from rewired.refit.activation_store import ActivationStore
from rewired.refit.run import ALGORITHM_VERSION, load_text, model_config
from rewired.refit.sweep import Sweep
from rewired.refit.weights import Finished, Weights
from rewired.text.documents import mix

TOKENS = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--model", default=MODEL, help="a checkpoint; another one's rows go to a file of their own")
    args = parser.parse_args()
    logging.disable_progress_bar()
    result = FOLDER / ("variants.jsonl" if args.model == MODEL else f"variants-{Path(args.model).name}.jsonl")
    rows = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    known = {tuple(row[:2]) for row in rows if row[4:] == [ALGORITHM_VERSION, WINDOWS]}
    with tempfile.TemporaryDirectory(prefix="rewired-variants-") as scratch:
        source = convert(args.model, Path(scratch) / "source", Request([{"layers": "0-", "preset": "standard"}])).out
        texts, domains = held_out(source), write_domains(Path(scratch))
        for name, layers, tokens, text in runs(AutoConfig.from_pretrained(source).num_hidden_layers, domains):
            if (name, layers) in known or not name.startswith(tuple(args.names)):
                continue
            entry, variant = WIRINGS["ladder"] | {"layers": layers}, VARIANTS.get(name, Variant())
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                out = refitted(source, entry, text, tokens, variant, Path(folder))
                measured = {kind: as_row(one) for kind, one in compare(source, out, texts).items()}
            with result.open("a") as file:
                file.write(json.dumps([name, layers, tokens, measured, ALGORITHM_VERSION, WINDOWS]) + "\n")
            print(name, layers, {kind: round(one["kl"], 3) for kind, one in measured.items()}, flush=True)


def refitted(source: Path, entry: dict[str, Any], text: str, tokens: int, variant: Variant, folder: Path) -> Path:
    """The dense checkpoint in `source`, rewired by `entry` and refitted as the variant has it, in `folder`."""
    if variant.has_biases:
        source = with_biases(source, folder / "source")
    out = convert(source, folder / "model", Request([entry])).out
    config = json.loads((out / "config.json").read_text())
    files = {name: source / info.file for name, info in Checkpoint.open(source).tensors().items()}
    weights = Weights(files, torch.device("cpu"))
    calibration = variant.calibration(**vars(load_text(config, source, text, tokens)))
    fitter, finished = variant.fitter(), Finished(folder / "sweep-0", {})
    for number in range(variant.sweeps):
        if number:
            fitter, finished = Continues(earlier=finished), Finished(folder / f"sweep-{number}", {})
        store = ActivationStore(None)
        model = model_config(config)
        sweep = Sweep(model, weights, calibration, None, store, gains=False, matrices=True, fitter=fitter)
        sweep.run(finished, lambda *_: None)
    replace_tensors(out, finished.files())
    return out


def with_biases(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint in one file whose projections have biases, all of them zero."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    weights = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    biases = {name.replace("weight", "bias"): tensor.new_zeros(len(tensor)) for name, tensor in weights.items()}
    save_file(tensors | biases, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def replace_tensors(folder: Path, files: Mapping[str, Path]) -> None:
    """Replace those tensors of the checkpoint in `folder` that `files` hold."""
    fitted: dict[str, torch.Tensor] = {}
    for path in set(files.values()):
        fitted |= load_file(path)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: fitted.get(name, tensor) for name, tensor in tensors.items()}, path, {"format": "pt"})


def runs(count: int, domains: dict[str, str]) -> Iterator[tuple[str, str, int, str]]:
    """Name, layers of `count`, tokens and text of each."""
    upper = f"{count // 2}-{count}"
    for name in VARIANTS:
        in_the_middle = name.startswith("the middle third")
        for layers in (f"{count // 3}-{2 * count // 3}",) if in_the_middle else (upper, f"0-{count}"):
            yield name, layers, TOKENS, "mix"
    for name, text in domains.items():
        yield f"text: {name}", upper, TOKENS, text
    for tokens in (4, 8, 16, 32, 64, 128, 256):
        yield f"tokens: {tokens}k", upper, tokens * 1024, "mix"


def write_domains(folder: Path) -> dict[str, str]:
    """Calibration text of one kind, and of all three, without what is held out."""
    alpaca, c4, dpo, wiki = (documents[: len(documents) // 2] for documents in mix())
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code = [path.read_text(encoding="utf-8", errors="replace")[:6000] for n, path in enumerate(modules) if n % 8]
    prose, chat = {"c4": c4, "wiki": wiki}, {"alpaca": alpaca, "dpo": dpo}
    kinds: dict[str, dict[str, Any]] = {
        "prose": prose,
        "chat": chat,
        "code": {"code": code},
        "prose and chat": prose | chat,
        "prose, chat and code": prose | chat | {"code": code},
    }
    for name, parts in kinds.items():
        (folder / name).mkdir()
        for part, documents in parts.items():
            rows = [json.dumps({"text": one} if isinstance(one, str) else {"messages": one}) for one in documents]
            (folder / name / f"{part}.jsonl").write_text("\n".join(rows))
    return {name: str(folder / name) for name in kinds}


if __name__ == "__main__":
    main()
