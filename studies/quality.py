"""The quality of every wiring right after conversion and after a refit: KL to the original on held-out text.

.venv/bin/python studies/quality.py                      # every wiring below
.venv/bin/python studies/quality.py ladder@15            # only those whose names begin with this
.venv/bin/python studies/quality.py --whole ladder+peek@0-30  # on all held-out text of the packaged mix

Rows of the current refit that the file of results/quality has (measured or whole.jsonl) are not measured again.
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import rewired  # noqa: F401 - registers the rewired classes
from rewired.convert import RefitRequest, Request, convert
from rewired.divergence import Divergence, divergence
from rewired.model.wiring_text import parse_wiring
from rewired.refit.run import ALGORITHM_VERSION
from rewired.text.conversations import Document
from rewired.text.documents import KEPT_BACK, mix
from rewired.text.windows import Cutter

FOLDER = Path(__file__).resolve().parents[1] / "results" / "quality"
MODEL, LAYERS = "smollm2-135m", 30
KINDS = ("prose", "chat", "code")
FILES = ("alpaca", "c4", "dpo", "wiki")  # of the packaged mix
WINDOWS = 32  # of 512 tokens, of each kind of text
WITHOUT_LISTS = 8  # the version of the refit whose mix had none, and which is as the current one else

WIRINGS = (
    "ladder",
    "ladder+peek",
    "ladder+peek+delay-2",
    "ladder+peek@{0}:attn, ladder+peek+delay-2@{0}:mlp",
    "parallel",
    "parallel+overlap",
    "desync-2x",
    "desync-4x",
    "partial-0.5",
)
FITS: dict[str, RefitRequest | None] = {
    "converted": None,
    "refit 32k": RefitRequest(tokens=32_768),
    "refit 64k": RefitRequest(tokens=65_536),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--whole", action="store_true", help="on all held-out text of each file of the packaged mix")
    args = parser.parse_args()
    logging.disable_progress_bar()
    result = FOLDER / ("whole.jsonl" if args.whole else "measured.jsonl")
    windows = "all" if args.whole else WINDOWS
    known = {_name(row) for row in read(result) if is_current(row, windows)}
    with tempfile.TemporaryDirectory(prefix="rewired-quality-") as scratch:
        source = standard(Path(scratch) / "source")
        texts = kept_back(source) if args.whole else held_out(source)
        for row in _rows():
            if _name(row) not in known and _name(row).startswith(tuple(args.names)):
                row["windows"] = windows
                with tempfile.TemporaryDirectory(dir=scratch) as folder:
                    _measure(row, source, Path(folder) / "model", texts)
                append(result, row)


def read(path: Path) -> list[Any]:
    """The rows of a .jsonl file; none where it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, row: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def put_tables(page: Path, *tables: str) -> None:
    """Put these in the places of a page's tables, one after another."""
    new = iter(tables)
    page.write_text(re.sub(r"(?:^\|.*\n)+", lambda _: next(new), page.read_text(), flags=re.MULTILINE))


def standard(out: Path) -> Path:
    """The original, converted with no layer rewired: what all studies start from, and compare with."""
    return convert(MODEL, out, Request([{"layers": "0-", "preset": "standard"}])).out


def _rows() -> Iterator[dict[str, Any]]:
    """A row to measure for each fit and wiring, of the last quarter, half, three quarters and all of the layers."""
    for fit in FITS:
        for quarters in (1, 2, 3, 4):
            for name in WIRINGS:
                text = name if "@" in name else f"{name}@{{0}}"
                yield {"wiring": text.format(f"{LAYERS - round(LAYERS * quarters / 4)}-{LAYERS}"), "fit": fit}


def is_current(row: dict[str, Any], windows: int | str = WINDOWS, since: int = ALGORITHM_VERSION) -> bool:
    """Whether the row is what would be measured now, or by the version `since`."""
    return row["windows"] == windows and (row["fit"] == "converted" or row["algorithm"] >= since)


def _name(row: dict[str, Any]) -> str:
    return f"{row['wiring']} {row['fit']}"


def _measure(row: dict[str, Any], source: Path, out: Path, texts: dict[str, torch.Tensor]) -> None:
    started = time.perf_counter()
    done = convert(source, out, Request(parse_wiring(row["wiring"]), refit=FITS[row["fit"]]))
    row["seconds"] = round(time.perf_counter() - started, 1)
    row["passes"] = round(done.refit.passes, 2) if done.refit else 0
    row["algorithm"] = ALGORITHM_VERSION if done.refit else 0
    row["exposed"] = done.plan.table.total.exposed
    row["on"] = compare(source, out, texts)
    print(_name(row), {kind: round(on["kl"], 3) for kind, on in row["on"].items()}, flush=True)


def compare(original: Path, other: Path, texts: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Divergences by the kind of text, as result files hold them."""
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    return {
        name: _as_row(divergence(_original(original), lambda ids: model(ids).logits, windows))
        for name, windows in texts.items()
    }


@cache
def _original(folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """The original model as a function from input_ids to logits, which computes the last states of a window once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states = dict[bytes, torch.Tensor]()

    def logits(ids: torch.Tensor) -> torch.Tensor:
        key = ids.numpy().tobytes()
        if key not in states:
            states[key] = model.model(ids).last_hidden_state
        result: torch.Tensor = model.lm_head(states[key])
        return result

    return logits


def held_out(source: Path) -> dict[str, torch.Tensor]:
    """Windows of prose and chat from the held-out end of the packaged mix, and of code from the standard library."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    alpaca, c4, dpo, wiki = (documents[::-1] for documents in mix())
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code: list[Document] = [path.read_text(encoding="utf-8", errors="replace")[:6000] for path in modules[::8]]

    def windows(*kinds: Iterable[Document]) -> torch.Tensor:
        return torch.stack([w for kind in kinds for w in Cutter(tokenizer).in_order(kind, WINDOWS // len(kinds))])

    return {"prose": windows(c4, wiki), "chat": windows(alpaca, dpo), "code": windows(code)}


def kept_back(source: Path) -> dict[str, torch.Tensor]:
    """All held-out windows of each file of the packaged mix."""
    cutter = Cutter(AutoTokenizer.from_pretrained(source))
    return {
        name: torch.stack(cutter.in_order(documents[-(len(documents) // KEPT_BACK) :], len(documents)))
        for name, documents in zip(FILES, mix(), strict=True)
    }


def _as_row(measured: Divergence) -> dict[str, Any]:
    row = asdict(measured)
    return {name: value for name, value in row.items() if name != "agreement"} | {"top1": measured.agreement[1]}


def kls_with_errors(on: dict[str, Any], kinds: Iterable[str]) -> list[str]:
    """The KLs of what `compare` gives, as cells of a table."""
    return [f"{on[kind]['kl']:.3f}±{on[kind]['kl_standard_error']:.3f}" for kind in kinds]


if __name__ == "__main__":
    main()
