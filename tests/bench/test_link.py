"""Emulated links: ranks really send over them, and nothing of them is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import distributed

from rewired.bench.link import EmulatedLink, over_fast_link
from rewired.bench.links import NO_P2P, prepared
from rewired.bench.request import BenchRequest
from rewired.bench.run import machine
from rewired.ranks import run_on_ranks

NAMESPACES = Path("/run/netns")
TIMEOUT = timedelta(seconds=60)
MIB = 1 << 20


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 1e9), ("500mbit", 5e8), ("2.5gbit", 2.5e9)])
def test_a_rate_is_written_as_tc_writes_it(rate: str, bits: float) -> None:
    assert EmulatedLink.parse(rate) == EmulatedLink(rate, bits)


@pytest.mark.parametrize("rate", ["", "fast", "1", "gbit", "-1gbit", "1 gbit", "1gbps", "1GBIT", "1e3mbit", "nanmbit"])
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=rf'^"{rate}" is not the rate of a link: write it like 1gbit or 500mbit\.$'):
        EmulatedLink.parse(rate)


@pytest.mark.parametrize("rate", ["0mbit", "0.5mbit", "101gbit", "9999999gbit"])
def test_a_rate_that_a_token_bucket_cannot_hold_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=rf"^A link of {rate} cannot be emulated: take a rate from 1mbit to 100gbit"):
        EmulatedLink.parse(rate)


@pytest.mark.parametrize(("rate", "frame"), [("1mbit", 1500), ("200mbit", 12_500), ("100gbit", 65_535)])
def test_a_packet_takes_half_a_millisecond_within_what_packets_can_be(rate: str, frame: int) -> None:
    link = EmulatedLink.parse(rate)
    assert link.frame == frame
    assert link.burst > link.frame  # a bucket that holds no packet lets none pass


def test_a_machine_that_is_not_linux_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"^An emulated link needs Linux, whose network namespaces it is made of\.$"):
        open_link()


def test_without_iproute2_a_link_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"^An emulated link needs the command ip: install iproute2\.$"):
        open_link()


def test_without_root_a_link_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    fake_tools(tmp_path, "exit 0", monkeypatch)
    with pytest.raises(ValueError, match=r"^An emulated link needs root: run the command by sudo\.$"):
        open_link()


def test_what_the_kernel_refuses_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    fake_tools(tmp_path, "echo Operation not permitted >&2; exit 1", monkeypatch)
    with pytest.raises(ValueError, match=r"^This machine has no emulated links: `ip netns .*` failed \(Operation not"):
        open_link()


def open_link() -> None:
    with EmulatedLink.parse("1gbit").between(2):
        pass


def fake_tools(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("ip", "tc"):
        path = folder / tool
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@cache
def why_no_link() -> str:
    """Found out without the code under test, whose failures must not be taken for a machine's."""
    if sys.platform != "linux" or os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return "emulated links need Linux, root, and iproute2"
    probe = "ip link add end0 type veth peer name end1 && tc qdisc add dev end0 root tbf rate 1mbit burst 4kb limit 4kb"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", probe], capture_output=True, text=True, check=False
    )
    return f"this machine has no emulated links: {done.stderr.strip()}" if done.returncode else ""


needs_links = pytest.mark.skipif(why_no_link() != "", reason=why_no_link())


@needs_links
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_group_sends_over_its_own_link_and_sums_right(ranks: int) -> None:
    with EmulatedLink.parse("1gbit").between(ranks) as network:
        for slow, fast in run_on_ranks(sum_on_both, ranks, prepare=network.enter):
            assert slow[0] == fast[0] == sum(range(ranks))
            # a ring sends 2 (r - 1) / r of the tensor, in packets with some bytes of their own
            expected = 2 * (ranks - 1) / ranks * 4 * MIB
            assert expected < slow[1] < 1.3 * expected
            assert slow[2] < 0.1 * MIB
            assert fast[1] < 0.1 * MIB
            assert expected < fast[2] < 1.3 * expected
    assert namespaces() == set()


def sum_on_both() -> list[tuple[float, int, int]]:
    """By group: the sum, and the bytes that this rank sent over the slow and the fast link meanwhile."""
    results = []
    with over_fast_link():
        fast = distributed.new_group(backend="gloo", timeout=TIMEOUT)
    for group in (None, fast):
        distributed.barrier()
        before = sent("slow"), sent("fast")
        tensor = torch.full((MIB,), float(distributed.get_rank()))
        distributed.all_reduce(tensor, group=group)
        distributed.barrier()  # now the others have all that this rank sent, and nothing is in a queue
        assert tensor.min() == tensor.max()
        results.append((tensor[0].item(), sent("slow") - before[0], sent("fast") - before[1]))
    return results


def sent(device: str) -> int:
    """From what the kernel shows to this thread: /sys still is the parent's."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (counters,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{device}:"))
    return int(counters[8])


@needs_links
def test_the_slow_link_has_the_rate_asked_for() -> None:
    with EmulatedLink.parse("100mbit").between(2) as network:
        for rank in range(2):
            shown = subprocess.check_output(["tc", "-n", f"{network.prefix}-{rank}", "qdisc", "show"], text=True)
            (slow,) = (line for line in shown.splitlines() if "dev slow" in line)
            assert "qdisc tbf" in slow
            assert "rate 100Mbit" in slow
            routes = subprocess.check_output(["ip", "-n", f"{network.prefix}-{rank}", "route"], text=True).splitlines()
            assert len(routes) == 2
            assert all("congctl reno" in route for route in routes)
            (fast,) = (line for line in shown.splitlines() if "dev fast" in line)
            assert "qdisc noqueue" in fast


@needs_links
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), EmulatedLink.parse("1gbit").between(2):
        assert len(namespaces()) == 2
        raise error
    assert namespaces() == set()


@needs_links
def test_nothing_is_left_after_sigterm() -> None:
    with process_with_link() as process:
        assert len(namespaces(process.pid)) == 2
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        assert namespaces(process.pid) == set()


@needs_links
def test_what_a_killed_run_left_is_removed_by_the_next_but_nothing_of_one_that_is_alive() -> None:
    with process_with_link() as killed, process_with_link() as alive:
        killed.kill()
        killed.wait()
        assert len(namespaces(killed.pid)) == 2
        open_link()
        assert namespaces(killed.pid) == set()
        assert len(namespaces(alive.pid)) == 2
        alive.terminate()
        alive.wait()


@contextmanager
def process_with_link() -> Iterator[subprocess.Popen[str]]:
    """A Python that waits inside its emulated link."""
    script = (
        "import time; from rewired.bench.link import EmulatedLink\n"
        "with EmulatedLink.parse('1gbit').between(2):\n"
        "    print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def namespaces(pid: int | None = None) -> set[str]:
    return {path.name for path in NAMESPACES.glob(f"rewired-{pid or os.getpid()}-*")}


def test_without_p2p_neither_links_nor_their_switches_are_used_and_results_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "as it was")
    with prepared(BenchRequest(["tiny"], [], link=NO_P2P), ranks=4) as prepare:
        assert prepare is not None
        prepare(0)
    recorded = {name: value for name, value in machine("cpu").items() if name.startswith("NCCL_")}
    assert recorded == {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
