"""A wiring as users write it and as it is printed: one parser, and its inverse. Without torch.

    ladder                  all layers              desync-4x@8-24, ladder@24-32    two regions
    ladder+peek@16-32       those, with a peek      partial-0.5(mean)-peek@0-4,8-12
    standard+int4@0-2       what reductions send    standard+8:0.1+4/8:0.4+0:0.5    the same, by shares of the channels

A region is a preset, its options, and `@` with its layers. How options stand there is said in the table of presets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from .payload import is_payload
from .presets import PRESETS, STANDARD, Option
from .regions import Region
from .wiring import Wiring

NONE = "none"  # standard without any communication: no wiring, but the bound of what wirings can win

_VALUES: dict[type, str] = {int: r"\d+", float: r"\d+\.?\d*|\.\d+"}  # of options that are numbers


def parse_wiring(text: str) -> list[dict[str, Any]]:
    """The regions of `text` as `config.json` has them; one without layers is for all.

    Raises ValueError where it names no preset or option. Layers and values are checked as those of config.json are.
    """
    return [_parse_region(region) for region in re.split(r",(?![-\d])", re.sub(r"\s", "", text))]


def parse_wirings(text: str) -> list[str]:
    """The wirings of `ladder@16-32; desync-4x@8-24, ladder@24-32`, in which `;` parts them, each one once.

    Raises ValueError where one is empty.
    """
    wirings = [wiring.strip() for wiring in text.split(";")]
    if not all(wirings):
        raise ValueError(f"'{text}' has an empty wiring: give wirings with ; between them.")
    return list(dict.fromkeys(wirings))


def wiring_text(wiring: Wiring) -> str:
    """The text of which `parse_wiring` makes `wiring` again. Layers that are as in a dense model are left out."""
    regions = (f"{region_name(region)}@{region.layers}" for region in wiring.rewired_regions)
    return ", ".join(regions) or STANDARD


def region_name(region: Region) -> str:
    """A region's text without its layers: numbers always, other options where they are not the preset's own."""
    preset = PRESETS[region.preset]
    own, options = preset.defaults(), [(option, region.options[option.name]) for option in preset.all_options]
    shown = [_form(*each) for each in options if each[0].type in _VALUES or each[1] != own.get(each[0].name)]
    return region.preset + "".join(shown)


def _form(option: Option, value: Any) -> str:
    """An option as it stands in a text. A payload's table has + for its commas, which part regions and ranges."""
    if option.type is bool:
        return f"{'+' if value else '-'}{option.name}"
    value = f"{Decimal(str(value)).normalize():f}" if option.type in _VALUES else value
    return option.text.format(value.replace(",", "+"))


def _parse_region(text: str) -> dict[str, Any]:
    name, at, layers = text.partition("@")
    name = f"{STANDARD}+{name}" if is_payload(name) else name
    matched = re.match(rf"({'|'.join(map(re.escape, sorted(PRESETS, key=len, reverse=True)))})(?![a-z_])", name)
    if not matched:
        raise ValueError(f"'{text}' is no wiring: begin with {', '.join(PRESETS)}, as in ladder+peek@16-32.")
    options = dict(_parse_options(name[matched.end() :], matched[1], text))
    return {"layers": layers if at else "0-", "preset": matched[1], **options}


def _parse_options(rest: str, preset: str, text: str) -> Iterator[tuple[str, Any]]:
    left = {option: _pattern(option, PRESETS[preset].defaults()) for option in PRESETS[preset].all_options}
    while rest:
        found = {option: matched for option, pattern in left.items() if (matched := re.match(pattern, rest))}
        if not found:
            forms = [_hint(option, PRESETS[preset].defaults()) for option in left]
            raise ValueError(f"'{rest}' in '{text}' means nothing: '{preset}' takes {', '.join(forms)}, and @LAYERS.")
        option, matched = next(iter(found.items()))
        del left[option]
        rest = rest[matched.end() :]
        is_switch = option.type is bool
        yield option.name, matched[0][0] == "+" if is_switch else option.type(matched[1].replace("+", ","))


def _pattern(option: Option, defaults: dict[str, Any]) -> str:
    """What matches an option: a switch only where it changes something, so that `ladder-peek` is no ladder."""
    if option.type is bool:
        return re.escape(_form(option, not defaults[option.name])) + r"(?![a-z_])"
    before, after = map(re.escape, option.text.split("{}"))
    return rf"{before}({_VALUES.get(option.type, option.values)}){after}(?![\w.])"


def _hint(option: Option, defaults: dict[str, Any]) -> str:
    if option.type is bool:
        return _form(option, not defaults[option.name])
    return option.text.format(option.metavar.replace(",", "+"))
