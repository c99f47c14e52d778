"""vLLM in processes of its own: one start of Python for many models, on one rank or, under torchrun, on two.

python engine.py JOBS.json ANSWERS.json
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# vLLM without a network, with one thread a rank and no thread bound to a core
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
SMALL = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "max_model_len": 128, "max_num_seqs": 8}


def environment(folder: Path) -> dict[str, str]:
    """This process's environment with vLLM's settings; its caches are in `folder`, its commands first on the path."""
    caches = {"VLLM_CACHE_ROOT": str(folder / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | ENVIRONMENT | caches | {"PATH": path}


def run(jobs: list[dict[str, Any]], folder: Path, ranks: int = 1, timeout: float = 900) -> list[Any]:
    """The tokens of each job, or its error as a string.

    A job is `model`, `prompts`, `new_tokens` and LLM's options; with `adapter`, a LoRA's folder. With `record_events`
    its answer is what the model does, in order (see `events`); with `count_cached`, how many tokens of each prompt were
    in the prefix cache.
    """
    folder.mkdir(exist_ok=True)
    paths = [folder / "jobs.json", folder / "answers.json"]
    paths[0].write_text(json.dumps(jobs))
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes: list[subprocess.Popen[bytes]] = []
    with (folder / "log.txt").open("w") as log:
        for rank in map(str, range(ranks)):
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, *paths],
                    env=environment(folder)
                    | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
                    | group
                    | {"RANK": rank, "LOCAL_RANK": rank},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=processes[0].pid if processes else 0,
                )
            )
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        end(processes)
    assert paths[1].exists(), (folder / "log.txt").read_text()[-4000:]
    answers: list[Any] = json.loads(paths[1].read_text())
    return answers


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes of one group and all that they have started."""
    with suppress(ProcessLookupError):
        os.killpg(processes[0].pid, signal.SIGKILL)
    for process in processes:
        process.wait()
    for left in Path("/dev/shm").glob("-tp:*cpushm*"):  # of ranks that were killed, for the next ones to trip over
        left.unlink()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(jobs: Path, answers: Path) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    results: list[Any] = []
    engines: list[Any] = []  # those of several ranks share their process groups, and end together
    for job in json.loads(jobs.read_text()):
        try:
            results.append(answer(engines, **job))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
        if os.environ["WORLD_SIZE"] == "1" and engines:
            engines.pop().llm_engine.engine_core.shutdown()
    if os.environ["RANK"] == "0":
        answers.write_text(json.dumps(results))
    engines.clear()
    cleanup_dist_env_and_memory()


def answer(
    engines: list[Any],
    model: str,
    prompts: list[list[int]],
    new_tokens: int,
    adapter: str | None = None,
    record_events: bool = False,
    count_cached: bool = False,
    record_states: list[int] | None = None,
    **options: Any,
) -> Any:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    ranks = int(os.environ["WORLD_SIZE"])
    defaults = SMALL | {"skip_tokenizer_init": True, "disable_log_stats": True, "tensor_parallel_size": ranks}
    if ranks > 1:
        defaults["distributed_executor_backend"] = "external_launcher"
    engine = LLM(model, seed=0, **(defaults | options))
    engines.append(engine)
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None

    def generate() -> Any:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return engine.generate(inputs, sampling, use_tqdm=False, lora_request=lora)

    if record_states is not None:
        return states_between_layers(engine, record_states, generate)
    outputs = generate()
    if record_events:
        return events(generate)
    if count_cached:
        return [output.num_cached_tokens for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs]


def states_between_layers(engine: Any, layers: list[int], run: Callable[[], Any]) -> list[Any]:
    """The first hidden states, [T, H], before each of `layers`, that a draft such as EAGLE-3's would get in `run`."""
    seen: list[Any] = []

    def watch(model: Any) -> None:
        base, add = model.model, model.model._maybe_add_hidden_state
        base._set_aux_hidden_state_layers(tuple(layers))

        def record(states: Any, index: int, hidden_states: Any, residual: Any) -> Any:
            seen.extend(state.clone() for state in add([], index, hidden_states, residual))
            return states

        base._maybe_add_hidden_state = record

    engine.apply_model(watch)
    run()
    return [state.tolist() for state in seen[: len(layers)]]


# one letter an operation: a matrix product, an all-reduce at once, one that is started, one that is waited for
LETTERS = {
    "_C::onednn_mm": "m",
    "_C::shm_allreduce": "r",
    "_c10d_functional::all_reduce": "s",
    "_c10d_functional::wait_tensor": "w",
}


def events(run: Callable[[], Any]) -> str:
    """The operations of LETTERS that `run` executes, in their order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    found = [event for event in record.events() if event.name in LETTERS]
    return "".join(LETTERS[event.name] for event in sorted(found, key=lambda event: event.time_range.start))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
