"""A rewired checkpoint beside its weights: what its config.json says, and the code that it carries."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rewired.model.family import NOT_STOCK, Family
from rewired.model.version import VERSION

from .provenance import FITS
from .shape import family_in

# entries that a stock model's config does not have
_OURS = ("auto_map", "wiring", "wiring_version", "tp_shards")
_OUR_IMPORT = re.compile(r"^from (\.|rewired\.model\.)(\w+) import ", re.MULTILINE)


def wired_config(config: Mapping[str, Any], wiring: Sequence[Mapping[str, Any]], tp_shards: int) -> dict[str, Any]:
    """The config of a model of `config` with this `wiring`, in its JSON form."""
    family = family_in(config)
    return _without_wiring(config) | {
        "model_type": family.rewired_type,
        "architectures": [f"Rewired{family.architecture}"],
        **format_entries(family),
        "tp_shards": tp_shards,
        "wiring": list(wiring),
    }


def stock_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a stock model of `config`; what fits to a wiring recorded there is dropped."""
    family = family_in(config)
    unfitted = {name: value for name, value in _without_wiring(config).items() if name not in FITS}
    return unfitted | {"model_type": family.model_type, "architectures": [family.architecture]}


def format_entries(family: Family) -> dict[str, Any]:
    """What the config of every rewired model of a family says."""
    return {"auto_map": auto_map(family), "wiring_version": VERSION, **family.refusal}


def auto_map(family: Family) -> dict[str, str]:
    """What lets `trust_remote_code=True` load a checkpoint where rewired is not installed."""
    kinds = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    file = family.modeling.rpartition(".")[2]
    return {auto: f"{file}.Rewired{family.name}{kind}" for auto, kind in kinds.items()}


def is_ours(code: Any) -> bool:
    """Whether an `auto_map` points to nothing but code of ours, of this version or another."""
    files = [str(value).partition(".")[0] for value in code.values()] if isinstance(code, dict) else [""]
    return all(re.fullmatch(r"(modeling|configuration)_rewired_\w+", file) for file in files)


def write_code(family: Family, folder: Path) -> None:
    """Copy the model's own code, which `auto_map` points to, into `folder`."""
    for path, text in model_code(family).items():
        (folder / path).write_text(text, encoding="utf-8")


def model_code(family: Family) -> dict[str, str]:
    """The files that a checkpoint carries of us, by name: a family's classes, and what they import of our model.

    transformers wants them in one folder, and their imports relative.
    """
    return dict(_with_imports(family.modeling, set()))


def _with_imports(module: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is a file of ours"
    path = Path(spec.origin)
    text = path.read_text(encoding="utf-8")
    seen.add(path.stem)
    yield path.name, _OUR_IMPORT.sub(r"from .\2 import ", text)
    for package, name in _OUR_IMPORT.findall(text):
        if name not in seen:
            beside = f"{module.rpartition('.')[0]}." if package == "." else package
            yield from _with_imports(f"{beside}{name}", seen)


def _without_wiring(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: 1 if value == NOT_STOCK else value for name, value in config.items() if name not in _OURS}
