"""The command `rewired bench`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rewired.cli import positive_integers, report_errors
from rewired.grid.size import TpSize
from rewired.model.wiring_text import parse_wirings
from rewired.progress import is_first_rank
from rewired.ranks import choose_device

from . import torchrun
from .request import TRANSFORMERS, WHOSE, BenchRequest, Emulation

_WIRINGS = "ladder; ladder+peek; parallel; desync-2x; desync-4x; partial-0.5; none"


def add_commands(app: typer.Typer) -> None:
    app.command("bench")(_bench)


def _bench(
    model: Annotated[
        str,
        typer.Argument(
            help="A shape (llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, llama-3.2-1b, tiny, ...) with random "
            "weights, or a checkpoint, rewired or not."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of results; an interrupted bench continues there.")
    ],
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Ranks to split the model over; by default 2, or torchrun's. 2x2 is a grid, beside stock on 4.",
        ),
    ] = None,
    wirings: Annotated[
        str,
        typer.Option(
            metavar="TEXT; ...",
            help="What to time beside standard and the engine's own model, such as ladder+peek@16-32. own is the "
            "checkpoint's wiring; none has no communication.",
        ),
    ] = _WIRINGS,
    prompt: Annotated[int, typer.Option(metavar="N", help="Tokens of a prefill, or of a sequence to train on.")] = 1024,
    new: Annotated[int | None, typer.Option(metavar="N", help="Tokens to decode after it; 128 by default.")] = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences at once.")] = "1",
    layers: Annotated[int | None, typer.Option(metavar="N", help="Run only the first N layers of the model.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often to time each, in turns.")] = 9,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compiled/--eager",
            help="Also prefill and decode compiled, over a static cache, with CUDA graphs on GPUs; by default.",
        ),
    ] = None,
    train: Annotated[
        bool,
        typer.Option("--train", help="Time steps of training instead: forward, backward and AdamW, eager."),
    ] = False,
    fsdp: Annotated[
        int,
        typer.Option(metavar="N", help="With --train, FSDP2 over N times as many ranks, each on --batch sequences."),
    ] = 1,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Also time over a slow link between ranks of this machine: on CPUs, as root, a rate such as 1gbit; "
            "on NVIDIA no-p2p, where GPUs reach each other through host memory. With --emulated, whose collectives: "
            f"{WHOSE} or other hardware and library of rewired plan, or a results.json of real ranks.",
        ),
    ] = None,
    emulated: Annotated[
        bool,
        typer.Option(
            "--emulated",
            help="Run one of the ranks alone, on one GPU, where collectives take the times that --link names.",
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(help="What runs the models: transformers or vllm."),
    ] = TRANSFORMERS,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also trace a prefill by each wiring, for Perfetto.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: bfloat16 on GPUs.")] = "auto",
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
) -> None:
    """Measure on this machine how much faster each wiring is than the best baselines.

    It times prefill and decoding, or training, in turns, on tensor-parallel ranks that it starts or torchrun's. DIR
    gets a report, and results.json, which rewired plan --calibrate takes.

    Examples:

    ```
    rewired bench llama-3.1-70b --tp 8 --batch 1,4,16,64 --layers 8 --out bench-70b
    rewired bench llama-3.1-70b --tp 8 --layers 8 --emulated --out bench-alone
    rewired bench ./my-hybrid --tp 2 --wirings "own; none" --out bench-mine
    rewired bench llama-3.1-8b --tp 4 --fsdp 2 --train --prompt 4096 --out bench-train
    torchrun --nnodes 2 --nproc-per-node 8 --no-python rewired bench llama-3.1-405b --layers 8 --out bench-405b
    ```
    """
    with report_errors("rewired bench", when_interrupted=f"interrupted; the same command continues in {out}."):
        from .run import bench

        if train and (new is not None or compiled):
            raise ValueError("--train times steps, which are eager and decode nothing: leave out --new and --compiled.")
        ranks = _ranks(tp, fsdp)
        here = 1 if emulated else torchrun.ranks_of_this_machine() if torchrun.is_joined() else max(ranks) * fsdp
        device = choose_device(device, here)
        request = BenchRequest(
            model,
            tuple(parse_wirings(wirings)),
            prompt,
            128 if new is None else new,
            layers,
            rounds,
            dtype if dtype != "auto" else "bfloat16" if device == "cuda" else "float32",
            device,
            link or (WHOSE if emulated else None),
            compiled is not False,
            engine,
            Emulation() if emulated else None,
            train,
            fsdp,
        )
        results = bench(
            request, ranks, tuple(dict.fromkeys(positive_integers("--batch", batch, "batches"))), out, profile
        )
        if is_first_rank():
            _write(results, out)


def _ranks(tp: str | None, fsdp: int) -> tuple[TpSize, ...]:
    if fsdp < 1:
        raise ValueError(f"--fsdp is {fsdp}: it must be at least 1.")
    started = torchrun.world_size() if torchrun.is_joined() else None
    if started and started % fsdp:
        raise ValueError(f"--fsdp {fsdp} does not divide the {started} ranks that torchrun has started.")
    left = started // fsdp if started else 2
    sizes = tuple(TpSize.parse(text, "--tp") for text in dict.fromkeys((str(left) if tp is None else tp).split(",")))
    if started and {size * fsdp for size in sizes} != {started}:
        raise ValueError(
            f"--tp {tp} and --fsdp {fsdp} do not make the {started} ranks that torchrun has started: leave --tp out."
        )
    return sizes


def _write(results: Mapping[str, Any], out: Path) -> None:
    from .report import markdown, print_report

    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (out / "report.md").write_text(markdown(results), encoding="utf-8")
    print_report(results)
    print(f"\n{out}/report.md has this, results.json the figures.")
