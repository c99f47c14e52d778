"""A sandbox for programs that a model wrote: each runs in a process that can do little harm, and passes or fails.

A program gets an empty folder, deleted afterwards, and limits on time, memory and the size of a file. It cannot open a
socket, start a process or signal one; where the kernel has Landlock (most since Linux 5.13) it can write only to its
folder. The kernel enforces this by seccomp, which needs no privileges and works in containers, too.

The sandbox guards against accidents and cheap tricks. It does not stop a program from reading the user's files (which
it can send nowhere), changing their modes and times, or, without Landlock, writing to them; from filling the disk with
many files until its time is up; from passing falsely, with results that equal everything or with the token of its
verdict, which the interpreter's frames hold; nor from exploiting holes in the kernel.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from typing import Any

from . import confinement
from .confinement import MACHINES, libc

_REPORT_BYTES = 4096


@contextmanager
def sandbox_for_code_eval() -> Iterator[None]:
    """Within it, `evaluate.load("code_eval")` of Hugging Face's package returns our sandbox.

    The harness's tasks that run code (HumanEval, MBPP, ...) load that metric while their modules are imported, with no
    setting for another. It is a script from the hub, which runs programs next to us and guards against little. So the
    function is replaced while tasks load, here and nowhere else.
    """
    hugging_face_evaluate: Any = import_module("evaluate")  # `import evaluate` would be this folder to mypy
    load = hugging_face_evaluate.load

    def load_or_sandbox(name: str, *args: Any, **options: Any) -> Any:
        return CodeEval() if name == "code_eval" else load(name, *args, **options)

    hugging_face_evaluate.load = load_or_sandbox
    try:
        yield
    finally:
        hugging_face_evaluate.load = load


class CodeEval:
    """Hugging Face's metric `code_eval`, computed in our sandbox."""

    def compute(
        self, references: list[str], predictions: list[list[str]], k: list[int]
    ) -> tuple[dict[str, float], dict[int, list[Outcome]]]:
        """pass@k, averaged over the problems, and the outcomes of each problem's programs.

        A reference is the test that the candidates of its problem must pass. A k above the smallest number of
        candidates is left out.
        """
        programs = [
            [f"{candidate}\n{test}" for candidate in candidates]
            for test, candidates in zip(references, predictions, strict=True)
        ]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            finished = pool.map(run_program, chain.from_iterable(programs))
            outcomes = {problem: list(islice(finished, len(row))) for problem, row in enumerate(programs)}
        fewest = min(map(len, programs), default=0)
        return {f"pass@{size}": _mean_pass_at_k(outcomes, size) for size in k if size <= fewest}, outcomes


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program; its reason is "passed", "failed: AssertionError", "timed out after 10 s", ..."""

    passed: bool
    reason: str


def _mean_pass_at_k(outcomes: dict[int, list[Outcome]], k: int) -> float:
    estimates = [pass_at_k(len(row), sum(outcome.passed for outcome in row), k) for row in outcomes.values()]
    return sum(estimates) / len(estimates)


def pass_at_k(candidates: int, passing: int, k: int) -> float:
    """The probability that one of k candidates, drawn without replacement, passes (arXiv 2107.03374, equation 1)."""
    return 1 - math.comb(candidates - passing, k) / math.comb(candidates, k)


def run_program(program: str, seconds: float = 10.0, memory_bytes: int = 1 << 30) -> Outcome:
    """Run `program` in the sandbox. It passes if it reaches its end; exiting before, even with status 0, is a failure.

    `memory_bytes` limits its address space. Raises ValueError, and runs nothing, where there is no sandbox.
    """
    check_sandbox()
    token = secrets.token_hex(16).encode()  # it proves that the verdict is ours and not the program's
    header = b"%s\n%d\n%d\n" % (
        token,
        memory_bytes,
        math.ceil(seconds) + 1,
    )  # CPU time: threads may use more than `seconds`
    deadline = time.monotonic() + seconds
    with _temporary_folder() as folder, tempfile.TemporaryFile() as order:
        order.write(header + program.encode("utf-8", "surrogatepass"))
        order.seek(0)
        with subprocess.Popen(
            [sys.executable, "-s", "-P", confinement.__file__],
            stdin=order,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,  # Ctrl-C reaches only this process, which ends its programs
        ) as process:
            try:
                report = _listen(process, deadline)
                late = time.monotonic() >= deadline
            finally:
                process.kill()  # nothing is left behind: a program has no child processes
    return _outcome(report, token, process.returncode, late, seconds)


def check_sandbox() -> None:
    """Raise ValueError where this machine cannot confine a program."""
    if sys.platform != "linux" or os.uname().machine not in MACHINES or not _filters_system_calls():
        raise ValueError(
            "This machine cannot confine the programs that a model writes, so none is run: "
            "run this benchmark on 64-bit Linux (x86_64 or aarch64) whose kernel offers seccomp filters."
        )


def _filters_system_calls() -> bool:
    try:
        libc("prctl", 22, 2, None, 0, 0)  # PR_SET_SECCOMP without a filter: a kernel that knows filters misses it
    except OSError as error:
        return error.errno == errno.EFAULT
    return False


@contextmanager
def _temporary_folder() -> Iterator[str]:
    temporary = tempfile.TemporaryDirectory(prefix="rewired-", ignore_cleanup_errors=True)
    try:
        yield temporary.name
    finally:
        try:
            temporary.cleanup()
        except RecursionError:  # before Python 3.13, of folders nested a thousand deep
            subprocess.run(["rm", "-rf", temporary.name], check=False)


def _environment(folder: str) -> dict[str, str]:
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return needed | {
        "TMPDIR": folder,
        "PYTHONHASHSEED": "0",  # so that a program that depends on the order of a set is deterministic
        "OMP_NUM_THREADS": "1",  # NumPy's threads would take most of the address space
    }


def _listen(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The process's report; returns when it has ended or reported too much, or at the deadline."""
    assert process.stdout is not None
    report = b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(report) < _REPORT_BYTES and (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            chunk = os.read(process.stdout.fileno(), _REPORT_BYTES)
            report += chunk
            if not chunk:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(left)
                break
    return report


def _outcome(report: bytes, token: bytes, status: int, late: bool, seconds: float) -> Outcome:
    _, verdict, reason = report.partition(token)
    if verdict:
        return Outcome(reason == b"passed", reason.decode(errors="replace"))
    if late:
        return Outcome(False, f"timed out after {seconds:g} s")
    if not report:
        raise ValueError(
            f"The sandbox did not start (exit status {status}), so a program was not run: see its error above."
        )
    if status < 0:
        name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
        return Outcome(False, f"killed by {name}")
    return Outcome(False, f"exited with status {status} before its end")
