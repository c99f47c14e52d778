"""The flags of `convert` for wirings, made from the table of presets: `--NAME-layers` for each, and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from rewired.model.presets import MODIFIERS, PRESETS, STANDARD, Option

Flags = Mapping[str, Any]  # by an option's name or NAME_layers; None for a flag that was not given


def with_wiring_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with a parameter for each of these flags in place of its own `flags`, which takes them as a dict."""
    signature = inspect.signature(command, eval_str=True)
    ours, parameters = list(_parameters()), list[inspect.Parameter]()
    for parameter in signature.parameters.values():
        parameters += ours if parameter.name == "flags" else [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        flags = {parameter.name: given.pop(parameter.name) for parameter in ours}
        command(**given, flags=flags)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    return run


def regions_of(flags: Flags) -> list[dict[str, Any]]:
    """The regions that flags name, in their JSON form. Raises ValueError where an option has no layers to go with."""
    for option, owners in _owners():
        if flags[option.name] is not None and not any(flags[_layers(name)] is not None for name in owners):
            if option in MODIFIERS:
                raise ValueError(
                    f"{option.flag} goes with the layers to rewire: name them, for example --ladder-layers 16-32."
                )
            needed = " or ".join(f"--{name}-layers" for name in owners)
            raise ValueError(f"{option.flag} goes with {needed}: say which layers it is for.")
    return [_region(name, flags) for name in PRESETS if flags[_layers(name)] is not None]


def _region(name: str, flags: Flags) -> dict[str, Any]:
    given = {option.name: flags[option.name] for option, owners in _owners() if name in owners}
    options = {option: value for option, value in given.items() if value is not None}
    return {"layers": flags[_layers(name)], "preset": name, **options}


def _owners() -> Iterator[tuple[Option, list[str]]]:
    """Every option, and the presets that take it; modifiers are for layers that are rewired."""
    options = {option.name: option for preset in PRESETS.values() for option in preset.options}
    for option in options.values():
        yield option, [name for name, preset in PRESETS.items() if option in preset.options]
    for option in MODIFIERS:
        yield option, [name for name in PRESETS if name != STANDARD or option.is_for_dense]


def _parameters() -> Iterator[inspect.Parameter]:
    """Each preset's layers with the options that it is the first to take, then the modifiers."""
    owners = list(_owners())
    for name, preset in PRESETS.items():
        yield _parameter(_layers(name), str, f"--{name}-layers", "LAYERS", preset.help)
        for option, presets in owners:
            if option not in MODIFIERS and presets[0] == name:
                yield _option(option, presets)
    for option in MODIFIERS:
        yield _option(option, [])


def _option(option: Option, presets: list[str]) -> inspect.Parameter:
    flag = f"{option.flag}/--no-{option.flag.removeprefix('--')}" if option.type is bool else option.flag
    help_text = option.help.format(presets=" and ".join(presets))
    return _parameter(option.name, option.type, flag, option.metavar, help_text)


def _parameter(name: str, kind: type, flag: str, metavar: str, help_text: str) -> inspect.Parameter:
    annotation = Annotated[kind | None, wiring_option(metavar, help_text, flag)]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def wiring_option(metavar: str, help_text: str, *names: str) -> Any:
    """An option in the help's panel of wirings."""
    return typer.Option(*names, metavar=metavar, help=help_text, rich_help_panel="Which layers, and how")


def _layers(name: str) -> str:
    return f"{name.replace('-', '_')}_layers"
