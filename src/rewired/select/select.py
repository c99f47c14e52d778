"""The selection of layers: scored after a refit, chosen within a budget, measured beside the papers' choice."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rewired.cache import digest, discard
from rewired.checkpoint.checkpoint import Checkpoint
from rewired.checkpoint.rewired_config import wired_config
from rewired.checkpoint.safetensors_header import check_types
from rewired.convert import destination
from rewired.model.presets import STANDARD
from rewired.progress import announce
from rewired.ranks import choose_device
from rewired.refit.activations import memory_errors
from rewired.refit.calibration import Calibration
from rewired.refit.request import RefitRequest
from rewired.refit.run import ALGORITHM_VERSION, load_text, refit
from rewired.refit.weights import Weights
from rewired.sources import checkpoint_folder, find_source
from rewired.text.documents import check as check_text

from .choice import Choice, choose, entries, exposed, last, sent, units
from .cost import note
from .request import SelectRequest, check, check_fits, default_name
from .scorer import OnScore, Scorer
from .scores import MeasuredKL, ScoreCache

OnLayer = Callable[[str, int, int], None]  # called with a candidate, its layer that is done, and the number of layers


@dataclass(frozen=True)
class PricedChoice:
    """A choice of layers: what it costs by its `price`, the sum over its layers and neighbours, and when measured."""

    name: str
    wiring: list[dict[str, Any]]  # as config.json has it, standard layers left out
    exposed: int
    bytes: float  # that its reductions carry, as a share of the dense model's
    price: float
    measured: MeasuredKL | None = None


@dataclass(frozen=True)
class Selection:
    out: Path
    tp_shards: int
    calibration: Calibration
    cache: ScoreCache
    choice: Choice
    candidates: list[PricedChoice]  # what was chosen, and what the papers take at the same budget


def select(
    source: str,
    out: str | Path | None,
    request: SelectRequest,
    *,
    revision: str | None = None,
    on_score: OnScore = lambda *_: None,
    on_layer: OnLayer = lambda *_: None,
) -> Selection:
    """Score the layers of `source`, choose, measure, and write scores and choice to the folder `out`.

    Scores and measurements stay in the user's cache: another budget needs no second scoring, and an interrupted one is
    resumed. Raises ValueError with one sentence for a request or a model that does not fit.
    """
    check(request)
    dense = find_source(source, revision)
    target = Path(out) if out else Path(default_name(dense, request))
    _check_free(target)
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        tp_shards = check_fits(request, Checkpoint.open(dense.preview(Path(scratch))))
    check_text(request.text)
    with destination.staged_folder(target) as staging:
        checkpoint = Checkpoint.open(checkpoint_folder(source, revision))
        job = _Job(checkpoint, request, tp_shards, target)
        announce(job.note())
        job.score(on_score)
        choice = job.best()
        candidates = [job.candidate("chosen", choice)]
        amount, most = request.limit(checkpoint.shape)
        papers = last(len(choice), request.names[0], amount, most)
        if papers != choice and amount(papers) <= most:
            candidates.append(job.candidate(f"the last {len(papers) - papers.count(STANDARD)}", papers))
        if request.measure:
            candidates = [job.measure(candidate, on_layer) for candidate in candidates]
        selection = Selection(target, tp_shards, job.calibration, job.cache, choice, candidates)
        _write(selection, source, revision, request, staging)
        _check_free(target)  # it took time: something may be there now
        discard(job.work)
    return selection


def estimate(source: str, request: SelectRequest, *, revision: str | None = None) -> str:
    """The sentence on what `select` would cost, without running a model. Raises ValueError as it does.

    Scores that are known from earlier runs are left out where the model is on this machine.
    """
    check(request)
    dense = find_source(source, revision)
    with tempfile.TemporaryDirectory(prefix="rewired-") as scratch:
        checkpoint = Checkpoint.open(dense.preview(Path(scratch)))
        tp_shards = check_fits(request, checkpoint)
        check_text(request.text)
        if any(checkpoint.folder.glob("*.safetensors")):
            return _Job(checkpoint, request, tp_shards, Path(default_name(dense, request))).note()
        layers = range(checkpoint.shape.num_hidden_layers)
        return note(checkpoint.shape, tp_shards, request, dict.fromkeys(request.names, layers))


def _check_free(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists: choose another name with --out, or remove it.")


class _Job:
    """The model, its calibration text, and the scores of its layers."""

    def __init__(self, checkpoint: Checkpoint, request: SelectRequest, tp_shards: int, target: Path) -> None:
        self.checkpoint, self.request, self.tp_shards = checkpoint, request, tp_shards
        tensors = checkpoint.tensors()
        family = checkpoint.shape.family
        layers = [info for name, info in tensors.items() if name.startswith(f"{family.in_base(family.layers)}.")]
        check_types(layers, dtype=None)
        destination.check_space(target, sum(info.size for info in layers) if request.measure else 0)
        self.files = {name: checkpoint.folder / info.file for name, info in tensors.items()}
        self.calibration = load_text(checkpoint.config, checkpoint.folder, request.text, request.tokens)
        self.names = request.names
        self.work = target.with_name(f".{target.name}.refit")
        self.config = wired_config(checkpoint.config, [], tp_shards)
        weights = {path.name: digest(path) for path in checkpoint.weight_files()}
        settings = {
            "algorithm": ALGORITHM_VERSION,
            "config": self.config,
            "weights": weights,
            "text": self.calibration.sha256,
        }
        self.cache = ScoreCache(settings, checkpoint.shape.num_hidden_layers)

    def note(self) -> str:
        """On what is not known yet."""
        layers = range(self.checkpoint.shape.num_hidden_layers)
        known = {name: self.cache.read(name) for name in self.names}
        missing = {name: [layer for layer in layers if layer not in known[name]] for name in self.names}
        return note(self.checkpoint.shape, self.tp_shards, self.request, missing)

    def score(self, on_score: OnScore) -> None:
        weights = Weights(self.files, torch.device(choose_device("auto", 1)), self.checkpoint.shape.family)
        with memory_errors():
            scorer = Scorer(self.config, self.tp_shards, weights, self.calibration)
            scorer.run(self.names, self.cache, on_score)

    def best(self) -> Choice:
        """Exactly `budget` layers, or at most the limit of what a token may take."""
        layers, (amount, most) = self.checkpoint.shape.num_hidden_layers, self.request.limit(self.checkpoint.shape)
        dense = amount((STANDARD,) * layers)
        least = most if self.request.budget is not None else 0
        saved = range(least - dense, most - dense + 1)
        choice = choose(self.cache.price(self.names), units(layers, self.names, amount), saved)
        assert choice is not None, "budgets that nothing fits are refused at the start"
        return choice

    def candidate(self, name: str, choice: Choice) -> PricedChoice:
        hidden_size = self.checkpoint.shape.hidden_size
        share = sent(choice, hidden_size) / sent((STANDARD,) * len(choice), hidden_size)
        return PricedChoice(name, entries(choice), exposed(choice), share, self.cache.price(self.names).of(choice))

    def measure(self, candidate: PricedChoice, on_layer: OnLayer) -> PricedChoice:
        """The candidate with its KL on held-out tokens after a refit of all its layers."""
        known = self.cache.measured(candidate.wiring)
        if known is None:
            wiring = self.checkpoint.shape.wiring(candidate.wiring).to_json()
            refitted = refit(
                wired_config(self.checkpoint.config, wiring, self.tp_shards),
                self.checkpoint.folder,
                self.files,
                None,
                RefitRequest(self.request.text, self.request.tokens),
                self.work,
                lambda layer, layers, _: on_layer(candidate.name, layer, layers),
            )
            known = MeasuredKL(refitted.before.kl, refitted.after.kl, refitted.after.kl_standard_error)
            self.cache.add_measured(candidate.wiring, known)
        return replace(candidate, measured=known)


def _write(selection: Selection, source: str, revision: str | None, request: SelectRequest, folder: Path) -> None:
    summary = {
        "source": source,
        "revision": revision,
        "request": vars(request),
        "tp_shards": selection.tp_shards,
        "tokens": selection.calibration.tokens,
        "tokens_that_judge": selection.calibration.held_out_tokens,
        "candidates": [asdict(candidate) for candidate in selection.candidates],
    }
    scores = {name: {layer: asdict(one) for layer, one in selection.cache.read(name).items()} for name in request.names}
    for name, value in (("selection", summary), ("wiring", selection.candidates[0].wiring), ("scores", scores)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
