"""A sandbox for programs that a model wrote: each runs in a process that can do little harm, and passes or fails.

Bubblewrap makes it. A program sees Python, the system's libraries and an empty folder of 64 MiB in memory; it has a
network, processes and shared memory of its own, and all of it ends with its time. `inside_sandbox.py` limits its
processes, the memory of each and the size of a file.

A program may still pass falsely, with results that equal everything or with the token of its verdict, which the
interpreter's frames hold; and it may exploit holes in the kernel.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import inside_sandbox

_REPORT_BYTES = 4096
_FOLDER_BYTES = 64 << 20
_FOLDER = "/program"
_SHARED_MEMORY = "/dev/shm"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_RUN = "/run.py"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program; its reason is "passed", "failed: AssertionError", "timed out after 10 s", ..."""

    passed: bool
    reason: str


def run_program(program: str, seconds: float = 10.0, memory_bytes: int = 1 << 30) -> Outcome:
    """Run `program` in the sandbox. It passes if it reaches its end; exiting before, even with status 0, is a failure.

    `memory_bytes` limits its address space. Raises ValueError, and runs nothing, where there is no sandbox.
    """
    check_sandbox()
    token = secrets.token_hex(16).encode()  # it proves that the verdict is ours and not the program's
    cpu_seconds = math.ceil(seconds) + 1  # threads may use more than `seconds`
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryFile() as order:
        order.write(b"%s\n%d\n%d\n" % (token, memory_bytes, cpu_seconds) + program.encode("utf-8", "surrogatepass"))
        order.seek(0)
        with subprocess.Popen(
            [*_bubblewrap(), sys.executable, "-s", "-P", _RUN],
            stdin=order,
            stdout=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches only this process, which ends its programs
        ) as process:
            try:
                report, late = _listen(process, deadline)
            finally:
                process.kill()  # and the kernel all that the program started
    return _outcome(report, token, process.returncode, late, seconds)


@cache
def check_sandbox() -> None:
    """Raise ValueError where this machine cannot confine a program."""
    if lacking := _lacking():
        raise ValueError(
            f"This machine cannot confine the programs that a model writes, so none is run: {lacking}, or leave out "
            "the tasks that need --run-model-code."
        )


def _lacking() -> str | None:
    if sys.platform != "linux":
        return "run this benchmark on Linux"
    if shutil.which("bwrap") is None:
        return "install bubblewrap (`apt install bubblewrap` or `dnf install bubblewrap`)"
    command = [*_bubblewrap(), sys.executable, "-s", "-P", "-c", ""]
    trial = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if trial.returncode:
        return f"make bubblewrap 0.7 or newer work here (it says {trial.stderr.strip()!r}; containers often forbid it)"
    return None


def _bubblewrap() -> list[str]:
    """The start of a command line that runs the rest of it in the sandbox."""
    change_user = (
        "--cap-add",
        "CAP_SETUID",
        "--cap-add",
        "CAP_SETGID",
    )  # as root is exempt from the limit on processes
    user = change_user if os.getuid() == 0 else ("--unshare-user",)
    apart = ["ipc", "pid", "net", "uts", "cgroup-try"]
    seen = [*_SYSTEM, sys.base_prefix, sys.prefix, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    read = [path for path in map(Path, seen) if path.is_absolute()]
    return [
        "bwrap",
        *(f"--unshare-{namespace}" for namespace in apart),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", *user),
        *("--size", str(_FOLDER_BYTES), "--tmpfs", "/"),
        *("--perms", "0777", "--dir", _FOLDER, "--perms", "1777", "--dir", _SHARED_MEMORY),
        *(part for device in _DEVICES for part in ("--dev-bind", device, device)),
        *(part for path in read for part in _read_only(path)),
        *("--ro-bind", inside_sandbox.__file__, _RUN, "--chdir", _FOLDER, "--"),
    ]


def _read_only(path: Path) -> list[str]:
    above = [part for parent in reversed(path.parents[:-1]) for part in ("--perms", "0755", "--dir", str(parent))]
    return [*above, "--ro-bind-try", str(path), str(path)]


def _environment() -> dict[str, str]:
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
    return needed | {
        "TMPDIR": _FOLDER,
        "PYTHONHASHSEED": "0",  # so that a program that depends on the order of a set is deterministic
        "OMP_NUM_THREADS": "1",  # NumPy's threads would take most of the address space
    }


def _listen(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bool]:
    """The process's report, complete or as far as it came by the deadline, and whether that came first."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    report = b""
    while len(report) < _REPORT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return report, True
        chunk = os.read(process.stdout.fileno(), _REPORT_BYTES)
        if not chunk:
            return report, not _ends(process, deadline)
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
    if late:
        return Outcome(False, f"timed out after {seconds:g} s")
    if not report:
        raise ValueError(
            f"The sandbox did not start (exit status {status}), so a program was not run: see its error above."
        )
    number = -status if status < 0 else status - 128  # of bubblewrap itself, or as it says it of the program
    name = next((known.name for known in signal.Signals if known == number), None)
    return Outcome(False, f"killed by {name}" if name else f"exited with status {status} before its end")
