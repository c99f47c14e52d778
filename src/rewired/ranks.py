"""Run a function on several ranks of this machine; one that fails or dies ends them all.

For our own commands. Scripts, and runs on several machines, take torchrun.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from .quantities import count

TIMEOUT_SECONDS = 600.0
PRELOADED = ["rewired.model.modeling_rewired_llama"]  # before ranks are forked, none of which then could use CUDA
_GRACE_SECONDS = 3.0  # how much later than the first failure its cause may arrive


class RankError(RuntimeError):
    """A rank failed, or died; the message says which one and how."""

    died = False


def run_on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    device_type: str = "cpu",
    timeout_seconds: float = TIMEOUT_SECONDS,
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """`function(*args)` on every rank of a process group (gloo on "cpu", NCCL on "cuda"); the ranks' results.

    `function` must be importable by its name, and so must `prepare`, which each rank calls with its number before it
    joins the group. `timeout_seconds` is what a collective may take. Raises ValueError where a rank does, and RankError
    where one fails otherwise or dies; no rank is left running then.
    """
    context = multiprocessing.get_context("forkserver")
    _start_server()
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="rewired-") as folder:
        join = partial(_join, ranks, f"{folder}/store", device_type, timeout_seconds, prepare)
        try:
            for rank in range(ranks):
                here, there = context.Pipe()
                process = context.Process(target=_run_rank, args=(there, rank, join, function, args), daemon=True)
                process.start()
                there.close()
                processes.append(process)
                connections.append(here)
            results = _collect(processes, connections)
            for running in processes:
                running.join(_GRACE_SECONDS)
            return results
        finally:
            for running in processes:
                running.kill()
                running.join()


def check_device(device: str) -> None:
    """Raise ValueError for a name that is no choice."""
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device {device} is not known: choose auto, cuda or cpu.")


def choose_device(device: str, ranks: int) -> str:
    """The device type, "cpu" or "cuda", for so many ranks; `device` may be "auto". Raises ValueError."""
    check_device(device)
    import torch

    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return "cpu"
    if gpus < ranks:
        raise ValueError(
            f"{count(ranks, 'rank')} would take {count(ranks, 'GPU')} and there are {gpus}: "
            "take fewer, or --device cpu."
        )
    return "cuda"


def _start_server() -> None:
    """Start what forks the ranks: it imports the model once for all, and leaves Ctrl-C to us, as the ranks do."""
    forkserver.set_forkserver_preload(PRELOADED)
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may change what a signal does, and the first rank starts the server too
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, ours)


def _join(
    ranks: int, store: str, device_type: str, timeout_seconds: float, prepare: Callable[[int], None] | None, rank: int
) -> None:
    """Join the process group, which ranks find by the file `store`."""
    import torch

    if prepare is not None:
        prepare(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    if device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers takes an accelerator wherever it sees one
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    enter_group(device_type, rank, timeout_seconds, **where)


def enter_group(device_type: str, local_rank: int, timeout_seconds: float, **where: Any) -> None:
    """Join the process group, gloo on "cpu" and NCCL on "cuda"; `where` is as torch takes it, by default torchrun's.

    NCCL's kernels go before others, or a small all-reduce would queue behind all blocks of a product.
    """
    import torch

    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_seconds)}
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
        urgent = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options |= {"device_id": torch.device("cuda", local_rank), "pg_options": urgent}
    torch.distributed.init_process_group({"cpu": "gloo", "cuda": "nccl"}[device_type], **options, **where)


def free_memory() -> None:
    """Free the models that nothing holds any more: a student with its teacher is part of a reference cycle."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def leave_group() -> None:
    """End the process group. CUDA graphs keep its communicators, and NCCL would wait for them for ever."""
    import torch

    if torch.cuda.is_initialized():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


def _collect(processes: Sequence[BaseProcess], connections: Sequence[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Exception] = []
    pending = dict(enumerate(connections))
    deadline: float | None = None
    while pending and (deadline is None or time.monotonic() < deadline):
        wait(list(pending.values()), timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        for rank, connection in list(pending.items()):
            if connection.poll():
                outcome = _outcome(rank, processes[rank], connection)
                if isinstance(outcome, Exception):
                    failures.append(outcome)
                else:
                    results[rank] = outcome[0]
                del pending[rank]
        if failures and deadline is None:
            # the others see a broken connection, maybe before we see who broke it
            deadline = time.monotonic() + _GRACE_SECONDS
    if failures:
        raise min(failures, key=_distance_from_cause)
    return [results[rank] for rank in range(len(processes))]


def _outcome(rank: int, process: BaseProcess, connection: Connection) -> Any:
    """A one-tuple of the rank's result, or what it failed of."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        error = RankError(f"Rank {rank} {how}, so the other ranks were ended.")
        error.died = True
        return error


def _distance_from_cause(failure: Exception) -> int:
    """What a rank refuses, all refuse. Where one has died, the others' failures only follow from it."""
    return 0 if isinstance(failure, ValueError) else 1 if getattr(failure, "died", False) else 2


def _run_rank(
    connection: Connection, rank: int, join: Callable[[int], None], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()  # a collection would write to all that the server imported, and so copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everyone; the parent ends its ranks
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    import torch

    outcome: Any
    try:
        join(rank)
        outcome = (function(*args),)
    except ValueError as error:
        outcome = ValueError(str(error))
    except Exception as error:
        outcome = RankError(f"Rank {rank} failed: {type(error).__name__}: {error}")
        outcome.add_note(traceback.format_exc())
    connection.send_bytes(pickle.dumps(outcome))  # `send` passes tensors by files that end with this process
    if not isinstance(outcome, Exception):
        with suppress(RuntimeError):  # another rank's failure, which the parent hears from that rank
            torch.distributed.barrier()  # nobody hangs up while another still listens
            leave_group()


def _end_with_parent(connection: Connection) -> None:
    """The parent says nothing, so what arrives here is its end."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os._exit(1)
