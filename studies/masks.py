"""Top-K and random masks of what is reduced, in as many bytes as payloads take: the baselines of CAAT-Net's Table 2.

.venv/bin/python studies/masks.py

All layers of SmolLM2, as converted, on the windows of rotations.py, with whose payloads masks.md compares. In the paper
only the parts are masked, and half of an all-reduce is sent as ever, so that no mask at all comes down to a quarter of
the bytes. Here the sum is masked, too, and counted as what a 16-bit all-reduce of its channels would send, and

- a Top-K mask, which differs by token and shard, travels along as one bit a channel, which is less than indices take;
- a random mask is the same on all shards, drawn from a seed that they share, and costs nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from quality import FOLDER, MODEL, as_row, compare_model, held_out
from quality_report import kind, read
from rotations import PAYLOADS, TEXTS, WINDOWS, spaced
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from rewired.checkpoint import Checkpoint
from rewired.convert import Request, convert

ROWS, TABLE = FOLDER / "masks.jsonl", FOLDER / "masks.md"
SHARES = (8.25 / 16, 4.25 / 16)  # of a 16-bit all-reduce's bytes: what int8 and int4 send, with their scales
INDEX = 1 / 16  # a bit a channel


@dataclass(frozen=True)
class Mask:
    """Which channels of a token are sent. What is not is lost, or `stays_local`: the next reduction may send it."""

    kind: str  # top-k, random
    share: float  # of the bytes
    stays_local: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.share:.3f}" + ", rest stays local" * self.stays_local

    @property
    def kept(self) -> float:
        """Which part of the channels."""
        return self.share - INDEX if self.kind == "top-k" else self.share

    def bytes(self, reductions: int) -> float:
        """Of those of 16-bit all-reduces. Where the rest stays local, the last reduction sends all there is."""
        return self.share if not self.stays_local else (self.share * (reductions - 1) + 1) / reductions


MASKS = [
    *(Mask(kind, share) for share in SHARES for kind in ("top-k", "random")),
    *(Mask("top-k", share, stays_local=True) for share in SHARES),
]


def main() -> None:
    logging.disable_progress_bar()
    known = {row["name"] for row in read(ROWS)}
    with tempfile.TemporaryDirectory(prefix="rewired-masks-") as scratch:
        source = convert(MODEL, Path(scratch) / "source", Request([{"layers": "0-", "preset": "standard"}])).out
        texts = {kind: spaced(windows, WINDOWS) for kind, windows in held_out(source).items() if kind in TEXTS}
        for mask in MASKS:
            if mask.name not in known:
                row = _measure(mask, source, texts)
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    _write_table(read(ROWS), read(FOLDER / "rotations.jsonl"))


def _measure(mask: Mask, source: Path, texts: dict[str, torch.Tensor]) -> dict[str, Any]:
    shards = Checkpoint.open(source).shards()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    masked = MaskedReductions(model, mask, shards)
    row = {"name": mask.name, **asdict(mask), "bytes": round(mask.bytes(len(masked.linears)), 4)}
    row |= {"windows": len(texts[TEXTS[0]])}
    row["on"] = {kind: as_row(found) for kind, found in compare_model(source, model, texts).items()}
    print(mask.name, {kind: round(on["kl"], 4) for kind, on in row["on"].items()}, flush=True)
    return row


class MaskedReductions:
    """A dense model's all-reduces: each linear layer that ends in one adds up what masks leave of its shards' parts."""

    def __init__(self, model: PreTrainedModel, mask: Mask, shards: int) -> None:
        self.mask, self.shards = mask, shards
        self.linears: list[nn.Linear] = [
            linear for layer in model.model.layers for linear in (layer.self_attn.o_proj, layer.mlp.down_proj)
        ]
        self.generator = torch.Generator().manual_seed(0)
        self.local = torch.zeros(())  # [r, B, T, H] between two reductions
        for linear in self.linears:
            linear.register_forward_hook(self._reduce)

    def _reduce(self, linear: nn.Linear, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        parts = self._parts(linear, *args) + self.local  # [r, B, T, H]
        if self.mask.stays_local and linear is self.linears[-1]:
            self.local = torch.zeros(())
            return parts.sum(0)
        scores = None if self.mask.kind == "top-k" else torch.rand(output.shape, generator=self.generator)
        sent = self._masked(parts, scores)
        exact = sent.sum(0)
        total = self._masked(exact, scores)
        if self.mask.stays_local:
            self.local = parts - sent
            self._deal_out(exact - total)
        return total

    def _parts(self, linear: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        split = [each.unflatten(-1, (self.shards, -1)) for each in (inputs, linear.weight)]
        return torch.einsum("btrn,hrn->rbth", *split)

    def _masked(self, numbers: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        """The channels of the highest `scores`, [B, T, H], or else the largest ones; the others are 0."""
        kept = round(self.mask.kept * numbers.shape[-1])
        chosen = (numbers.abs() if scores is None else scores.expand_as(numbers)).topk(kept, dim=-1).indices
        return torch.zeros_like(numbers).scatter(-1, chosen, numbers.gather(-1, chosen))

    def _deal_out(self, left_of_sum: torch.Tensor) -> None:
        """To the shards, of which each adds up some of the channels."""
        for shard, channels in enumerate(torch.arange(left_of_sum.shape[-1]).chunk(self.shards)):
            self.local[shard, ..., channels] += left_of_sum[..., channels]


def _write_table(masks: Sequence[dict[str, Any]], payloads: Sequence[dict[str, Any]]) -> None:
    """Masks, and payloads of all layers, by bytes."""
    lines = [
        "# Masks of what is reduced, beside payloads",
        "",
        "[LOG.md](LOG.md) says what the rows are; `studies/masks.py` makes them. All layers, as converted where",
        "a row does not say on how many tokens it was refitted. KL to the original in nats per token on 8 windows of",
        "512 tokens each, and the bytes sent, of those of 16-bit all-reduces.",
        "",
        "| what is sent | bytes | KL prose | KL chat |",
        "|---|---|---|---|",
    ]
    ours = [
        row | {"name": _described(row)}
        for row in payloads
        if row["wiring"].endswith(tuple(f"+{payload}@0-30" for payload in PAYLOADS)) and row["windows"] == WINDOWS
        if row["basis"] in ("none", "hadamard")
    ]
    for row in sorted([*masks, *ours], key=lambda row: (-row["bytes"], row["on"]["prose"]["kl"])):
        kl = " | ".join(f"{row['on'][kind]['kl']:.4f} ± {row['on'][kind]['kl_standard_error']:.4f}" for kind in TEXTS)
        lines.append(f"| {row['name']} | {row['bytes']:.2f} | {kl} |")
    TABLE.write_text("\n".join(lines) + "\n")


def _described(payload: dict[str, Any]) -> str:
    basis = f", {payload['basis']}" if payload["basis"] != "none" else ""
    return kind(payload) + basis + (f", refitted on {payload['tokens'] // 1024} k" if payload["tokens"] else "")


if __name__ == "__main__":
    main()
