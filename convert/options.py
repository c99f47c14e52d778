"""The options of `convert`: flags for wirings, made from the table of presets (`--NAME-layers` for each, and their own
options), a wiring as a text or in a file, and what is to be fitted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from os.path import isfile
from pathlib import Path
from typing import Annotated, Any

import typer

from rewired.checkpoint.checkpoint import parse_json
from rewired.model.presets import MODIFIERS, PRESETS, STANDARD, Option
from rewired.model.wiring_text import parse_wiring
from rewired.refit.request import RefitRequest, check_fitting
from rewired.text import MIX

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


def regions_in(wiring: str) -> list[dict[str, Any]]:
    """The regions of a text, or of a file in YAML or JSON: a text, a list, or a mapping that has it as `wiring`, as
    recipes and config.json do. Raises ValueError where there is none."""
    if not isfile(wiring):  # noqa: PTH113 - Path.is_file fails where a text is too long for a name
        if wiring.endswith((".yaml", ".yml", ".json")):
            raise ValueError(f"There is no file {wiring}.")
        return parse_wiring(wiring)
    content = _parse(Path(wiring))
    regions = content.get("wiring") if isinstance(content, dict) else content
    if isinstance(regions, str):
        return parse_wiring(regions)
    if not isinstance(regions, list):
        raise ValueError(f"{wiring} holds no wiring, such as ladder@16-32 or [{{layers: 16-32, preset: ladder}}].")
    return regions


def _parse(file: Path) -> Any:
    """JSON is nearly YAML: of a file that says it is, the errors are those of JSON."""
    if file.suffix == ".json":
        return parse_json(file)
    import yaml

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} is neither YAML nor JSON that can be read ({reason}).") from None


def refit_request(refit: str | None, calibrate: str | None, tokens: int | None) -> RefitRequest | None:
    """Raises ValueError where the options contradict each other."""
    if refit is None and calibrate is None:
        if tokens is not None:
            raise ValueError("--refit-tokens goes with --refit or --calibrate: say which of them you want.")
        return None
    texts = {text for text in (refit, calibrate) if text is not None} - {MIX}
    if len(texts) > 1:
        raise ValueError("--refit and --calibrate name different texts: both fit on one text, so name it once.")
    tokens = RefitRequest.tokens if tokens is None else tokens
    check_fitting("--refit-tokens", tokens)
    text = next(iter(texts), MIX)
    return RefitRequest(text, tokens, gains=calibrate is not None, matrices=refit is not None)
