"""A bench from outside: what is compared, on which ranks, and where it is written."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rewired import __version__
from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import check_loadable
from rewired.checkpoint.named_shapes import find_checkpoint, named_shape
from rewired.checkpoint.shape import Shape
from rewired.grid.size import TpSize
from rewired.progress import announce, is_first_rank
from rewired.ranks import leave_group, run_on_ranks
from rewired.run_lock import held
from rewired.sources import checkpoint_folder
from rewired.vllm_start import vllm_version

from . import torchrun, vllm_engine
from .contenders import NONE, Contender, contenders
from .grids import copies_of_weights, on_grid
from .links import TIMEOUT_SECONDS, check_link, prepared
from .memory import check_memory
from .request import VLLM, BenchRequest
from .results import CellFile, to_json
from .transformers_engine import RankJob, measure_alone
from .transformers_engine import measure as in_transformers


def bench(
    request: BenchRequest, tp_sizes: Sequence[int], batches: Sequence[int], out: Path, profiles: bool = False
) -> dict[str, Any]:
    """Measure what is not measured yet in `out`, and return all that is, as results.json has it.

    With `profiles`, also trace a prefill of the smallest batch on the most ranks. Under torchrun, its ranks are the
    only number of ranks, and the first one's results are whole. Raises ValueError for what cannot be measured here,
    RankError where a rank fails.
    """
    check_link(request, tp_sizes)
    if request.trains and profiles:
        raise ValueError("--profile traces a prefill, and --train times none: leave one of them out.")
    if request.engine == VLLM:
        vllm_version()
        if profiles:
            raise ValueError("--profile traces models in transformers: leave it out, or --engine vllm.")
    if torchrun.is_joined():
        torchrun.join(request.device, TIMEOUT_SECONDS)
    model = _find(request)
    rivals = contenders(request.wirings, model.shape, model.own)
    jobs = [_job(request, model.for_ranks(tp), rivals, tp) for tp in map(TpSize.of, tp_sizes)]
    for job in jobs:
        copies = copies_of_weights(job.contenders, job.config, job.tp_shards, job.tp)
        check_memory(request, model.for_ranks(job.tp).shape, job.tp, max(batches), len(rivals), copies)
    found = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not found.is_dir():
        raise ValueError(f"{found} is a file: give --out a folder.")
    content = provenance.content(model.folder) if model.folder else None
    where = torchrun.of_first_rank(machine(request.device))
    if request.engine == VLLM:
        where["vllm"] = vllm_version()
    if request.engine == VLLM and NONE in request.wirings:
        announce(f"bench: {NONE} is left out, since vLLM's collectives cannot be silenced")
    with held(out) if is_first_rank() else nullcontext() as holder:
        if holder:
            raise ValueError(f"{out} is being written by {holder}: wait for it to end, or give another --out.")
        measured = CellFile(out, request, where, content)
        for job in jobs:
            missing = torchrun.of_first_rank([batch for batch in batches if not measured.is_done(job.tp, batch)])
            profiled = min(batches) if profiles and job is max(jobs, key=lambda each: int(each.tp)) else None
            if missing or profiled:
                _measure(replace(job, profiled=profiled), missing, measured)
                measured = CellFile(out, request, where, content)
    if torchrun.is_joined():
        leave_group()
    now = {"date": date.today().isoformat(), "load_average": round(os.getloadavg()[0], 2)}
    header = {"command": shlex.join(["rewired", *sys.argv[1:]]), "environment": now | where}
    return to_json(request, model.shape.num_hidden_layers, measured.cells, header)


@dataclass(frozen=True)
class _Model:
    """The model to bench, before any of it is loaded. `folder` is a checkpoint's, and None for a shape alone."""

    shape: Shape
    config: dict[str, Any]
    own: list[dict[str, Any]]  # regions of the wiring that a checkpoint has
    tp_shards: int | None = None
    folder: Path | None = None

    def for_ranks(self, ranks: int) -> _Model:
        """The model that `ranks` ranks share: KV heads of a shape alone are repeated, as a conversion would do it."""
        if self.folder:
            return self
        shape = self.shape.for_shards(int(ranks))
        return replace(self, shape=shape, config=self.config | {"num_key_value_heads": shape.num_key_value_heads})


def _find(request: BenchRequest) -> _Model:
    """Raises ValueError where there is no such model, or it has fewer layers."""
    named = named_shape(request.model)
    if named is not None:
        shape = _cut(named, request.layers)
        return _Model(shape, shape.config(), [])
    checkpoint = find_checkpoint(request.model)
    shape = _cut(checkpoint.shape, request.layers)
    whole = request.layers is None and checkpoint.is_rewired
    folder = checkpoint_folder(request.model)
    check_loadable(folder)
    config = {**checkpoint.config, "num_hidden_layers": shape.num_hidden_layers}
    wiring, tp_shards = (checkpoint.wiring.to_json(), checkpoint.tp_shards) if whole else ([], None)
    return _Model(shape, config, wiring, tp_shards, folder)


def _cut(shape: Shape, layers: int | None) -> Shape:
    if layers is None:
        return shape
    if layers > shape.num_hidden_layers:
        raise ValueError(f"--layers is {layers}, and the model has {shape.num_hidden_layers}.")
    return replace(shape, num_hidden_layers=layers)


def _job(request: BenchRequest, model: _Model, rivals: Sequence[Contender], tp: TpSize) -> RankJob:
    """On one rank there is no communication to leave out, and as many logical shards as conversion would choose.

    Raises ValueError for a model or a bench that so many ranks cannot run.
    """
    has_none = tp * request.fsdp > 1 and request.engine != VLLM
    rivals = [rival for rival in rivals if has_none or rival.name != NONE]
    tp_shards = model.tp_shards or (tp.x if tp > 1 else model.shape.default_shards())
    if tp.y > 1:
        rivals = on_grid(request, rivals, model.config, tp_shards, tp)
    else:
        model.shape.check_shards(int(tp), "--tp")
    return RankJob(request, model.config, rivals, tp, tp_shards, model.folder)


def _measure(job: RankJob, batches: Sequence[int], measured: CellFile) -> None:
    measure = vllm_engine.measure if job.request.engine == VLLM else in_transformers
    is_alone, ranks = job.request.emulation is not None and job.tp > 1, job.tp * job.request.fsdp
    if torchrun.is_joined():
        measure(job, batches, measured)
        return
    with prepared(job.request, ranks) as prepare:
        run_on_ranks(
            measure_alone if is_alone else measure,
            1 if is_alone else ranks,
            job,
            batches,
            measured,
            device_type=job.request.device,
            timeout_seconds=TIMEOUT_SECONDS,
            prepare=prepare,
        )


def machine(device: str) -> dict[str, Any]:
    """The machine and its software, as results.json records them."""
    is_gpu = device == "cuda"
    common = {
        "device": torch.cuda.get_device_name() if is_gpu else f"{platform.machine()} CPU",
        "cpus": os.cpu_count(),
        "rewired": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }
    on_gpu = {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))} if is_gpu else {}
    return common | on_gpu | {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
