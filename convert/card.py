"""The model card that a rewired checkpoint carries."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rewired.model.regions import parse_regions
from rewired.rotate.request import RECORD

if TYPE_CHECKING:
    from .job import Job

_QUOTES = "'\""


def model_card(job: Job, config: Mapping[str, Any], notes: Sequence[str]) -> str:
    """README.md of the checkpoint that `job` writes with `config`: front matter, the table of layers, how to make, load
    and improve it."""
    table, is_stock = job.plan.table, job.request.to_stock
    fitted = parse_regions(config.get("refit", {}).get("wiring", []), config["num_hidden_layers"])
    layers = ", ".join(region.layers for region in fitted if not region.is_dense)
    return _CARD.format(
        front_matter=_front_matter(job.source.base_model, job.checkpoint.folder),
        name=job.out.name,
        table=_TABLE,
        rows="\n".join(_row(layers, wiring, vars(traffic)) for layers, wiring, traffic in table.rows),
        total=_row("all", "this model", vars(table.total)),
        dense=_row("all", "dense original", vars(table.dense)),
        remarks=table.remarks,
        notes="\n".join(f"- {note}" for note in notes),
        command=job.request.command,
        use=_use(job.out, "" if is_stock else _IMPORTS),
        intro=(_INTRO_STOCK if is_stock else _INTRO + _FRESH).format(
            base_model=_linked(job.source.base_model),
            weights=_REFITTED.format(layers) if layers else _ROTATED if RECORD in config else _UNCHANGED,
        ),
    )


def card_of_trained(card: str, name: str, path: Path, original: str | None) -> str:
    """The `card` of a checkpoint, for the checkpoint `name` that training made of it, which `path` will hold.

    Of ours, the table, the notes and the command stay. The `original` is named if it is known: where it is on the hub,
    or the card names one there, that is its `base_model`.
    """
    front, body = _split(card)
    if _OURS in body:
        intro, table = body.split(_TABLE, 1)
        base = original or intro.split("`")[1]
        weights = f"were {'fitted and ' if 'were fitted' in intro else ''}trained since: see Training"
        table = table.partition(_USE.partition("{")[0])[0]
        intro = _INTRO.format(base_model=_linked(base), weights=weights)
        body = f"# {name}\n\n{intro}\n\n{_TABLE}{table}{_use(path, _IMPORTS)}"
    bases = _bases(front)
    if front and not isinstance(bases, list):  # a merge's list stays
        ids = [base for base in (original, bases) if is_hub_id(base)][:1]
        others = [line for line in front.splitlines() if not line.startswith("base_model:")]
        front = "\n".join([*(f"base_model: {json.dumps(base)}" for base in ids), *others])
    return f"---\n{front}\n---\n{body}" if front else body


def _use(path: Path, imports: str) -> str:
    return _USE.format(imports=imports, path=shlex.quote(str(path)), quoted_path=json.dumps(str(path)))


def _linked(model: str) -> str:
    return f"[`{model}`](https://huggingface.co/{model})" if is_hub_id(model) else f"`{model}`"


def _front_matter(base_model: str, source: Path) -> str:
    """Of the card. The source is the base where it is on the hub; else the bases are its own, as a merge has them."""
    readme = source / "README.md"
    before, _ = _split(readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else "")
    bases = base_model if is_hub_id(base_model) else _bases(before)
    lines = [f"base_model: {json.dumps(bases)}"] if bases else []
    lines += ["library_name: transformers", "pipeline_tag: text-generation"]
    return "\n".join([*lines, "tags:", "- rewired", "- tensor-parallelism", *_licence(before)])


def is_hub_id(name: Any) -> bool:
    """Whether `name` is that of a repository on the hub, owner/name, and no file or folder's."""
    return isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def _split(card: str) -> tuple[str, str]:
    """The front matter of a card, and the rest."""
    match = re.match(r"---\n(.*?)\n---[^\n]*\n?", card, re.DOTALL)
    return (match[1], card[match.end() :]) if match else ("", card)


def _bases(front_matter: str) -> str | list[str] | None:
    """The base or bases that a card names, as far as they are on the hub."""
    try:
        entries = yaml.safe_load(front_matter)
    except (yaml.YAMLError, RecursionError):
        return None
    bases = entries.get("base_model") if isinstance(entries, dict) else None
    if isinstance(bases, list):
        return [base for base in bases if is_hub_id(base)]
    return bases if is_hub_id(bases) else None


def _licence(front_matter: str) -> list[str]:
    """The licence lines of a card: a rewired model stays under its base model's licence."""
    licences = re.findall(r"^(license(?:_name|_link)?): *(.+)$", front_matter, re.MULTILINE)
    return [f"{key}: {json.dumps(value.strip().strip(_QUOTES))}" for key, value in licences]


def _row(layers: str, wiring: str, traffic: dict[str, int]) -> str:
    return f"| {layers} | {wiring} | {traffic['all_reduces']} | {traffic['exposed']} | {traffic['bytes_sent']:,} |"


_OURS = "rewired for faster tensor parallelism with `rewired`"
_FRESH = " A freshly rewired model is a starting point: adapt it before you rely\non it."
_INTRO = (
    f"{{base_model}}, {_OURS}: what changed is what each layer reads\n"
    f"and what it reduces, and the weights {{weights}}. It stays under the original's licence."
)
_UNCHANGED = "are those of its source"
_ROTATED = "are its source's, in another basis"
_REFITTED = "of layers {}, which were fitted to what these layers now read"

_TABLE = "| layers | wiring | all-reduces a token | of which waited for | bytes sent a token and rank |"
_IMPORTS = "\n    import rewired  # or without it: trust_remote_code=True for the model, False for the tokenizer"

_INTRO_STOCK = "{base_model} as a stock checkpoint, written by `rewired`. It stays under the original's licence."

_CARD = """---
{front_matter}
---
# {name}

{intro}

{table}
|---|---|---|---|---|
{rows}
| | | | | |
{total}
{dense}

{remarks}

{notes}

Made by:

    {command}

{use}"""

_USE = """## Load it
{imports}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained({quoted_path}, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained({quoted_path})

## Adapt and evaluate it

It is an ordinary `transformers` model: TRL's `SFTTrainer`, PEFT's LoRA and lm-evaluation-harness take it as they take
any other. This prints the table above:

    rewired info {path}
"""
