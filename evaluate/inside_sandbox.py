"""What runs in the sandbox: it limits its own resources, runs the program that it reads, and reports the verdict.

`sandbox.py` starts it. It imports nothing of ours and little else, since it starts once for each program.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

_NOBODY = 65534
_FILE_BYTES = 16 << 20
_OPEN_FILES = 64
_PROCESSES = 256
_KEYCTL = {"x86_64": 250, "aarch64": 219}


def run() -> None:
    """Read a token, limits and a program from stdin; answer with a dot, then the token and "passed" or what failed."""
    token, memory_bytes, cpu_seconds, program = sys.stdin.buffer.read().split(b"\n", 3)
    verdict = os.dup(sys.stdout.fileno())
    write, leave = os.write, os._exit  # the program may replace them
    _leave_the_keys()
    _become_nobody()
    _limit_resources(int(memory_bytes), int(cpu_seconds))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    write(verdict, b".")  # from here on, an end without a verdict is the program's doing
    this = os.getpid()
    try:
        source = program.decode("utf-8", "surrogatepass")
        exec(compile(source, "<program>", "exec", dont_inherit=True), {})
        reason = b"passed"
    except MemoryError:
        reason = b"out of memory"
    except BaseException as error:
        reason = f"failed: {type(error).__name__}".encode(errors="replace")
    if os.getpid() == this:  # a child of the program has no say
        write(verdict, token + reason)
    leave(0)


def _leave_the_keys() -> None:
    """Take an empty keyring instead of the session's: keyrings are in no namespace, and outlive a program."""
    if (number := _KEYCTL.get(os.uname().machine)) is not None:
        ctypes.CDLL(None).syscall(number, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING


def _become_nobody() -> None:
    """Root is exempt from the limit on processes."""
    with suppress(OSError):
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def _limit_resources(memory_bytes: int, cpu_seconds: int) -> None:
    import resource  # does not exist on Windows

    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_NPROC: _PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    run()
