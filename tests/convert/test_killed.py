"""The command, killed and interrupted: OUT is whole or not there."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from rewired.convert.destination import staged_folder
from tests.commands import run

from .checkpoints import make_llama, snapshot

LADDER = ("--ladder-layers", "2-4")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """57 MB in 45 shards: copying them is about a third of what a conversion takes."""
    folder = make_llama(tmp_path_factory.mktemp("large") / "large", hidden_size=512, intermediate_size=1024)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def unkilled(large: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], float]:
    """The files of a conversion that nothing happens to, and how many seconds it takes."""
    folder = tmp_path_factory.mktemp("unkilled")
    start = time.monotonic()
    assert started(large, folder).wait() == 0
    seconds = time.monotonic() - start
    files = contents(folder / "out")
    shutil.rmtree(folder / "out")
    return files, seconds


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """An empty folder to convert in, emptied again: what is in it is large."""
    (tmp_path / "work").mkdir()
    yield tmp_path / "work"
    shutil.rmtree(tmp_path / "work")


def started(source: Path, work: Path, *options: str) -> subprocess.Popen[str]:
    """`convert SOURCE out --copy` in `work`, under way; SIGINT interrupts it even where a shell had ignored it."""
    command = [str(Path(sys.executable).parent / "convert"), str(source), "out", "--copy", *LADDER, *options]
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=work, text=True, preexec_fn=heed, stdout=pipe, stderr=pipe)


def contents(folder: Path) -> dict[str, bytes]:
    """A snapshot in which it does not matter whether the model card's command had a --force."""
    return {name: data.replace(b" --force", b"") for name, data in snapshot(folder).items()}


def wait_for_files(process: subprocess.Popen[str], staging: Path, count: int) -> None:
    """Until that many files are in the staging folder, or, on a busy machine, the conversion has ended."""
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if len(list(staging.iterdir())) >= count:
                return


def assert_whole_or_absent_and_repeatable(
    large: Path, work: Path, whole: dict[str, bytes], before: dict[str, bytes]
) -> None:
    """OUT is the new checkpoint, what it was before, or not there; and the same command again makes it whole."""
    out = work / "out"
    if out.exists():
        assert contents(out) in (whole, before)
        assert run("rewired", "info", out, cwd=work).returncode == 0
    done = run("convert", large, "out", "--copy", *LADDER, *["--force"] * out.exists(), cwd=work)
    assert done.returncode == 0, done.stderr
    assert contents(out) == whole
    assert list(work.iterdir()) == [out]


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("fraction", [round((part + random.Random(part).random()) / 5, 3) for part in range(6)])
def test_killed_at_a_random_moment(
    large: Path, work: Path, unkilled: tuple[dict[str, bytes], float], fraction: float, replaces: bool
) -> None:
    """After `fraction` of the usual duration; one moment in each fifth of it, and one thereafter."""
    whole, seconds = unkilled
    source = snapshot(large)
    before = snapshot(make_llama(work / "out")) if replaces else {}
    process = started(large, work, *["--force"] * replaces)
    time.sleep(fraction * seconds)
    process.kill()
    process.communicate()
    assert snapshot(large) == source
    assert_whole_or_absent_and_repeatable(large, work, whole, before)


@pytest.mark.parametrize("count", [0, 1, 25, 50])
def test_killed_when_so_many_files_are_written(
    large: Path, work: Path, unkilled: tuple[dict[str, bytes], float], count: int
) -> None:
    process = started(large, work)
    wait_for_files(process, work / ".out.partial", count)
    process.kill()
    process.communicate()
    assert_whole_or_absent_and_repeatable(large, work, unkilled[0], {})


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing"])
def test_interrupted_it_leaves_nothing_and_says_so(large: Path, work: Path, replaces: bool) -> None:
    before = snapshot(make_llama(work / "out")) if replaces else {}
    process = started(large, work, *["--force"] * replaces)
    wait_for_files(process, work / ".out.partial", 1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1].startswith("convert: interrupted")
    assert "Traceback" not in stderr
    assert list(work.iterdir()) == [work / "out"] * replaces
    assert snapshot(work / "out") == before


def test_terminated_it_leaves_nothing(large: Path, work: Path) -> None:
    """SIGTERM is what Slurm, docker and timeout send."""
    process = started(large, work)
    wait_for_files(process, work / ".out.partial", 1)
    process.terminate()
    process.communicate()
    assert process.returncode == 143
    assert list(work.iterdir()) == []


def test_a_second_command_for_the_same_out_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    source, out = make_llama(tmp_path / "source"), tmp_path / "out"
    with staged_folder(out) as staging:
        (staging / "config.json").write_text("the first's")
        done = run("convert", source, out, *LADDER, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines() == [
            f"convert: Another conversion is writing {out}: wait for it, or choose another name."
        ]
    assert snapshot(out) == {"config.json": b"the first's"}
