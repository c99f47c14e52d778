"""KL over the bytes that a token waits for: payloads of several wirings, and what others compress with.

.venv/bin/python bench/studies/payloads.py                  # every row below
.venv/bin/python bench/studies/payloads.py "int4 0-30"      # only those whose names contain this
.venv/bin/python bench/studies/payloads.py --report         # the table and the picture of what is measured

Rows that results/quality/payloads.jsonl has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from quality import FOLDER, MODEL, as_row, compare, held_out
from transformers.utils import logging

from rewired.convert import RefitRequest, Request, convert
from rewired.model import collectives
from rewired.model.payload import Sections
from rewired.model.quantisation import Reduction
from rewired.model.wiring import Wiring

LAYERS, HIDDEN = 30, 576
FILE = FOLDER / "payloads.jsonl"
BASES: dict[str, dict[str, Any]] = {
    "standard": {"preset": "standard"},
    "ladder": {"preset": "ladder"},
    "ladder-peek": {"preset": "ladder", "peek": True},
    "desync-2x": {"preset": "desync", "every": 2},
    "desync-4x": {"preset": "desync", "every": 4},
}
PAYLOADS = ("int8", "int4/int8", "int4")
MASKS = ("top-k", "random")  # CAAT-Net's Table 2: of as many bytes as a payload, in 16 bits
KINDS = ("prose", "chat")
EVERY = 4  # of the held-out windows one is taken: 8 of each kind


@dataclass(frozen=True)
class Row:
    """A model to measure. `mask` stands in for the payload's rounding, and what it leaves out is lost."""

    wiring: str
    payload: str
    layers: str
    fit: str = "converted"
    basis: str = ""  # of convert --rotate
    mask: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.mask, self.wiring, self.payload, self.layers, self.fit, self.basis]))

    @property
    def entry(self) -> dict[str, Any]:
        return BASES[self.wiring] | {"layers": self.layers, "payload": self.payload}

    def bytes(self, which: str) -> float:
        """That a token waits for, or that are sent for it, as a share of standard's in 16 bits."""
        modules = Wiring.from_json([self.entry], LAYERS, HIDDEN).modules
        counted = [module for module in modules if module.is_exposed or (which == "sent" and module.launches)]
        return sum(module.payload_bytes(2) for module in counted) / (2 * LAYERS * HIDDEN * 2)


def rows() -> Iterator[Row]:
    """The important and the cheap first."""
    for layers in ("0-30", "15-30"):
        for basis in ("", "hadamard"):
            yield from (Row("standard", payload, layers, basis=basis) for payload in PAYLOADS)
    for layers in ("0-30", "15-30"):
        yield from (Row("standard", payload, layers, mask=mask) for payload in ("int8", "int4") for mask in MASKS)
    yield from (Row("desync-2x", payload, "0-30", "refit 32k", "hadamard") for payload in ("int4", "full"))
    yield Row("standard", "int4", "0-30", "refit 32k", "hadamard")
    for wiring in ("desync-2x", "ladder-peek", "ladder", "desync-4x"):
        yield from (Row(wiring, payload, "15-30", "refit 32k", "hadamard") for payload in ("int4", "int8", "full"))
    for wiring in ("ladder-peek", "desync-4x"):
        yield from (Row(wiring, payload, "0-30", "refit 32k", "hadamard") for payload in ("int4", "int8", "full"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--report", action="store_true", help="write payloads.md and payloads.png, measure nothing")
    args = parser.parse_args()
    logging.disable_progress_bar()
    if not args.report:
        measure([row for row in rows() if any(name in row.name for name in args.names)])
    measured = known()
    (FOLDER / "payloads.md").write_text(table(measured), encoding="utf-8")
    draw(measured, FOLDER / "payloads.png")


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def measure(wanted: Sequence[Row]) -> None:
    with tempfile.TemporaryDirectory(prefix="rewired-payloads-") as scratch:
        source = convert(MODEL, Path(scratch) / "source", Request([{"layers": "0-", "preset": "standard"}])).out
        texts = {kind: windows[::EVERY] for kind, windows in held_out(source).items() if kind in KINDS}
        for row in wanted:
            if row.name in {each["name"] for each in known()}:
                continue
            started = time.perf_counter()
            refit = RefitRequest(tokens=32_768) if row.fit != "converted" else None
            with tempfile.TemporaryDirectory(dir=scratch) as folder, masked(row):
                out = convert(
                    source, Path(folder) / "model", Request([row.entry], refit=refit, rotate=row.basis or None)
                ).out
                on = {kind: as_row(found) for kind, found in compare(source, out, texts).items()}
            record = {"name": row.name, **asdict(row), "waited": row.bytes("waited"), "sent": row.bytes("sent")}
            with FILE.open("a") as file:
                file.write(json.dumps(record | {"seconds": round(time.perf_counter() - started), "on": on}) + "\n")
            print(row.name, {kind: round(found["kl"], 4) for kind, found in on.items()}, flush=True)


@contextmanager
def masked(row: Row) -> Iterator[None]:
    """While it lasts, reductions keep some 16-bit channels of each part and of the sum, and lose the others.

    As many as take the payload's bytes; which ones they are is sent for nothing.
    """
    if not row.mask:
        yield
        return
    own, keep = collectives.quantised_sum, {"top-k": largest, "random": chosen_at_random}[row.mask]
    share = row.bytes("sent") if row.layers == f"0-{LAYERS}" else 2 * row.bytes("sent") - 1  # half of the layers

    def masked_sum(parts: torch.Tensor, sections: Sections) -> Reduction:
        nothing = torch.zeros_like(parts)
        return Reduction(keep(keep(parts, share).sum(0), share), nothing, nothing)

    collectives.quantised_sum = masked_sum
    try:
        yield
    finally:
        collectives.quantised_sum = own


def largest(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """Of each token."""
    kept = tensor.abs().topk(round(share * tensor.shape[-1]), dim=-1).indices
    return torch.zeros_like(tensor).scatter(-1, kept, tensor.gather(-1, kept))


def chosen_at_random(tensor: torch.Tensor, share: float) -> torch.Tensor:
    return tensor * (torch.rand(tensor.shape[-3:]) < share)  # all shards and the sum have channels of their own


def table(measured: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# KL over bytes",
        "",
        "Made by `bench/studies/payloads.py`; [README.md](README.md) has the method. Bytes are shares of what standard "
        "sends in 16 bits in all layers.",
        "",
        "| layers | wiring | payload | bytes waited for | sent | weights | KL prose | chat |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(measured, key=lambda row: (row["layers"], row["sent"], row["name"])):
        payload = f"{row['mask']}, bytes of {row['payload']}" if row["mask"] else row["payload"]
        payload += f", {row['basis']}" if row["basis"] else ""
        kls = [f"{row['on'][kind]['kl']:.4f} ± {row['on'][kind]['kl_standard_error']:.4f}" for kind in KINDS]
        shares = [f"{row[which]:.3f}" for which in ("waited", "sent")]
        lines.append(f"| {' | '.join([row['layers'], row['wiring'], payload, *shares, row['fit'], *kls])} |")
    return "\n".join(lines) + "\n"


def draw(measured: Sequence[dict[str, Any]], path: Path) -> None:
    """KL on prose over the bytes that a token waits for: all layers, and the upper half."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True)
    for axis, layers in zip(axes, ("0-30", "15-30"), strict=True):
        for number, name in enumerate([*BASES, *MASKS]):
            for is_refitted in (False, True):
                points = sorted(
                    (row["waited"], row["on"]["prose"]["kl"], " ".join([row["payload"], row["basis"][:1]]))
                    for row in measured
                    if row["layers"] == layers and (row["mask"] or row["wiring"]) == name
                    if (row["fit"] != "converted") == is_refitted
                )  # fmt: skip
                if not points:
                    continue
                style = {"markerfacecolor": None if is_refitted else "white", "color": f"C{number}"}
                label = name + ("" if is_refitted else ", as converted")
                axis.plot(*list(zip(*points, strict=True))[:2], "o-" if is_refitted else "o:", label=label, **style)
                for waited, kl, payload in points:
                    axis.annotate(payload, (waited, kl), xytext=(3, 3), textcoords="offset points", fontsize=6)
        axis.set(
            xscale="log", yscale="log", xlabel="bytes that a token waits for, of standard's", title=f"layers {layers}"
        )
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("KL(original || rewired) on prose, nats a token")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
