"""Tensor parallelism on one GPU: a rank alone, whose collectives take the times of real ones (`bench --emulated`).

Wirings first, a few at a time, since compiling each takes half a minute: compiled, beside what `rewired plan` predicts.
Then prefill and eager decoding by collectives of fewer and more blocks, and without priority.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from part import parser, progress, write

from rewired.bench.contenders import NONE, STOCK
from rewired.bench.report import READING, Row, tables
from rewired.bench.request import BenchRequest, Emulation
from rewired.bench.run import bench
from rewired.bench.runs import DECODE, DECODE_COMPILED, PREFILL
from rewired.checkpoint.named_shapes import named_shapes
from rewired.model.presets import STANDARD
from rewired.plan.machine import Load, serving_machine
from rewired.plan.wirings import wiring_of
from rewired.tables import markdown

OTHERS = {
    "4 blocks": Emulation(blocks=4),
    "32 blocks": Emulation(blocks=32),
    "16 blocks, no priority": Emulation(is_urgent=False),
}
TOGETHER = 2  # wirings that are timed in turns; each such run is written when it is done


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", choices=list(named_shapes()))
    made.add_argument("--tp", type=int, default=8, help="(default 8)")
    made.add_argument("--layers", type=int, default=4, help="(default 4)")
    made.add_argument("--prompt", type=int, default=1024, help="(default 1024)")
    made.add_argument("--new", type=int, default=32, help="(default 32)")
    made.add_argument("--rounds", type=int, default=9, help="(default 9)")
    made.add_argument("--wirings", nargs="+", required=True, help="beside stock, standard and none")
    args = made.parse_args()
    hardware = "h200" if args.device == "cuda" and "H200" in torch.cuda.get_device_name() else "h100"
    request = BenchRequest(
        args.model, (), args.prompt, args.new, args.layers, args.rounds, device=args.device,
        link=f"{hardware}:vllm", emulation=Emulation(),
    )  # fmt: skip
    title, text = f"## Tensor parallelism on one GPU, {args.model}", TEXT.format(args=args, link=request.link)
    blocks: list[str] = []
    for start in range(0, len(args.wirings), TOGETHER):
        wirings = args.wirings[start : start + TOGETHER]
        results = run(replace(request, wirings=(*wirings, NONE)), args.tp)
        blocks += [f"{table.title}:\n\n{markdown(table.headings, table.rows)}" for table in tables(results)]
        blocks.append(markdown(*predictions(results, hardware)))
        write(args.section, title, f"{text} {READING}", *blocks)
        progress(f"{', '.join(wirings)}: timed")
    rows = []
    first = replace(request, wirings=(args.wirings[0], NONE), is_compiled=False)
    for name, emulation in {"16 blocks": Emulation(), **OTHERS}.items():
        rows += sensitivity(name, run(replace(first, emulation=emulation), args.tp)["rows"])
        write(args.section, title, f"{text} {READING}", *blocks, markdown(SENSITIVITY, rows))
        progress(f"{name}: done")


def run(request: BenchRequest, tp: int) -> Mapping[str, Any]:
    with TemporaryDirectory(prefix="rewired-emulated-") as scratch:
        return bench(request, [tp], [1], Path(scratch))


def predictions(results: Mapping[str, Any], hardware: str) -> tuple[Sequence[str], list[list[str]]]:
    """What plan says of the same layers on that many GPUs, beside what was measured here, as speedups over standard."""
    measures = [measure for measure in (PREFILL, DECODE_COMPILED) if f"{measure}_seconds" in results["rows"][0]]
    rows = [row for row in results["rows"] if row["link"] == results["link"] and row["wiring"] != STOCK]
    planned = {row["wiring"]: plan(row, hardware) for row in rows}
    cells = [
        [row["wiring"]]
        + [
            f"{value:.2f}"
            for measure in measures
            for value in (
                row["speedup"][measure][STANDARD],
                planned[STANDARD][measure] / planned[row["wiring"]][measure],
            )
        ]
        for row in rows
    ]
    return ["wiring", *(f"{measure}, {whose}" for measure in measures for whose in ("measured", "planned"))], cells


def plan(row: Row, hardware: str) -> dict[str, float]:
    """Seconds of a prefill and of a token."""
    shape = replace(named_shapes()[row["model"]].for_shards(row["tp"]), num_hidden_layers=row["layers"])
    machine = serving_machine(hardware, "vllm", row["tp"])
    load = Load(row["batch"], row["prompt"], row["new"])
    done = machine.generate(shape, wiring_of(shape, row["wiring"]), load, communicates=row["wiring"] != NONE)
    return {PREFILL: done.prefill.seconds, DECODE_COMPILED: done.decode.seconds}


SENSITIVITY = ("collectives", "link", "wiring", "prefill ms", "x", "hidden", "token ms, eager", "x")


def sensitivity(name: str, rows: Sequence[Row]) -> Iterator[list[str]]:
    for row in rows:
        if row["wiring"] != STOCK:
            hidden = f"{row['hidden'][PREFILL]:.0%}" if PREFILL in row["hidden"] else ""
            prefill, token = (
                (f"{1e3 * row[f'{measure}_seconds']:.3g}", f"{row['speedup'][measure][STANDARD]:.2f}")
                for measure in (PREFILL, DECODE)
            )
            yield [name, row["link"], row["wiring"], *prefill, hidden, *token]


TEXT = """{args.layers} layers, batch 1, a prompt of {args.prompt} tokens, {args.new} new ones: rank 0 of {args.tp},
alone, in its true shapes; the collectives of {link}, as long as measured on such machines, half and twice as long. A
collective moves its bytes within this GPU and holds its blocks' processors until its time is over. So launches, graphs,
overlap and contention are real; ranks that come late and links that are shared are not shown."""

if __name__ == "__main__":
    main()
