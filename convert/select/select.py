"""Which layers to rewire: scored after a refit, chosen within a budget, and measured beside the paper's choice."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from rewired.cache import digest
from rewired.ranks import choose_device
from rewired.sources import Source, find_source
from rewired.wiring import parse_wiring

from .. import destination
from ..checkpoint import Checkpoint
from ..refit.documents import check
from ..refit.run import load_tokenizer, refit
from ..refit.shelf import Shelf
from ..refit.text import load
from ..refit.weights import Weights
from ..request import MIX, RefitRequest
from ..write import wired_config
from .choice import STANDARD, Choice
from .picker import MIXED, SPD, WIRINGS, Candidate, Picker
from .plots import draw
from .scores import OnScore, Scorer, Scores, settings_of


@dataclass(frozen=True)
class SelectRequest:
    """How many layers to rewire as `wiring`, or how many all-reduces a token may wait for; and what to score on."""

    wiring: str = "ladder"  # one of WIRINGS, `spd`, or `mix`: the best of several for each layer
    budget: int | None = None  # layers
    exposed: int | None = None  # all-reduces a token
    tp_shards: int | None = None
    text: str = MIX
    tokens: int = 16_384
    spill: Path | None = None
    measure: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return {"mix": MIXED, "spd": (SPD,)}.get(self.wiring, (self.wiring,))


@dataclass(frozen=True)
class Selection:
    out: Path
    names: tuple[str, ...]  # of the wirings that were chosen from
    scores: Scores
    choice: Choice
    candidates: list[Candidate]  # what was chosen, and what the paper takes at the same budget


def select(
    source: str,
    out: str | Path | None,
    request: SelectRequest,
    *,
    revision: str | None = None,
    force: bool = False,
    on_score: OnScore = lambda *_: None,
    on_layer: Callable[[str, int, int], None] = lambda *_: None,
) -> Selection:
    """Score the layers of `source`, choose, measure, and write scores, choice and plot to the folder `out`.

    Scores are kept in the user's cache: another budget needs no second scoring, and an interrupted one goes on.
    `on_layer` hears of the candidate, the layer and the number of layers while candidates are measured. Raises
    ValueError with one sentence for what is unfit.
    """
    _check(request)
    found = find_source(source, revision)
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        preview = Checkpoint.open(found.preview(Path(scratch) / "preview"))
        tp_shards = _check_fits(request, preview)
        target = Path(out) if out else Path(_default_name(found, request))
        _check_free(target, force)
        if request.text != MIX:
            check(request.text)
        checkpoint = Checkpoint.open(found.fetch(Path(scratch) / "source", None))
        scores = _scored(checkpoint, request, tp_shards, on_score)
        picker = Picker(checkpoint.shape, request.names, scores)
        choice = picker.best(request.budget, request.exposed)
        candidates = [picker.candidate("chosen", choice)]
        last = picker.last(request.budget, candidates[0].exposed)
        if last != choice:
            candidates.append(picker.candidate(f"last {len(last) - last.count(STANDARD)} layers", last))
        if request.measure:
            work = target.with_name(f".{target.name}.refit")
            candidates = [_measured(each, checkpoint, request, tp_shards, work, on_layer) for each in candidates]
        selection = Selection(target, request.names, scores, choice, candidates)
        with destination.staged_folder(target) as staging:
            _write(selection, request, staging)
    return selection


def _check(request: SelectRequest) -> None:
    try:
        import matplotlib  # noqa: F401 - for the plot, hours later
    except ImportError:
        raise ValueError("A selection draws a plot, and matplotlib is not installed: pip install matplotlib.") from None
    known = [*WIRINGS, "spd", "mix"]
    if request.wiring not in known:
        near = get_close_matches(request.wiring, known, n=1, cutoff=0.85)
        raise ValueError(
            f"'{request.wiring}' is no wiring whose layers stand for themselves: "
            + (f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(known)}.")
        )
    if (request.budget is None) == (request.exposed is None):
        raise ValueError(
            "Say what the choice may take: --budget N, the layers to rewire, or --exposed N, the all-reduces that a "
            "token waits for."
        )
    if request.wiring == "mix" and request.exposed is None:
        raise ValueError("'mix' chooses among wirings that save differently: give it --exposed instead of --budget.")
    if request.tokens < 1:
        raise ValueError(f"--tokens {request.tokens} makes no sense: give a number from 1 on.")
    if request.spill is not None and not request.spill.is_dir():
        raise ValueError(f"There is no folder {request.spill} to spill to: make it first.")


def _check_fits(request: SelectRequest, checkpoint: Checkpoint) -> int:
    """The number of shards to score for."""
    if checkpoint.is_rewired:
        raise ValueError(
            f"{checkpoint.folder} is rewired already: layers are selected of a dense Llama, the one it was made from."
        )
    shape = checkpoint.shape
    if request.budget is not None and not 1 <= request.budget <= shape.num_hidden_layers:
        raise ValueError(f"--budget {request.budget} does not fit: the model has {shape.num_hidden_layers} layers.")
    if request.exposed is not None and not 1 <= request.exposed < 2 * shape.num_hidden_layers:
        raise ValueError(
            f"--exposed {request.exposed} does not fit: a token of the dense model waits for "
            f"{2 * shape.num_hidden_layers} all-reduces, and at least one is left."
        )
    tp_shards = request.tp_shards or shape.default_shards()
    shape.check_shards(tp_shards)
    return tp_shards


def _check_free(out: Path, force: bool) -> None:
    if out.exists() and not (force and (out / "selection.json").is_file()):
        raise ValueError(f"{out} exists: choose another name with --out, or replace an earlier selection with --force.")


def _default_name(source: Source, request: SelectRequest) -> str:
    amount = f"{request.budget}" if request.budget is not None else f"{request.exposed}-exposed"
    return f"{source.name}-select-{request.wiring}-{amount}"


def _scored(checkpoint: Checkpoint, request: SelectRequest, tp_shards: int, on_score: OnScore) -> Scores:
    calibration = load(request.text, load_tokenizer(checkpoint.folder), request.tokens)
    files = _files(checkpoint)
    digests = {path.name: digest(path) for path in checkpoint.weight_files()}
    config = wired_config(checkpoint.config, [], tp_shards)
    scores = Scores(settings_of(config, digests, calibration))
    with tempfile.TemporaryDirectory(dir=request.spill, prefix="rewired-spill-") as spill:
        weights = Weights(files, torch.device(choose_device("auto", 1)))
        scorer = Scorer(config, tp_shards, weights, calibration, Shelf(Path(spill) if request.spill else None))
        scorer.run({name: WIRINGS[name] for name in request.names}, scores, on_score)
    return scores


def _files(checkpoint: Checkpoint) -> dict[str, Path]:
    return {name: checkpoint.folder / info.file for name, info in checkpoint.tensors().items()}


def _measured(
    candidate: Candidate,
    checkpoint: Checkpoint,
    request: SelectRequest,
    tp_shards: int,
    work: Path,
    on_layer: Callable[[str, int, int], None],
) -> Candidate:
    """After a refit of all its layers, on the tokens that judge."""
    regions = parse_wiring(candidate.wiring, checkpoint.shape.num_hidden_layers)
    outcome = refit(
        wired_config(checkpoint.config, regions, tp_shards),
        checkpoint.folder,
        _files(checkpoint),
        None,
        RefitRequest(request.text, request.tokens, spill=request.spill),
        work,
        lambda layer, layers, _: on_layer(candidate.name, layer, layers),
    )
    shutil.rmtree(work)
    return Candidate(**(asdict(candidate) | {"converted": outcome.before.kl, "refitted": outcome.after.kl}))


def _write(selection: Selection, request: SelectRequest, folder: Path) -> None:
    chosen = selection.candidates[0]
    told: Mapping[str, Any] = {
        "request": {name: str(value) if isinstance(value, Path) else value for name, value in vars(request).items()},
        "candidates": [asdict(candidate) for candidate in selection.candidates],
    }
    for name, value in (("selection", told), ("wiring", chosen.wiring)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
    selection.scores.write(folder / "scores.json", request.names)
    draw(selection.scores, request.names, selection.choice, folder / "scores.png")
