"""Seconds that a refit takes on a model of random weights, calibrated on windows of random tokens."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from part import parser, progress, random_checkpoint, random_tokens, save

from rewired.checkpoint.named_shapes import named_shapes
from rewired.convert import RefitRequest, Request, convert

PRESETS = ("ladder", "desync")  # of the upper half; the shards of the second see different things


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", choices=list(named_shapes()))
    made.add_argument("--tokens", type=int, default=65_536, help="to calibrate on (default 65,536)")
    args = made.parse_args()
    layers = named_shapes()[args.model].num_hidden_layers
    data: dict[str, Any] = {"model": args.model, "tokens": args.tokens, "layers": layers, "rows": []}
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
            data["rows"].append({"preset": preset, **measured(source, scratch / preset, request)})
            save(data, args.data)
            progress(f"{preset}: {data['rows'][-1]}")


def measured(source: Path, out: Path, request: Request) -> dict[str, float]:
    """Seconds of the walk over the layers, and of the whole command, which reads, hashes and writes the weights."""
    times = {"start": 0.0, "end": 0.0}

    def note(name: str) -> None:
        times[name] = time.perf_counter()

    started = time.perf_counter()
    done = convert(source, out, request, on_cost=lambda _: note("start"), on_layer=lambda *_: note("end"))
    whole = time.perf_counter() - started
    assert done.refit is not None
    return {
        "layers_seconds": times["end"] - times["start"],
        "seconds": whole,
        "tokens": done.refit.calibration.tokens,
        "passes": done.refit.passes or 0.0,
        "kl_converted": done.refit.before.kl,
        "kl": done.refit.after.kl,
    }


if __name__ == "__main__":
    main()
