"""What confines a program that a model wrote: bubblewrap or, where that does not work, a container of podman.

In both, a program sees Python, the system's libraries and an empty folder of 64 MiB in memory; it has a network,
processes and shared memory of its own, and no capability. Podman needs no image, no daemon and no root.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from . import inside_sandbox

_FOLDER = "/program"
_FOLDER_BYTES = 64 << 20
_SHARED_MEMORY = "/dev/shm"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_RUN = "/run.py"
_PYTHON = (sys.executable, "-s", "-P", _RUN)
_NOBODY = "65534:65534"


class Bubblewrap:
    name = "bwrap"
    advice = "make bubblewrap 0.7 or newer work here"

    def command(self, run: str, seconds: float) -> list[str]:
        """Run `_RUN`, confined. It ends with this process, so that `run`, its name, and its time are not needed."""
        as_root = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")  # root is exempt from the limit on processes
        return [
            self.name,
            *(f"--unshare-{namespace}" for namespace in ("ipc", "pid", "net", "uts", "cgroup-try")),
            *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *(as_root if os.getuid() == 0 else ("--unshare-user",)),
            *("--clearenv", *(part for item in _environment().items() for part in ("--setenv", *item))),
            *("--size", str(_FOLDER_BYTES), "--tmpfs", "/"),
            *("--perms", "0777", "--dir", _FOLDER, "--perms", "1777", "--dir", _SHARED_MEMORY),
            *(part for device in _DEVICES for part in ("--dev-bind", device, device)),
            *(part for path in _read() for part in _read_only(path)),
            *("--ro-bind", inside_sandbox.__file__, _RUN, "--chdir", _FOLDER, "--", *_PYTHON),
        ]

    def end(self, run: str) -> None:
        """The kernel ends all that a killed command started."""


class Podman:
    name = "podman"
    advice = "make podman work here"

    def command(self, run: str, seconds: float) -> list[str]:
        """Run `_RUN`, confined, in a container called `run`, which lasts for `seconds` even if this process ends."""
        return [
            *(self.name, "run", "--rm", "--interactive", "--name", run, "--timeout", str(math.ceil(seconds))),
            *("--network", "none", "--no-hosts", "--ipc", "private", "--shm-size", str(_FOLDER_BYTES)),
            *("--user", _NOBODY, "--cap-drop", "all", "--security-opt", "no-new-privileges"),
            *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"),  # `inside_sandbox` sets less
            *("--log-driver", "none", "--http-proxy=false"),
            *(f"--env={name}={value}" for name, value in _environment().items()),
            *("--read-only", "--read-only-tmpfs=false"),
            *("--tmpfs", f"{_FOLDER}:rw,size={_FOLDER_BYTES},U", "--workdir", _FOLDER),
            *(f"--volume={path}:{path}:ro" for path in _read() if path.exists()),
            *(f"--volume={inside_sandbox.__file__}:{_RUN}:ro", "--rootfs", _empty_root(), *_PYTHON),
        ]

    def end(self, run: str) -> None:
        subprocess.run([self.name, "rm", "--force", "--time", "0", run], capture_output=True, check=False)


@cache
def confinement() -> Bubblewrap | Podman:
    """What works on this machine. Raises ValueError where nothing does."""
    if sys.platform != "linux":
        raise _nothing_confines("run this benchmark on Linux")
    advice = "install bubblewrap (`apt install bubblewrap` or `dnf install bubblewrap`)"
    for each in (Bubblewrap(), Podman()):
        if shutil.which(each.name):
            error = error_of(each)
            if not error:
                return each
            advice = f"{each.advice} (it says {error!r}; containers often forbid it)"
    raise _nothing_confines(advice)


def _nothing_confines(advice: str) -> ValueError:
    return ValueError(
        f"This machine cannot confine the programs that a model writes, so none is run: {advice}, or leave out the "
        "tasks that need --run-model-code."
    )


def error_of(confinement: Bubblewrap | Podman) -> str:
    """What it says where it does not work here; else nothing."""
    command = confinement.command(f"rewired-{os.getpid()}", seconds=60)
    command[-len(_PYTHON) :] = [sys.executable, "-c", ""]
    trial = subprocess.run(command, capture_output=True, text=True, check=False)
    return (trial.stderr.strip() or "nothing") if trial.returncode else ""


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


@cache
def _empty_root() -> str:
    """A folder in which containers find nothing but what is mounted."""
    folder = tempfile.mkdtemp(prefix="rewired-root-")
    Path(folder).chmod(0o755)  # nobody walks through it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
