"""What else a refit could do, and on what: every variant of bench/variants.py beside what is shipped, and other texts.

.venv/bin/python bench/refit_variants.py            # all of them; what results/quality/variants.jsonl has is kept
.venv/bin/python bench/refit_variants.py "ridge"    # only those whose names begin so
.venv/bin/python bench/refit_variants.py --model small-llama   # the model of studies/small_llama.py

On a plain ladder, since that one lacks most.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quality import FOLDER, MODEL, WINDOWS, WIRINGS, as_row, compare, held_out
from transformers import AutoConfig
from transformers.utils import logging
from variants import VARIANTS

from rewired.convert import RefitRequest, Request, convert
from rewired.refit.run import RECIPE
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
    known = {tuple(row[:2]) for row in rows if row[4:] == [RECIPE, WINDOWS]}
    with tempfile.TemporaryDirectory(prefix="rewired-variants-") as scratch:
        source = convert(args.model, Path(scratch) / "source", Request([{"layers": "0-", "preset": "standard"}])).out
        texts, domains = held_out(source), write_domains(Path(scratch))
        for name, layers, tokens, text in runs(AutoConfig.from_pretrained(source).num_hidden_layers, domains):
            if (name, layers) in known or not name.startswith(tuple(args.names)):
                continue
            with tempfile.TemporaryDirectory(dir=scratch) as folder, VARIANTS.get(name, nullcontext)():
                request = Request([WIRINGS["ladder"] | {"layers": layers}], refit=RefitRequest(text, tokens))
                out = convert(source, Path(folder) / "model", request).out
                if name == "a bias":
                    config = json.loads((out / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
                    (out / "config.json").write_text(json.dumps(config))
                found = {kind: as_row(one) for kind, one in compare(source, out, texts).items()}
            with result.open("a") as file:
                file.write(json.dumps([name, layers, tokens, found, RECIPE, WINDOWS]) + "\n")
            print(name, layers, {kind: round(one["kl"], 3) for kind, one in found.items()}, flush=True)


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
    """Calibration text of one kind, and of all three, without what judges."""
    alpaca, c4, dpo, wiki = (found[: len(found) // 2] for found in mix())
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
