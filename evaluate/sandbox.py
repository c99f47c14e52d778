"""A sandbox for programs that a model wrote: each runs in a process that can do little harm, and passes or fails.

`confinement.py` says what it sees and how it is confined; all of it ends with its time. `inside_sandbox.py` limits its
processes, the memory of each and the size of a file.

A program may still pass falsely, with results that equal everything or with the token of its verdict, which the
interpreter's frames hold; and it may exploit holes in the kernel.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass

from .confinement import RUN, check_confinement, confined

_REPORT_BYTES = 4096
_START_SECONDS = 60


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program; its reason is "passed", "failed: AssertionError", "timed out after 10 s", ..."""

    passed: bool
    reason: str


def run_program(program: str, seconds: float = 10.0, memory_bytes: int = 1 << 30) -> Outcome:
    """Run `program` in the sandbox. It passes if it reaches its end; exiting before, even with status 0, is a failure.

    `memory_bytes` limits its address space. Raises ValueError, and runs nothing, where there is no sandbox.
    """
    check_confinement()
    token = secrets.token_hex(16).encode()  # it proves that the verdict is ours and not the program's
    cpu_seconds = math.ceil(seconds) + 1  # threads may use more than `seconds`
    with tempfile.TemporaryFile() as order:
        order.write(b"%s\n%d\n%d\n" % (token, memory_bytes, cpu_seconds) + program.encode("utf-8", "surrogatepass"))
        order.seek(0)
        with subprocess.Popen(
            confined("-s", "-P", RUN),
            stdin=order,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends its programs
        ) as process:
            try:
                report, late = _listen(process, seconds)
            finally:
                process.kill()
    return _outcome(report, token, process.returncode, late, seconds)


def _listen(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
    """The process's report, complete or as far as it came, and whether the program took more than `seconds`."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    report, deadline = b"", time.monotonic() + _START_SECONDS
    while len(report) < _REPORT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return report, True
        chunk = os.read(process.stdout.fileno(), _REPORT_BYTES)
        if not chunk:
            return report, not _ends(process, deadline)
        if not report:  # the program's time begins when it does
            deadline = time.monotonic() + seconds
        report += chunk
    return report, False


def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return False
    return True


def _outcome(report: bytes, token: bytes, status: int, late: bool, seconds: float) -> Outcome:
    _, verdict, reason = report.partition(token)
    if verdict:
        return Outcome(reason == b"passed", reason.decode(errors="replace"))
    if not report:
        raise ValueError(
            f"The sandbox did not start (exit status {status}), so a program was not run: see its error above."
        )
    if late:
        return Outcome(False, f"timed out after {seconds:g} s")
    number = -status if status < 0 else status - 128  # of bubblewrap itself, or as it says it of the program
    name = next((known.name for known in signal.Signals if known == number), None)
    return Outcome(False, f"killed by {name}" if name else f"exited with status {status} before its end")
