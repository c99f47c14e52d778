"""A model's programs pass, fail or are stopped; whatever they do, nothing of it is left and nothing reaches outside."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

from rewired.evaluate.sandbox import Outcome, check_confinement, run_program

MIB = 1 << 20


@cache
def lacking() -> str:
    try:
        check_confinement()
    except ValueError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(lacking()), reason=lacking())
pytestmark = needs_sandbox


@pytest.fixture
def name() -> str:
    """One that nothing else on this machine has."""
    return f"rewired-{uuid.uuid4().hex}"


def outlived(name: str) -> list[psutil.Process]:
    """The processes on this machine that have `name` on their command line."""
    return [process for process in psutil.process_iter(["cmdline"]) if name in " ".join(process.info["cmdline"] or [])]


# what becomes of a program


def test_a_program_that_runs_to_its_end_passes() -> None:
    assert run_program("assert 2 + 3 == 5") == Outcome(True, "passed")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 2 - 3 == 5", "failed: AssertionError"),
        ("def add(a, b:", "failed: SyntaxError"),
        ("text = '\ud800'", "failed: UnicodeEncodeError"),
        ("def f(): f()\nf()", "failed: RecursionError"),
        ("input()", "failed: EOFError"),
        ("x = [0] * 10**12", "out of memory"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ],
)
def test_a_program_that_fails_says_how(program: str, reason: str) -> None:
    assert run_program(program) == Outcome(False, reason)


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        ("import sys; sys.exit(0)", "failed: SystemExit"),
        ("import os; os._exit(0)", "exited with status 0 before its end"),
        ("import os; os.execv('/bin/true', ['true'])", "exited with status 0 before its end"),
    ],
)
def test_leaving_before_the_test_is_not_passing(leave: str, reason: str) -> None:
    assert run_program(f"{leave}\nassert False") == Outcome(False, reason)


def test_a_program_cannot_claim_to_have_passed() -> None:
    claim = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"passed")
    except OSError:
        pass
os._exit(0)
"""
    assert run_program(claim) == Outcome(False, "exited with status 0 before its end")


def test_a_program_cannot_read_what_it_was_sent() -> None:
    """There, it would find what proves a verdict."""
    assert run_program("import os\nos.lseek(0, 0, os.SEEK_SET)\nassert not os.read(0, 1000)").passed


def test_replacing_what_reports_the_verdict_does_not_change_it() -> None:
    forge = """
import os
write = os.write
os.write = lambda descriptor, report: write(descriptor, report.replace(b"failed: AssertionError", b"passed"))
assert False
"""
    assert run_program(forge) == Outcome(False, "failed: AssertionError")


def test_a_main_guard_is_not_entered() -> None:
    """As with Hugging Face's `code_eval`: what models put there is often a demonstration that waits for input."""
    assert run_program("if __name__ == '__main__':\n    input()").passed


def test_sets_are_in_the_same_order_in_every_run() -> None:
    order = "raise type('|'.join({'wire', 'ladder', 'desync', 'partial'}), (Exception,), {})"
    assert len({run_program(order).reason for _ in range(3)}) == 1


def test_programs_may_use_threads() -> None:
    assert run_program("import threading\nthread = threading.Thread(target=list)\nthread.start()\nthread.join()").passed


# what it cannot exceed


@pytest.mark.parametrize("waste", ["while True: pass", "import time; time.sleep(60)", "while True: print('x' * 10**6)"])
def test_a_program_ends_with_its_time(waste: str) -> None:
    assert run_program(waste, seconds=1) == Outcome(False, "timed out after 1 s")


def test_memory_taken_in_small_pieces_ends_too() -> None:
    hoard = "hoard = []\nwhile True: hoard.append(bytes(10**5))"
    assert run_program(hoard, memory_bytes=256 * MIB) == Outcome(False, "out of memory")


def test_what_a_program_prints_is_not_kept() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run_program("for _ in range(300): print('x' * 10**6)").passed
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 100 * 1024


def test_a_flood_of_reports_is_cut_off() -> None:
    flood = "import os\nwhile True: os.write(3, b'x' * 1000)"
    assert run_program(flood, seconds=600) == Outcome(False, "killed by SIGKILL")


def test_a_file_cannot_grow_without_end() -> None:
    huge = "with open('huge', 'wb') as file:\n    for _ in range(100): file.write(bytes(10**6))"
    assert run_program(huge) == Outcome(False, "failed: OSError")
    assert run_program(huge.replace("100", "10")).passed


@pytest.mark.parametrize("folder", [".", "/dev/shm"])
def test_many_files_cannot_fill_the_memory(folder: str) -> None:
    many = f"for i in range(10):\n    with open(f'{folder}/{{i}}', 'wb') as file: file.write(bytes(10**7))"
    assert run_program(many) == Outcome(False, "failed: OSError")
    assert run_program(many.replace("10)", "5)")).passed


def test_a_program_starts_a_limited_number_of_processes() -> None:
    bomb = "import os, time\nwhile True:\n    if os.fork() == 0: time.sleep(60)"
    assert run_program(bomb) == Outcome(False, "failed: BlockingIOError")


def test_a_program_cannot_lift_its_limits() -> None:
    lift = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)"
    assert run_program(lift) == Outcome(False, "failed: ValueError")


@pytest.mark.parametrize("power", ["os.chroot('.')", "os.setuid(0)", "os.sethostname('x')", "os.nice(-5)"])
def test_a_program_has_no_powers_of_root(power: str) -> None:
    """As which containers often run."""
    program = f"import os, socket\nos.sethostname = socket.sethostname\n{power}"
    assert run_program(program) in (Outcome(False, "failed: PermissionError"), Outcome(False, "failed: OSError"))


# what is left of it


@pytest.mark.parametrize("end", ["", "time.sleep(60)", "assert False"])
def test_a_program_leaves_no_process_behind(end: str, name: str) -> None:
    """Not even one that left its session, and asked not to end with its parent."""
    leave = f"""
import ctypes, os, sys, time
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {name!r}])
time.sleep(0.5)
{end}
"""
    child = subprocess.Popen([sys.executable, "-c", "input()", name], stdin=subprocess.PIPE)
    assert [process.pid for process in outlived(name)] == [child.pid]
    child.communicate()
    run_program(leave, seconds=2)
    for left in outlived(name):
        left.wait(60)


def test_an_evaluation_that_is_killed_takes_its_programs_along(name: str) -> None:
    program = (
        f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', '{name}'])"
    )
    evaluation = f"from rewired.evaluate.sandbox import run_program\nrun_program({program!r}, seconds=600)"
    with subprocess.Popen([sys.executable, "-c", evaluation, "not-" + name[8:]]) as process:
        while not outlived(name):
            assert process.poll() is None
        process.kill()
    for left in outlived(name):
        left.wait(60)


def test_shared_memory_and_semaphores_end_with_the_program() -> None:
    """System V's are of no process, so that nothing but a namespace ends them."""
    take = """
import ctypes
libc = ctypes.CDLL(None)
assert libc.shmget(0, 1 << 20, 0o1666) >= 0 and libc.semget(0, 4, 0o1666) >= 0 and libc.msgget(0, 0o1666) >= 0
"""
    kinds = [Path("/proc/sysvipc", kind) for kind in ("shm", "sem", "msg")]
    before = [kind.read_text() for kind in kinds]
    assert run_program(take).passed
    assert [kind.read_text() for kind in kinds] == before


def test_a_key_ends_with_the_program(name: str) -> None:
    """One in the session's keyring would stay as long as the evaluation."""
    keys = Path("/proc/keys")
    if not keys.exists():
        pytest.skip("this kernel does not list its keys")
    number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    add = f"import ctypes\nassert ctypes.CDLL(None).syscall({number}, b'user', b'{name}', b'text', 4, -3) > 0"
    run_program(add)
    assert name not in keys.read_text()


def test_folders_nested_deeper_than_python_recurses_are_gone() -> None:
    assert run_program("import os\nfor _ in range(2000):\n    os.mkdir('a')\n    os.chdir('a')").passed
    assert run_program("import os\nassert os.listdir() == []").passed


# what it cannot reach


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_program_reaches_no_server(port: int) -> None:
    connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port})).close()"
    exec(connect)
    assert run_program(connect) == Outcome(False, "failed: ConnectionRefusedError")


@pytest.mark.parametrize("abstract", [True, False])
def test_a_program_reaches_no_socket_of_a_file_or_a_name(abstract: bool, name: str, tmp_path: Path) -> None:
    address = f"\0{name}" if abstract else str(tmp_path / "listener")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        send = f"from socket import *\nsocketpair(AF_UNIX, SOCK_DGRAM)[0].sendto(b'text', {address!r})"
        assert not run_program(send).passed
        exec(send.replace("socketpair(AF_UNIX, SOCK_DGRAM)[0]", "socket(AF_UNIX, SOCK_DGRAM)"))
        listener.settimeout(60)
        assert listener.recv(100) == b"text"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(100)


@pytest.mark.parametrize(
    "attempt",
    [
        "os.kill({pid}, 0)",
        "resource.prlimit({pid}, resource.RLIMIT_CPU, (100, 100))",
        "r, w = os.pipe(); fcntl.fcntl(r, 8, {pid})",
        "one, other = socket.socketpair(); fcntl.ioctl(one, 0x8901, struct.pack('i', {pid}))",
        "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "os.sched_setaffinity({pid}, os.sched_getaffinity(0))",
        "os.pidfd_open({pid})",
    ],
)
def test_a_program_finds_no_process_of_ours(attempt: str) -> None:
    """It may not become the one that a descriptor's signals go to, nor set another's limits."""
    program = f"import fcntl, os, resource, socket, struct\n{attempt}"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        exec(program.format(pid=bystander.pid))
        assert run_program(program.format(pid=bystander.pid)) == Outcome(False, "failed: ProcessLookupError")
        bystander.communicate()


def test_a_program_does_not_see_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", "/hf_secret")
    assert run_program("import os, sys\nassert 'hf_secret' not in f'{os.environ}{sys.path}'").passed


def test_a_program_has_an_empty_folder() -> None:
    look = """
import os, tempfile
assert os.listdir() == []
open("here", "w").write("text")
os.makedirs("deeper/still")
assert os.path.dirname(tempfile.mkdtemp()) == os.getcwd()
"""
    assert run_program(look) == Outcome(True, "passed")


@pytest.mark.parametrize(
    "harm",
    [
        "open({!r})",
        "open({!r}, 'w')",
        "__import__('os').truncate({!r}, 0)",
        "__import__('os').remove({!r})",
        "__import__('os').chmod({!r}, 0)",
        "__import__('os').setxattr({!r}, 'user.x', b'x')",
        "open({!r} + '.new', 'w')",
    ],
)
def test_a_program_finds_no_file_of_ours(harm: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.txt"
    file.write_text("ours")
    assert run_program(harm.format(str(file))) == Outcome(False, "failed: FileNotFoundError")
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(file, "ours")]


@pytest.mark.parametrize("path", [os.__file__, "/usr/new"])
def test_a_program_only_reads_what_it_sees_of_the_machine(path: str) -> None:
    assert run_program(f"open({path!r}, 'a')") in [
        Outcome(False, f"failed: {error}") for error in ("PermissionError", "OSError")
    ]


def test_a_program_keeps_its_devices_as_they_are() -> None:
    assert run_program("import os\nos.chmod('/dev/null', 0)") == Outcome(False, "failed: PermissionError")


def test_programs_run_side_by_side() -> None:
    wait = "import threading\nthreads = [threading.Thread(target=list) for _ in range(8)]\n[t.start() for t in threads]"
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda: outcomes.append(run_program(wait))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [Outcome(True, "passed")] * 8
