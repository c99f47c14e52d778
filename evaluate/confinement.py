"""The process that confines itself and then runs a model's program; `code_execution.py` starts it.

It imports nothing of ours and little else, since it starts once for each program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import Any

_FILE_BYTES = 16 << 20
_OPEN_FILES = 64

MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
_CLONE = (56, 220)
_CLONE3 = 435
_DENIED_IF = {  # system call on each machine -> the argument looked at, and its values that are denied
    "fcntl": ((72, 25), 1, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: they send signals to anyone
    "ioctl": ((16, 29), 1, (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP: so do they
}
_PRLIMIT = (302, 261)  # allowed on oneself, who is process 0
_DENIED = {  # the number of each system call on each of the machines
    "socket": (41, 198),
    "io_uring_setup": (425, 425),  # it opens sockets past this very filter
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
}


def run_confined() -> None:
    """Confine this process, run the program and report the verdict."""
    token, memory_bytes, cpu_seconds, program = sys.stdin.buffer.read().split(b"\n", 3)
    verdict = os.dup(sys.stdout.fileno())
    write, leave = os.write, os._exit  # the program may replace them
    _confine(int(memory_bytes), int(cpu_seconds))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    write(verdict, b".")  # from here on, an end without a verdict is the program's doing
    try:
        source = program.decode("utf-8", "surrogatepass")
        exec(compile(source, "<program>", "exec", dont_inherit=True), {})
        reason = b"passed"
    except MemoryError:
        reason = b"out of memory"
    except BaseException as error:
        reason = f"failed: {type(error).__name__}".encode(errors="replace")
    write(verdict, token + reason)
    leave(0)


def _confine(memory_bytes: int, cpu_seconds: int) -> None:
    _limit_resources(memory_bytes, cpu_seconds)
    libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: nothing of ours outlives us
    libc("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which the rest requires
    _write_only_here()
    _drop_capabilities()
    _filter_system_calls()


def _limit_resources(memory_bytes: int, cpu_seconds: int) -> None:
    import resource  # does not exist on Windows

    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (value, value))


def _write_only_here() -> None:
    """Let this process write only below its working directory, and to /dev/null, where the kernel has Landlock."""
    create, add_rule, restrict = 444, 445, 446
    try:
        version = libc("syscall", create, None, 0, 1)
    except OSError:
        return
    writing = 0x7FF2 & ((1 << 12 + min(version, 3)) - 1)  # LANDLOCK_ACCESS_FS_* that this version knows
    rules = libc("syscall", create, struct.pack("Q", writing), 8, 0)
    for path, allowed in ((".", writing), (os.devnull, writing & 0x4002)):  # WRITE_FILE and TRUNCATE
        rule = struct.pack("=Qi", allowed, os.open(path, os.O_PATH))
        libc("syscall", add_rule, rules, 1, rule, 0)
    libc("syscall", restrict, rules, 0)


def _drop_capabilities() -> None:
    """Drop all of root's capabilities but CAP_DAC_READ_SEARCH: Python may be installed where root owns nothing."""
    header = struct.pack("Ii", 0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc("capget", header, sets)
    read_search = 1 << 2
    libc("capset", header, (ctypes.c_uint32 * 6)(sets[0] & read_search, sets[1] & read_search, 0, 0, 0, 0))


def _filter_system_calls() -> None:
    """Let the kernel refuse the calls in `_DENIED`, and those that start processes, but not threads."""
    steps = _filter(MACHINES.index(os.uname().machine))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    libc("prctl", 22, 2, struct.pack("HP", len(steps), ctypes.addressof(code)), 0, 0)  # PR_SET_SECCOMP
    with suppress(PermissionError):
        libc("socket", 1, 1, 0)
        raise OSError("the filter of system calls has no effect")


def _filter(machine: int) -> list[tuple[int, int, int, int]]:
    """The seccomp filter for one of MACHINES: operation, steps to skip if it holds, steps to skip if not, operand."""
    load, equals, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, fail = 0x80000000, 0x7FFF0000, 0x00050000
    steps = [
        (load, 0, 0, 4),
        (equals, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (answer, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # the x32 calls, which repeat all others
        (answer, 0, 0, kill),
    ]
    for numbers in _DENIED.values():
        if (number := numbers[machine]) is not None:
            steps += [(equals, 0, 1, number), (answer, 0, 0, fail | errno.EPERM)]
    for calls, argument, values in _DENIED_IF.values():
        steps += [(equals, 0, 2 * len(values) + 2, calls[machine]), (load, 0, 0, 16 + 8 * argument)]
        for value in values:
            steps += [(equals, 0, 1, value), (answer, 0, 0, fail | errno.EPERM)]
        steps.append((answer, 0, 0, allow))
    prlimit = [(load, 0, 0, 16), (equals, 1, 0, 0), (answer, 0, 0, fail | errno.EPERM), (answer, 0, 0, allow)]
    clone3 = [(answer, 0, 0, fail | errno.ENOSYS)]  # a filter cannot see its flags; without it, libc takes clone
    is_thread = (has_bits, 1, 0, 0x00010000)  # CLONE_THREAD
    clone = [(load, 0, 0, 16), is_thread, (answer, 0, 0, fail | errno.EPERM), (answer, 0, 0, allow)]
    for number, handled in ((_PRLIMIT[machine], prlimit), (_CLONE3, clone3), (_CLONE[machine], clone)):
        steps += [(equals, 0, len(handled), number), *handled]
    return [*steps, (answer, 0, 0, allow)]


def libc(function: str, *arguments: Any) -> int:
    result: int = getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{function}{arguments} failed")
    return result


if __name__ == "__main__":
    run_confined()
