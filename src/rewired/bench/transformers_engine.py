"""The cells of one number of ranks, measured by transformers on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers.utils import logging

from rewired.grid.size import TpSize
from rewired.progress import Progress

from .communication import bytes_sent, measure_all_reduces
from .contenders import NONE, STANDARD, STOCK, Contender
from .emulated import join
from .links import groups as groups_of
from .links import on_link
from .models import SharedWeights, build, meshes_of, shard, silent_group, sizes_of
from .request import BenchRequest
from .results import Cell, CellFile
from .runs import Steps, TrainingSteps
from .timing import Run, Samples, interleaved
from .trace import trace_prefills

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}  # of the largest logit, for another order of sums
CHECKED = 64  # tokens of the prompt whose logits are compared

Groups = dict[str, Any]  # a process group for each link
Models = dict[tuple[str, str], Any]  # by link and contender
EngineOf = Callable[[str], Steps | TrainingSteps]  # by contender


@dataclass(frozen=True)
class RankJob:
    """What every rank needs to know. `weights` is a checkpoint's folder, or None for random ones.

    A prefill of `profiled` sequences is traced.
    """

    request: BenchRequest
    config: dict[str, Any]
    contenders: Sequence[Contender]
    tp: TpSize
    tp_shards: int
    weights: Path | None
    profiled: int | None = None


def measure_alone(job: RankJob, batches: Sequence[int], measured: CellFile) -> None:
    """`measure` on the first of the ranks, where there are no others."""
    distributed.destroy_process_group()
    assert job.request.emulation is not None and job.request.link is not None
    join(int(job.tp), job.request.link, _device(job.request), job.request.emulation)
    measure(job, batches, measured)


@torch.no_grad()
def measure(job: RankJob, batches: Sequence[int], measured: CellFile) -> None:
    """Run on every rank: measure a cell for each batch; the first rank adds it to `measured` when it is done.

    Raises ValueError where `standard` does not compute what the stock model does.
    """
    _quiet_ranks()
    groups = groups_of(job.request, job.tp)
    dtype: torch.dtype = getattr(torch, job.request.dtype)
    all_reduces = measure_all_reduces(groups, dtype, job.request.device) if distributed.get_world_size() > 1 else []
    models = _models(job, groups)
    _check_logits(models, job.request)
    for batch in batches:
        cell = _measure_batch(models, groups, batch, job, all_reduces)
        if distributed.get_rank() == 0:
            measured.add(cell)
    if job.profiled is not None:
        slowest = list(groups)[-1]
        on_link = {name: model for (link, name), model in models.items() if link == slowest}
        tokens = prompt(on_link[STANDARD], job.profiled, job.request.prompt)
        trace_prefills(on_link, tokens, measured.file.parent / "traces")


def _measure_batch(
    models: Models, groups: Groups, batch: int, job: RankJob, all_reduces: Sequence[dict[str, Any]]
) -> Cell:
    request = job.request
    engine_of = _engines(models, batch, job)
    sent = _bytes_sent(models, engine_of)
    runs = _ready(models, groups, engine_of)
    samples: dict[str, dict[str, Samples]] = {}
    what = f"bench: TP {job.tp}, batch {batch}: round"
    for (_, link, name), of_run in interleaved(runs, request.rounds, what).items():
        samples.setdefault(link, {}).setdefault(name, {}).update(of_run)
    return Cell(job.tp.written, batch, samples, sent, all_reduces)


def _engines(models: Models, batch: int, job: RankJob) -> EngineOf:
    """Models that are split alike share one: on a grid, stock has its own."""
    request = job.request

    @cache
    def made(example: str) -> Steps | TrainingSteps:
        model = next(model for (_, name), model in models.items() if name == example)
        tokens = prompt(model, batch, request.prompt)
        return TrainingSteps(tokens) if request.trains else Steps(model, tokens, request)

    return lambda name: made(STOCK if name == STOCK and job.tp.y > 1 else STANDARD)


def prompt(model: Any, batch: int, length: int) -> torch.Tensor:
    """Random tokens, [batch, length], the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def _bytes_sent(models: Models, engine_of: EngineOf) -> dict[str, dict[str, float]]:
    """Of each contender, by measure."""
    sent: dict[str, dict[str, float]] = {}
    for (_, name), model in models.items():
        if name not in sent:
            passes = engine_of(name).passes(model).items()
            sent[name] = {measure: 0.0 if name == NONE else bytes_sent(run) for measure, run in passes}
    return sent


def _ready(models: Models, groups: Groups, engine_of: EngineOf) -> dict[tuple[int, str, str], Run]:
    """All runs, compiled and warm; those of a kind, and of a contender on its links, stand next to each other."""
    torch._dynamo.reset()  # graphs of the last batch
    names = [name for _, name in models]
    runs_of = cache(lambda model, name: list(engine_of(name).runs(model)))  # links of a group share their models
    runs: dict[tuple[int, str, str], Run] = {}
    with Progress("bench: warm up model", len(models)) as progress:
        for (link, name), model in models.items():
            for kind, run in enumerate(runs_of(model, name)):
                runs[kind, link, name] = on_link(link, groups[link], run)
                runs[kind, link, name]()
                runs[kind, link, name]()
            progress.advance()
    return {key: runs[key] for key in sorted(runs, key=lambda key: (key[0], names.index(key[2])))}


def _models(job: RankJob, groups: Groups) -> Models:
    request = job.request
    device = _device(request)
    dtype: torch.dtype = getattr(torch, request.dtype)
    config = sizes_of(job.config)
    config.dtype = dtype
    weights = SharedWeights(dtype, device, job.weights)
    entries = dict(job.contenders)
    silent = silent_group() if NONE in entries else None

    @cache  # links may share a group, and then they share its models
    def made(group: Any, name: str) -> Any:
        mesh, fsdp_mesh = meshes_of(silent if name == NONE else group, request, job.tp)
        model = build(Contender(name, entries[name]), config, job.tp_shards, mesh, job.tp, request.fsdp)
        weights.fill(model)
        model.requires_grad_(request.trains)
        if fsdp_mesh is not None:
            shard(model, fsdp_mesh)
        return model

    return {(link, name): made(group, name) for (link, group), name in product(groups.items(), entries)}


def _device(request: BenchRequest) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if request.device == "cuda" else torch.device("cpu")


def _check_logits(models: Models, request: BenchRequest) -> None:
    """Raise ValueError where `standard` is not the stock model, where that runs."""
    for link in {link for link, name in models if name == STOCK}:
        stock, standard = models[link, STOCK], models[link, STANDARD]
        tokens = prompt(stock, 1, min(CHECKED, request.prompt))
        check_same(stock(tokens).logits, standard(tokens).logits, "logits", request.dtype)


def check_same(stock: torch.Tensor, standard: torch.Tensor, what: str, dtype: str) -> None:
    """Raise ValueError where the two models are not the same function."""
    difference = ((standard - stock).abs().max() / stock.abs().max()).item()
    if not difference <= TOLERANCE[dtype]:
        raise ValueError(
            f"The {what} of standard differ from the stock model's by {difference:.1e} of the largest: nothing was "
            "timed. This is a fault of rewired; please report it with the output of rewired bench."
        )


def _quiet_ranks() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views, which nothing writes to
    torch._dynamo.config.recompile_limit = 256  # the models share the code of their forward
