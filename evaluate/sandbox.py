"""A sandbox for programs that a model wrote: each runs in a process that can do little harm, and passes or fails.

Bubblewrap confines it. A program sees Python, the system's libraries and an empty folder of 64 MiB in memory; it has a
network, processes and shared memory of its own, and no capability. All that it started ends with its time.
`inside_sandbox.py` limits its processes, the memory of each and the size of a file.

A program may still pass falsely, with results that equal everything or with the token of its verdict, which the
interpreter's frames hold; and it may exploit holes in the kernel.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Timer

from . import inside_sandbox

_REPORT_BYTES = 4096
_START_SECONDS = 60
_RUN = "/run.py"  # `inside_sandbox.py`, as a program finds it
_FOLDER = "/program"
_FOLDER_BYTES = 64 << 20
_SHARED_MEMORY = "/dev/shm"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")


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
            _confined("-s", "-P", _RUN),
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
    starting, running = Timer(_START_SECONDS, process.kill), Timer(seconds, process.kill)
    try:
        starting.start()
        report = process.stdout.read(1)
        starting.cancel()
        started = time.monotonic()  # before the timer's own time begins, which may take a busy machine a while
        running.start()  # the program's time begins when it does
        report += process.stdout.read(_REPORT_BYTES)
        if len(report) > _REPORT_BYTES:
            process.kill()
        process.wait()
        return report, time.monotonic() - started >= seconds
    finally:
        starting.cancel()
        running.cancel()


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


def _confined(*arguments: str) -> list[str]:
    """The command that runs this Python with these arguments, confined."""
    as_root = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")  # root is exempt from the limit on processes
    return [
        "bwrap",
        *(f"--unshare-{namespace}" for namespace in ("ipc", "pid", "net", "uts", "cgroup-try")),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *(as_root if os.getuid() == 0 else ("--unshare-user",)),
        *("--clearenv", *(part for item in _environment().items() for part in ("--setenv", *item))),
        *("--size", str(_FOLDER_BYTES), "--tmpfs", "/"),
        *("--perms", "0777", "--dir", _FOLDER, "--perms", "1777", "--dir", _SHARED_MEMORY),
        *(part for device in _DEVICES for part in ("--dev-bind", device, device)),
        *(part for path in _read() for part in _read_only(path)),
        *("--ro-bind", inside_sandbox.__file__, _RUN, "--chdir", _FOLDER, "--", sys.executable, *arguments),
    ]


@cache
def check_confinement() -> None:
    """Raise ValueError where this machine cannot confine a program."""
    if advice := _lacking():
        raise ValueError(
            f"This machine cannot confine the programs that a model writes, so none is run: {advice}, or leave out the "
            "tasks that need --run-model-code."
        )


def _lacking() -> str | None:
    if sys.platform != "linux":
        return "run this benchmark on Linux"
    if not shutil.which("bwrap"):
        return "install bubblewrap (`apt install bubblewrap` or `dnf install bubblewrap`)"
    trial = subprocess.run(_confined("-c", ""), capture_output=True, text=True, check=False)
    if trial.returncode:
        error = trial.stderr.strip() or "nothing"
        return f"make bubblewrap 0.7 or newer work here (it says {error!r}; containers often forbid it)"
    return None


def _environment() -> dict[str, str]:
    needed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in os.environ}
    return needed | {
        "TMPDIR": _FOLDER,
        "PYTHONHASHSEED": "0",  # so that a program that depends on the order of a set is deterministic
        "OMP_NUM_THREADS": "1",  # NumPy's threads would take most of the address space
    }


def _read() -> list[Path]:
    """What a program may read of the machine."""
    paths = [*_SYSTEM, sys.base_prefix, sys.prefix, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    return list(dict.fromkeys(path for path in map(Path, paths) if path.is_absolute()))


def _read_only(path: Path) -> list[str]:
    above = [part for parent in reversed(path.parents[:-1]) for part in ("--perms", "0755", "--dir", str(parent))]
    return [*above, "--ro-bind-try", str(path), str(path)]
