"""vLLM in processes of its own: one start of Python for many models, on one rank or, under torchrun, on two.

python engine.py JOBS.json ANSWERS.json
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# vLLM without a network, with one thread a rank and no thread bound to a core
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
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


def run(jobs: list[dict[str, Any]], folder: Path, ranks: int = 1, timeout: float = 900, **variables: str) -> list[Any]:
    """The tokens of each job, or its error as a string. A job is `model`, `prompts`, `new_tokens` and LLM's options."""
    folder.mkdir(exist_ok=True)
    paths = [folder / "jobs.json", folder / "answers.json"]
    paths[0].write_text(json.dumps(jobs))
    python = [sys.executable] if ranks == 1 else ["torchrun", f"--nproc-per-node={ranks}", "--standalone"]
    output = (folder / "log.txt").open("w")
    process = subprocess.Popen(
        [*python, __file__, *paths],
        env=environment(folder) | variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        process.wait(timeout)
    finally:
        end(process)
        for left in Path("/dev/shm").glob(
            "-tp:*cpushm*"
        ):  # by ranks that were killed: the next ones would trip over it
            left.unlink()
    assert paths[1].exists(), (folder / "log.txt").read_text()[-4000:]
    answers: list[Any] = json.loads(paths[1].read_text())
    return answers


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(jobs: Path, answers: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    results: list[Any] = []
    engines = []  # those of several ranks share their process groups, and end together
    for job in json.loads(jobs.read_text()):
        model, prompts, new_tokens = job.pop("model"), job.pop("prompts"), job.pop("new_tokens")
        options = SMALL | {"skip_tokenizer_init": True, "disable_log_stats": True, "tensor_parallel_size": ranks} | job
        if ranks > 1:
            options["distributed_executor_backend"] = "external_launcher"
        try:
            engine = LLM(model, seed=0, **options)
            sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
            outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
            results.append([list(output.outputs[0].token_ids) for output in outputs])
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
            continue
        if ranks == 1:
            engine.llm_engine.engine_core.shutdown()
        else:
            engines.append(engine)
    if os.environ.get("RANK", "0") == "0":
        answers.write_text(json.dumps(results))
    engines.clear()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
