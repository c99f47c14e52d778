"""A wiring as users write it and as it is printed: one parser, and its inverse. Without torch.

    ladder                  all layers              desync-4x@8-24, ladder@24-32    two regions
    ladder+peek@16-32       those, with a peek      partial-0.5(mean)-peek@0-4,8-12
    standard+int4@0-2       what reductions send    standard+8:0.1+4/8:0.4+0:0.5    the same, by shares of the channels

A region is a preset, its options, and `@` with its layers. How options stand there is said in the table of presets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from .payload import is_payload
from .presets import PRESETS, STANDARD, Option
from .regions import Region

NONE = "none"  # standard without any communication: no wiring, but the bound of what wirings can win

_VALUES: dict[type, str] = {int: r"\d+", float: r"\d+\.?\d*|\.\d+"}  # of options that are numbers


def parse_wiring(text: str) -> list[dict[str, Any]]:
    """The regions of `text` as `config.json` has them; one without layers is for all.

    Raises ValueError where it names no preset or option. Layers and values are checked as those of config.json are.
    """
    if ";" in text:
        raise ValueError(f"'{text}' is several wirings: put commas between the regions of one.")
    return [_parse_region(region) for region in re.split(r",(?![-\d])", re.sub(r"\s", "", text))]


def parse_wirings(text: str) -> list[str]:
    """The wirings of `ladder@16-32; desync-4x@8-24, ladder@24-32`, in which `;` parts them, each one once.

    Raises ValueError where one is empty.
    """
    wirings = [wiring.strip() for wiring in text.split(";")]
    if not all(wirings):
        raise ValueError(f"'{text}' has an empty wiring: give wirings with ; between them.")
    return list(dict.fromkeys(wirings))


def wiring_text(regions: Iterable[Region]) -> str:
    """The text of which `parse_wiring` makes `regions` again. Those that are as in a dense model are left out."""
    return ", ".join(f"{region_name(each)}@{each.layers}" for each in regions if not each.is_dense) or STANDARD


def region_name(region: Region) -> str:
    """A region's text without its layers: a preset's numbers, and what is not the preset's own."""
    preset = PRESETS[region.preset]
    own = preset.defaults() | ({"overlap": True} if region.delay > 1 else {})  # which goes without saying
    options = [(option, region.options[option.name]) for option in preset.all_options]
    numbers = {option.name for option in preset.options if option.type in _VALUES}
    shown = [_form(*each) for each in options if each[0].name in numbers or each[1] != own[each[0].name]]
    return region.preset + "".join(shown)


def _form(option: Option, value: Any) -> str:
    """An option as it stands in a text. A payload's table has + for its commas, which part regions and ranges."""
    if option.type is bool:
        return f"{'+' if value else '-'}{option.name}"
    digits = f"{Decimal(str(value)).normalize():f}" if type(value) in _VALUES else value
    return option.text.format(digits.replace(",", "+"))


def _parse_region(text: str) -> dict[str, Any]:
    name, at, layers = text.partition("@")
    name = f"{STANDARD}+{name}" if is_payload(name.replace("+", ",")) else name
    matched = re.match(rf"({'|'.join(map(re.escape, sorted(PRESETS, key=len, reverse=True)))})(?![a-z_])", name)
    if not matched:
        raise ValueError(f"'{text}' is no wiring: begin with {', '.join(PRESETS)}, as in ladder+peek@16-32.")
    options = dict(_parse_options(name[matched.end() :], matched[1], text))
    return {"layers": layers if at else "0-", "preset": matched[1], **options}


def _parse_options(rest: str, preset: str, text: str) -> Iterator[tuple[str, Any]]:
    own = PRESETS[preset].defaults()
    # a switch only where it changes something, so that `ladder-peek` is no ladder
    others = ((each, not own[each.name] if each.type is bool else each.metavar) for each in PRESETS[preset].all_options)
    forms = {option: _form(option, value) for option, value in others}
    takes = ", ".join(forms.values())
    while rest:
        found = [(each, matched) for each, form in forms.items() if (matched := re.match(_pattern(each, form), rest))]
        if not found:
            raise ValueError(f"'{rest}' in '{text}' means nothing: '{preset}' takes {takes}, each once, and @LAYERS.")
        [(option, matched)] = found
        yield option.name, rest[0] == "+" if option.type is bool else option.type(matched[1].replace("+", ","))
        del forms[option]
        rest = rest[matched.end() :]


def _pattern(option: Option, form: str) -> str:
    """What matches an option whose switch, if it is one, is `form`."""
    values = _VALUES.get(option.type, option.values or option.metavar)
    pattern = form if option.type is bool else option.text
    return re.escape(pattern).replace(r"\{\}", f"({values})") + r"(?![\w.])"
