"""A selection as it is asked for, and what of it is refused before any layer is scored."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.extras import needs
from rewired.quantities import count
from rewired.refit.request import check_fitting
from rewired.sources import Source
from rewired.text import MIX

from .wirings import NAMES, least_exposed


@dataclass(frozen=True)
class SelectRequest:
    """How many layers to rewire as `wiring`, or how many all-reduces a token may wait for; and what to score on."""

    wiring: str = "ladder"  # one of NAMES
    budget: int | None = None  # layers
    exposed: int | None = None  # all-reduces a token
    tp_shards: int | None = None
    text: str = MIX
    tokens: int = 16_384
    spill: Path | None = None
    measure: bool = True


def check(request: SelectRequest) -> None:
    """Raise ValueError for what makes no sense whatever the model is."""
    with needs("convert", "A selection, which draws a plot,"):
        import matplotlib  # noqa: F401 - for the plot, hours later
    if request.wiring not in NAMES:
        near = get_close_matches(request.wiring, NAMES, n=1, cutoff=0.85)
        raise ValueError(
            f"Layers cannot be selected for a wiring '{request.wiring}': "
            + (f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(NAMES)}.")
        )
    if (request.budget is None) == (request.exposed is None):
        raise ValueError(
            "Say what the choice may take: --budget N, the layers to rewire, or --exposed N, the all-reduces that a "
            "token waits for."
        )
    if request.wiring == "mix" and request.exposed is None:
        raise ValueError("'mix' chooses among wirings that save differently: give it --exposed instead of --budget.")
    check_fitting("--tokens", request.tokens, request.spill)


def check_fits(request: SelectRequest, checkpoint: Checkpoint) -> int:
    """The number of shards to score for. Raises ValueError where the model has no choice within the budget."""
    if checkpoint.is_rewired:
        raise ValueError(
            f"{checkpoint.folder} is rewired already: layers are selected of a dense Llama, the one it was made from."
        )
    layers = checkpoint.shape.num_hidden_layers
    if request.budget is not None and not 1 <= request.budget <= layers:
        raise ValueError(f"--budget {request.budget} does not fit: the model has {count(layers, 'layer')}.")
    if request.exposed is not None:
        least = least_exposed(layers, NAMES[request.wiring])
        if not least <= request.exposed < 2 * layers:
            raise ValueError(
                f"--exposed {request.exposed} does not fit: a token of the dense model waits for {2 * layers} "
                f"all-reduces, and with all layers {' or '.join(NAMES[request.wiring])} for {least}."
            )
    tp_shards = checkpoint.shape.default_shards() if request.tp_shards is None else request.tp_shards
    checkpoint.shape.check_shards(tp_shards)
    return tp_shards


def default_name(source: Source, request: SelectRequest) -> str:
    """Of the folder to write."""
    amount = f"{request.budget}" if request.budget is not None else f"{request.exposed}-exposed"
    return f"{source.name}-select-{request.wiring}-{amount}"
