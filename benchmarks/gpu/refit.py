"""Seconds that a refit takes on a model of random weights, calibrated on windows of random tokens."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from part import parser, progress, random_checkpoint, random_tokens, write

from rewired.checkpoint.named_shapes import named_shapes
from rewired.convert import RefitRequest, Request, convert
from rewired.tables import markdown

PRESETS = ("ladder", "desync")  # of the upper half; the shards of the second see different things
HEADINGS = ("wiring", "tokens", "walk, s", "all, s", "passes", "KL converted", "KL refitted")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", choices=list(named_shapes()))
    made.add_argument("--tokens", type=int, default=65_536, help="to calibrate on (default 65,536)")
    args = made.parse_args()
    layers = named_shapes()[args.model].num_hidden_layers
    rows = []
    with TemporaryDirectory(prefix="rewired-refit-") as folder:
        scratch = Path(folder)
        source = random_checkpoint(args.model, scratch / "model", args.device)
        (tokens,) = random_tokens(args.model, 1, args.tokens)
        text = scratch / "tokens.txt"
        text.write_text(" ".join(f"w{token}" for token in tokens))
        progress("the model is written")
        for preset in PRESETS:
            wiring = [{"layers": f"{layers // 2}-", "preset": preset}]
            request = Request(wiring, refit=RefitRequest(str(text), args.tokens))
            rows.append([preset, *measured(source, scratch / preset, request)])
            write(args.section, f"## Refit, {args.model}", TEXT.format(layers=layers), markdown(HEADINGS, rows))
            progress(str(rows[-1]))


def measured(source: Path, out: Path, request: Request) -> list[str]:
    """Cells. The walk over the layers is timed, and the whole command, which reads, hashes and writes the weights."""
    walk = list[float]()  # its start, and the end of each layer

    def note(*_: Any) -> None:
        walk.append(time.perf_counter())

    started = time.perf_counter()
    done = convert(source, out, request, on_cost=note, on_layer=note)
    whole = time.perf_counter() - started
    refit = done.refit
    assert refit is not None
    seconds = (f"{value:.1f}" for value in (walk[-1] - walk[0], whole, refit.passes or 0.0))
    return [f"{refit.calibration.tokens:,}", *seconds, f"{refit.before.kl:.3g}", f"{refit.after.kl:.3g}"]


TEXT = """The upper half of {layers} layers of random weights, on windows of random tokens. The walk is the refit
itself, and all seconds those of `convert`, which also reads, hashes and writes the weights; the first one pays for what
it loads. Passes are forward passes of the original over the same tokens."""

if __name__ == "__main__":
    main()
