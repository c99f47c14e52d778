"""The ranks that our commands start: all of them finish, or none is left."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import torch

from rewired import ranks
from rewired.ranks import RankError, choose_device, run_on_ranks


def test_every_rank_returns_its_result() -> None:
    assert run_on_ranks(rank_and_sum, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def rank_and_sum(base: int) -> tuple[int, int]:
    rank = torch.distributed.get_rank()
    total = torch.tensor(base + rank)
    torch.distributed.all_reduce(total)
    return rank, int(total)


def test_a_rank_returns_a_tensor_that_outlives_it() -> None:
    results = run_on_ranks(torch.full, 2, (3,), 1.0)
    assert [each.tolist() for each in results] == [[1.0] * 3] * 2


def test_a_rank_is_prepared_before_it_joins_its_group() -> None:
    assert run_on_ranks(prepared_as, 2, prepare=note_rank) == ["0 before", "1 before"]


def note_rank(rank: int) -> None:
    os.environ["PREPARED"] = f"{rank} {'after' if torch.distributed.is_initialized() else 'before'}"


def prepared_as() -> str:
    return os.environ["PREPARED"]


def test_what_a_rank_refuses_is_a_value_error_here() -> None:
    with pytest.raises(ValueError, match=r"^no such number$"):
        run_on_ranks(refuse, 2)
    assert no_rank_is_left()


def refuse() -> None:
    raise ValueError("no such number")


@pytest.fixture
def _cause_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else fails, so there is nothing to wait for."""
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.2)


@pytest.mark.usefixtures("_cause_comes_first")
def test_a_rank_that_fails_ends_the_one_that_waits_for_it() -> None:
    with pytest.raises(RankError) as raised:
        run_on_ranks(fail_on_rank_1, 2)
    assert str(raised.value) == "Rank 1 failed: RuntimeError: out of luck"
    assert "in fail_on_rank_1" in raised.value.__notes__[0]
    assert no_rank_is_left()


def fail_on_rank_1() -> None:
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("out of luck")
    time.sleep(600)


def test_a_rank_that_is_killed_ends_the_others_and_is_named() -> None:
    with pytest.raises(RankError, match=r"^Rank 1 was killed by SIGKILL, so the other ranks were ended\.$"):
        run_on_ranks(kill_rank_1, 3)
    assert no_rank_is_left()


def kill_rank_1() -> None:
    for step in range(1000):
        if step == 5 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("_cause_comes_first")
def test_a_collective_that_never_comes_ends_in_the_groups_timeout() -> None:
    with pytest.raises(RankError, match="Rank 0 failed"):
        run_on_ranks(stay_away, 2, timeout_seconds=4)
    assert no_rank_is_left()


def stay_away() -> None:
    if torch.distributed.get_rank() == 1:
        time.sleep(600)
    torch.distributed.all_reduce(torch.ones(1))


def test_one_rank_takes_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"^1 rank would take 1 GPU and there are 0: take fewer, or --device cpu"):
        choose_device("cuda", 1)


def no_rank_is_left() -> bool:
    (server,) = [child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline())]
    _, alive = psutil.wait_procs(server.children())
    return not alive
