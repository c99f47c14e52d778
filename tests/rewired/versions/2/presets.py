"""The presets: every architecture that a region of layers can have. The one table of the project, without torch.

A preset owns all that is special about it: what its modules wait for, see and reduce, and the options it takes. A new
wiring is one more entry of `PRESETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .payload import FULL, NAMES, as_text, is_payload

Options = Mapping[str, Any]  # of a region, by name


@dataclass(frozen=True)
class Option:
    """A choice that a region has beside its layers."""

    name: str  # in config.json
    type: type[int] | type[float] | type[str] | type[bool]
    is_valid: Callable[[Any], bool]
    wanted: str  # the valid values in words
    metavar: str = ""  # how its value is called; switches have none
    default: Any = None  # where there is none, a region has to say it
    text: str = ""  # how it stands in the text of a wiring, `{}` its value; switches are + or - and their name
    values: str = ""  # a regular expression of what it can be there, if neither a number nor one of `metavar`
    read: Callable[[Any], Any] = lambda value: value  # other forms of a value, as it is kept


@dataclass(frozen=True)
class Preset:
    """An architecture as answers to three questions: does a module wait, does it peek, and what does it reduce?

    Presets do not say what a reduction sends; any region may take a payload.

    `share(position, options)` is the share of its channels, the first ones, that the module at `position` of a range
    reduces; the last module of a range and of the model always reduces all.
    """

    overlap: bool = False
    peek: bool = False
    share: Callable[[int, Options], float] = lambda position, options: 1
    options: tuple[Option, ...] = ()
    whole_layers: bool = False  # attention and MLP run side by side, so a range cannot cover only one of them

    @property
    def all_options(self) -> tuple[Option, ...]:
        return self.options + MODIFIERS

    def defaults(self) -> dict[str, Any]:
        """The values of all options that a region may leave out."""
        own = {option.name: option.default for option in self.options if option.default is not None}
        return own | {"peek": self.peek, "overlap": self.overlap, "delay": 1, "payload": FULL}


EVERY = Option(
    name="every",
    type=int,
    is_valid=lambda value: type(value) is int and value >= 2,
    wanted="an integer of at least 2",
    metavar="N",
    default=2,
    text="-{}x",
)
SHARED_FRACTION = Option(
    name="shared_fraction",
    type=float,
    is_valid=lambda value: type(value) in (int, float) and 0 <= value <= 1,
    wanted="a number from 0 to 1",
    metavar="P",
    text="-{}",
)
MERGE = Option(
    name="merge",
    type=str,
    is_valid=lambda value: value in ("sum", "mean"),
    wanted="'sum' or 'mean'",
    metavar="sum|mean",
    default="sum",
    text="({})",
)


def _is_bool(value: Any) -> bool:
    return type(value) is bool


# the options of every preset, which says itself what peek and overlap are by default
MODIFIERS = (
    Option(name="peek", type=bool, is_valid=_is_bool, wanted="true or false"),
    Option(name="overlap", type=bool, is_valid=_is_bool, wanted="true or false"),
    Option(
        name="delay",
        type=int,
        is_valid=lambda value: type(value) is int and value in (1, 2),
        wanted="1 or 2",
        metavar="1|2",
        text="+delay-{}",
    ),
    Option(
        name="payload",
        type=str,
        is_valid=is_payload,
        wanted=f"'full', {str(NAMES)[1:-1]}, 'int4/int8' or bits and shares of the channels, most bits first, as in "
        "8:0.1,4/8:0.4,0:0.5",
        metavar=f"{'|'.join(NAMES)}|int4/int8|BITS:SHARE,...",
        text="+{}",
        values=r"int\d(?:/int\d)?|[\d/]+:[\d.]+(?:\+[\d/]+:[\d.]+)*",
        read=as_text,
    ),
)

STANDARD = "standard"  # what layers are that no region names

PRESETS: dict[str, Preset] = {
    "ladder": Preset(overlap=True),  # Ladder Residual, Algorithm 1 and equation 2
    "desync": Preset(  # Ladder Residual, section 5
        peek=True,
        share=lambda position, options: (position + 1) % options["every"] == 0,
        options=(EVERY, MERGE),
    ),
    "partial": Preset(  # CAAT-Net, equations 8, 12, 20 and 22
        peek=True,
        share=lambda position, options: options["shared_fraction"],
        options=(SHARED_FRACTION, MERGE),
    ),
    # PaLM block; Ladder Residual, section 3.3.1
    "parallel": Preset(share=lambda position, options: position % 2, whole_layers=True),
    STANDARD: Preset(),  # Megatron TP
}
