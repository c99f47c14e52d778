"""What confines a program that a model wrote: bubblewrap.

A program sees Python, the system's libraries and an empty folder of 64 MiB in memory; it has a network, processes and
shared memory of its own, and no capability. All that it started ends with the process that confines it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from . import inside_sandbox

RUN = "/run.py"  # `inside_sandbox.py`, as a program finds it
_FOLDER = "/program"
_FOLDER_BYTES = 64 << 20
_SHARED_MEMORY = "/dev/shm"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")


def confined(*arguments: str) -> list[str]:
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
        *("--ro-bind", inside_sandbox.__file__, RUN, "--chdir", _FOLDER, "--", sys.executable, *arguments),
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
    trial = subprocess.run(confined("-c", ""), capture_output=True, text=True, check=False)
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
