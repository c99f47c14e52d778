"""A selection as it is asked for, and what of it is refused before any layer is scored."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial

from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.shape import Shape
from rewired.model.presets import STANDARD
from rewired.quantities import count
from rewired.refit.request import check_fitting
from rewired.sources import Source
from rewired.text import MIX as MIXED_TEXT

from .choice import BYTES_MIX, EXPOSED_MIX, MIX, Amount, dense_layers, exposed, least, names, sent


@dataclass(frozen=True)
class SelectRequest:
    """How many layers to rewire as `wiring`, or how much a token may wait for or send; and what to score on."""

    wirings: str = "ladder"  # what a layer may become, with ; between them; or mix
    budget: int | None = None  # layers
    exposed: int | None = None  # all-reduces a token
    bytes: float | None = None  # that they carry, as a share of the dense model's
    tp_shards: int | None = None
    text: str = MIXED_TEXT
    tokens: int = 16_384
    measure: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The wirings that a layer may have. Raises ValueError where one is none, or none for a layer alone."""
        return names(self.wirings) if self.wirings != MIX else EXPOSED_MIX if self.bytes is None else BYTES_MIX

    def limit(self, shape: Shape) -> tuple[Amount, int]:
        """What the choice may take of what."""
        if self.exposed is not None:
            return exposed, self.exposed
        if self.bytes is not None:
            amount = partial(sent, hidden_size=shape.hidden_size)
            return amount, math.floor(min(self.bytes, 1.0) * amount((STANDARD,) * shape.num_hidden_layers))
        assert self.budget is not None, "one of the three is given"
        return dense_layers, shape.num_hidden_layers - self.budget


def check(request: SelectRequest) -> None:
    """Raise ValueError for what makes no sense whatever the model is."""
    several = len(request.names) > 1
    if sum(each is not None for each in (request.budget, request.exposed, request.bytes)) != 1:
        raise ValueError(
            "Say what the choice may take: --budget N, the layers to rewire, or --exposed N, the all-reduces that a "
            "token waits for, or --bytes SHARE, of those that a dense model's carry."
        )
    if several and request.budget is not None:
        raise ValueError("Several wirings save differently: give --exposed or --bytes instead of --budget.")
    if request.bytes is not None and not request.bytes >= 0:  # nan is neither
        raise ValueError(f"--bytes {request.bytes:g} makes no sense: give a share from 0 to 1.")
    check_fitting("--tokens", request.tokens)


def check_fits(request: SelectRequest, checkpoint: Checkpoint) -> int:
    """The number of shards to score for. Raises ValueError where the model has no choice within the budget."""
    if checkpoint.is_rewired:
        raise ValueError(f"{checkpoint.folder} is rewired already: select from the dense model that it was made from.")
    layers = checkpoint.shape.num_hidden_layers
    if request.budget is not None and not 1 <= request.budget <= layers:
        raise ValueError(f"--budget {request.budget} does not fit: the model has {count(layers, 'layer')}.")
    amount, most = request.limit(checkpoint.shape)
    fewest, dense = least(layers, request.names, amount), amount((STANDARD,) * layers)
    if not fewest <= most < dense:
        option, unit = (f"--exposed {most}", 1) if request.bytes is None else (f"--bytes {request.bytes:g}", dense)
        raise ValueError(
            f"{option} does not fit: the dense model takes {dense / unit:g}, and no choice of "
            f"{' or '.join(request.names)} takes less than {fewest / unit:.4g}."
        )
    return checkpoint.shards(request.tp_shards)


def default_name(source: Source, request: SelectRequest) -> str:
    """Of the folder to write."""
    amounts = {"": request.budget, "-exposed": request.exposed, "-bytes": request.bytes}
    amount = next(f"{value:g}{what}" for what, value in amounts.items() if value is not None)
    wirings = re.sub(r"[^\w.-]+", "-", request.wirings)
    return f"{source.name}-select-{wirings}-{amount}"
