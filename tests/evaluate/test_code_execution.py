"""A model's programs pass, fail or are stopped; whatever they do, it stays in their folder and ends with their time."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import psutil
import pytest

from rewired.evaluate import confinement
from rewired.evaluate.code_execution import CodeEval, Outcome, check_sandbox, pass_at_k, run_program

MIB = 1 << 20
ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
TEST_ADD = "assert add(2, 3) == 5"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folders of this test's programs are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest stumbles over folders nested too deep


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def processes_in(folder: Path) -> list[psutil.Process]:
    """Also those that left their parent and their session; the working directory they keep."""
    return [process for process in psutil.process_iter(["cwd"]) if str(folder) in (process.info["cwd"] or "")]


# what becomes of a program


def test_a_program_that_runs_to_its_end_passes() -> None:
    assert run_program(f"{ADD}\n{TEST_ADD}") == Outcome(True, "passed")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (f"{SUBTRACT}\n{TEST_ADD}", "failed: AssertionError"),
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
def test_a_program_ends_with_its_time_and_leaves_nothing(waste: str, workplace: Path) -> None:
    start = time.monotonic()
    assert run_program(waste, seconds=1) == Outcome(False, "timed out after 1 s")
    assert time.monotonic() - start < 3
    assert not processes_in(workplace)
    assert not list(workplace.iterdir())


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
    start = time.monotonic()
    assert run_program(flood) == Outcome(False, "killed by SIGKILL")
    assert time.monotonic() - start < 5


def test_a_file_cannot_grow_without_end() -> None:
    huge = "with open('huge', 'wb') as file:\n    for _ in range(100): file.write(bytes(10**6))"
    assert run_program(huge) == Outcome(False, "failed: OSError")
    assert run_program(huge.replace("100", "10")).passed


def test_a_program_cannot_lift_its_limits() -> None:
    lift = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)"
    assert run_program(lift) == Outcome(False, "failed: ValueError")


def test_a_program_has_no_powers_of_root() -> None:
    """As which containers often run."""
    assert run_program("import os\nos.chroot('.')") == Outcome(False, "failed: PermissionError")


# what it cannot reach


def test_a_program_leaves_no_child_behind(workplace: Path) -> None:
    escape = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(20)
time.sleep(0.2)
"""
    assert run_program(escape) == Outcome(False, "failed: PermissionError")
    assert not processes_in(workplace)


@pytest.mark.parametrize("start", ["subprocess.run(['true'])", "os.system('true') == 0"])
def test_a_program_starts_no_other(start: str) -> None:
    program = f"import os, subprocess\nassert {start}"
    exec(program)
    assert not run_program(program).passed


def test_a_program_reaches_no_server(port: int) -> None:
    connect = f"import socket\nsocket.create_connection(('127.0.0.1', {port})).close()"
    exec(connect)
    assert run_program(connect) == Outcome(False, "failed: PermissionError")


@pytest.mark.parametrize("kind", ["AF_INET, SOCK_STREAM", "AF_INET, SOCK_DGRAM", "AF_UNIX, SOCK_STREAM"])
def test_a_program_opens_no_socket(kind: str) -> None:
    """So it asks no name server either."""
    program = f"from socket import *\nsocket({kind}).close()"
    exec(program)
    assert run_program(program) == Outcome(False, "failed: PermissionError")


def test_a_program_signals_no_process() -> None:
    signal = f"import os\nos.kill({os.getpid()}, 0)"
    exec(signal)
    assert run_program(signal) == Outcome(False, "failed: PermissionError")


def test_a_program_does_not_see_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", "/hf_secret")
    look = "import os, sys\nassert 'hf_secret' not in f'{os.environ}{sys.path}{open(\"/proc/self/environ\").read()}'"
    assert run_program(look).passed


def test_a_program_has_an_empty_folder_which_is_then_deleted(workplace: Path) -> None:
    look = f"""
import os, tempfile
assert os.path.dirname(os.getcwd()) == {str(workplace)!r} and os.listdir() == []
open("here", "w").write("text")
os.makedirs("deeper/still")
assert os.path.dirname(tempfile.mkdtemp()) == os.getcwd()
"""
    assert run_program(look) == Outcome(True, "passed")
    assert not list(workplace.iterdir())


def test_folders_nested_deeper_than_python_recurses_are_deleted_too(workplace: Path) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    try:
        assert run_program("import os\nfor _ in range(300):\n    os.mkdir('a')\n    os.chdir('a')").passed
    finally:
        sys.setrecursionlimit(limit)
    assert not list(workplace.iterdir())


@pytest.mark.parametrize("harm", ["open({!r}, 'w')", "__import__('os').remove({!r})", "open({!r} + '.new', 'w')"])
def test_a_program_writes_nowhere_but_in_its_folder(harm: str, tmp_path: Path) -> None:
    if not has_landlock():
        pytest.skip("this kernel has no Landlock")
    file = tmp_path / "ours.txt"
    file.write_text("ours")
    assert run_program(harm.format(str(file))) == Outcome(False, "failed: PermissionError")
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(file, "ours")]


def has_landlock() -> bool:
    try:
        return confinement.libc("syscall", 444, None, 0, 1) > 0
    except OSError:
        return False


# where it cannot be confined


@pytest.mark.parametrize("target", ["sys.platform", "os.uname", "_filters_system_calls"])
def test_nothing_runs_where_there_is_no_sandbox(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {
        "sys.platform": "darwin",
        "os.uname": lambda: os.uname_result(("Linux", "host", "6", "1", "riscv64")),
        "_filters_system_calls": lambda: False,
    }
    monkeypatch.setattr(f"rewired.evaluate.code_execution.{target}", lacking[target])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match="cannot confine the programs"):
        check_sandbox()
    with pytest.raises(ValueError, match="cannot confine the programs"):
        CodeEval().compute(references=[TEST_ADD], predictions=[[ADD]], k=[1])


def test_a_sandbox_that_does_not_start_is_no_failure_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"did not start \(exit status 1\)"):
        run_program("")


# pass@k


@pytest.mark.parametrize("passing", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_with_a_passing_candidate(passing: int, k: int) -> None:
    draws = list(combinations([True] * passing + [False] * (5 - passing), k))
    assert pass_at_k(5, passing, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_averaged_over_problems() -> None:
    scores, outcomes = CodeEval().compute(
        references=[TEST_ADD, "assert add(0, 0) == 1"], predictions=[[ADD, SUBTRACT], [ADD, SUBTRACT]], k=[1, 2]
    )
    assert scores == {"pass@1": 0.25, "pass@2": 0.5}
    assert {problem: [outcome.passed for outcome in row] for problem, row in outcomes.items()} == {
        0: [True, False],
        1: [False, False],
    }


def test_a_k_above_the_fewest_candidates_is_left_out() -> None:
    scores, _ = CodeEval().compute(references=[TEST_ADD, TEST_ADD], predictions=[[ADD, ADD], [ADD]], k=[1, 2, 100])
    assert scores == {"pass@1": 1.0}


@pytest.mark.parametrize(
    "attempt",
    [
        "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
        "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 8, {pid})",
        "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 10, 9)",
        "import fcntl, os, struct; r, w = os.pipe(); fcntl.ioctl(r, 0x8901, struct.pack('i', {pid}))",
        "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "import os; os.sched_setaffinity({pid}, [0])",
    ],
)
def test_a_program_changes_and_signals_no_other_process(attempt: str) -> None:
    """It may not become the one that a descriptor's signals go to, nor set another's limits."""
    program = f"""
try:
    {attempt.format(pid=os.getpid())}
except PermissionError:
    pass
else:
    raise AssertionError
"""
    assert run_program(program) == Outcome(True, "passed")


def test_a_program_may_still_lower_its_own_limits() -> None:
    assert run_program("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))").passed
