"""The cells of one number of ranks, measured by vLLM: its own model is `stock`, every other contender our plugin's.

Every rank holds an engine of each contender, and takes all steps that the other ranks take. So engines are timed in
turns, as models in transformers are. Weights are random: no time depends on them.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedConfig

from rewired.checkpoint.shape import Shape, family_in
from rewired.progress import Progress
from rewired.vllm_start import starting

from .contenders import STANDARD, STOCK, Contender
from .links import NCCL, SHARED_MEMORY
from .memory import engine_cache
from .models import STD, config_of, sizes_of
from .results import Cell, CellFile
from .runs import DECODE, PREFILL
from .timing import interleaved
from .transformers_engine import CHECKED, RankJob, check_same

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine runs in its rank
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or all engines of a rank would sit on one core
    "VLLM_HOST_IP": "127.0.0.1",
}
_RANDOM = "rewired-random"
_PAGES = 256  # tokens more than a sequence has, in its last page and in one that vLLM keeps


def measure(job: RankJob, batches: Sequence[int], measured: CellFile) -> None:
    """Run on every rank: measure a cell for each batch; the first rank adds it to `measured` when it is done.

    Raises ValueError where vLLM refuses a model, or `standard` does not compute what vLLM's own model does.
    """
    os.environ.update(_ENVIRONMENT)
    _join(job)
    with TemporaryDirectory() as folder:
        engines = _engines(job, max(batches), Path(folder))
        _check_logprobs(engines, job)
        for batch in batches:
            cell = _measure_batch(engines, batch, job)
            if distributed.get_rank() == 0:
                measured.add(cell)


def _measure_batch(engines: Mapping[str, Any], batch: int, job: RankJob) -> Cell:
    request = job.request
    prompts = _prompts(engines[STOCK], batch, request.prompt)
    runs = {name: partial(_generate, engine, prompts, request.new) for name, engine in engines.items()}
    for run in runs.values():
        run()
        run()
    samples = interleaved(runs, request.rounds, f"bench: TP {job.tp}, batch {batch}: round")
    return Cell(int(job.tp), batch, {_link(job): samples}, {name: {} for name in engines})


_request_ids = map(str, count())


def _generate(engine: Any, prompts: Sequence[list[int]], new: int) -> dict[str, float]:
    """Seconds until all sequences, which arrive together, have their first token, and of each step from then on."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    waiting = {next(_request_ids): prompt for prompt in prompts}
    distributed.barrier()
    start = first = time.perf_counter()
    for name, prompt in waiting.items():
        engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            if waiting.pop(output.request_id, None):
                first = time.perf_counter()
    return {PREFILL: first - start, DECODE: (time.perf_counter() - first) / (new - 1)}


def _engines(job: RankJob, batch: int, folder: Path) -> dict[str, Any]:
    config = sizes_of(job.config)
    config.max_position_embeddings = max(config.max_position_embeddings, job.request.prompt + job.request.new)
    engines = {}
    with Progress("bench: start engine", len(job.contenders)) as progress:
        for contender in job.contenders:
            engines[contender.name] = _engine(contender, config, job, batch, folder / contender.name)
            progress.advance()
    return engines


def _engine(contender: Contender, config: PreTrainedConfig, job: RankJob, batch: int, folder: Path) -> Any:
    """vLLM with one contender, whose weights are made on the rank that holds them."""
    request, length = job.request, job.request.prompt + job.request.new
    own = config_of(contender, config, job.tp_shards)
    architecture = family_in(job.config).architecture
    own.architectures = [architecture if contender.name == STOCK else f"Rewired{architecture}"]
    own.save_pretrained(folder)
    with starting(contender.name):
        from vllm import LLM

        _register_random_weights()
        return LLM(
            str(folder),
            load_format=_RANDOM,
            skip_tokenizer_init=True,
            dtype=request.dtype,
            seed=0,
            tensor_parallel_size=int(job.tp),
            distributed_executor_backend="external_launcher",
            enforce_eager=not request.is_compiled,
            enable_prefix_caching=False,
            disable_log_stats=True,
            max_model_len=length,
            max_num_seqs=batch,
            max_num_batched_tokens=batch * length,
            kv_cache_memory_bytes=engine_cache(request, Shape.from_config(config.to_dict()), job.tp, batch, _PAGES),
        )


def _check_logprobs(engines: Mapping[str, Any], job: RankJob) -> None:
    """Raise ValueError where `standard` is not vLLM's own model."""
    from vllm import SamplingParams

    prompts = _prompts(engines[STOCK], 1, min(CHECKED, job.request.prompt))
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = {}
    for name in (STOCK, STANDARD):
        inputs = [{"prompt_token_ids": prompts[0]}]
        (output,) = engines[name].generate(inputs, sampling, use_tqdm=False)
        each = zip(prompts[0][1:], output.prompt_logprobs[1:], strict=True)
        found[name] = torch.tensor([logprobs[token].logprob for token, logprobs in each])
    check_same(found[STOCK], found[STANDARD], "log-probabilities", job.request.dtype)


def _prompts(engine: Any, batch: int, length: int) -> list[list[int]]:
    """Random tokens, the same on all ranks."""
    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    tokens = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))  # [batch, length]
    return list(tokens.tolist())


@cache
def _register_random_weights() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(_RANDOM)
    class RandomWeights(BaseModelLoader):
        """Norms and biases are one, and all projections random, the same for all contenders; gains are as they are."""

        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.data.fill_(1)
                elif not name.endswith("_gain.weight"):
                    seed = zlib.crc32(name.encode()) + distributed.get_rank()
                    generator = torch.Generator(parameter.device).manual_seed(seed)
                    parameter.data.normal_(0, STD, generator=generator)


def _join(job: RankJob) -> None:
    """Make vLLM's process groups, before an engine does.

    On a CPU its ranks share memory if they say that they are on one machine. Over a link they are on two: then vLLM
    goes through gloo, as the reductions that overlap always do.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # without them there is no shared memory
    rank = distributed.get_rank()
    machine = rank if job.request.link else 0
    name = os.environ["VLLM_DIST_IDENT"] = f"rewired-{os.getppid()}-{machine}"
    with starting("the ranks"), set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            int(job.tp), rank, local_rank=int(os.environ["LOCAL_RANK"]), backend=distributed.get_backend()
        )
        initialize_model_parallel(int(job.tp))
    distributed.barrier()
    for memory in Path("/dev/shm").glob(f"{name}-*"):  # all ranks have it; what is killed would leave it behind
        memory.unlink(missing_ok=True)


def _link(job: RankJob) -> str:
    if job.request.device == "cuda":
        return NCCL
    return job.request.link or SHARED_MEMORY
