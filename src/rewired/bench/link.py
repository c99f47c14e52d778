"""An emulated slow network between ranks of one Linux machine: what they wait for on a link that is not at hand.

Each rank gets a network namespace of its own, which two links join to the others': "slow", where what a rank sends
passes a token bucket (`man tc-tbf`), and "fast", which has no limit and stands for loopback. So the same processes
measure both, in turns.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rewired import signals

_SLOW, _FAST = "slow", "fast"
_NAMESPACES = Path("/run/netns")
_UNITS = {"mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class EmulatedLink:
    """A link over which each rank sends so many bits a second; its name is the rate as a user wrote it."""

    name: str
    bits_per_second: float

    @classmethod
    def parse(cls, rate: str) -> EmulatedLink:
        """A rate in the words of `tc`: 1gbit, 500mbit. Raises ValueError."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", rate)
        if match is None:
            raise ValueError(f'"{rate}" is not the rate of a link: write it like 1gbit or 500mbit.')
        bits_per_second = float(match[1]) * _UNITS[match[2]]
        if not 1e6 <= bits_per_second <= 1e11:
            raise ValueError(f"A link of {rate} cannot be emulated: take a rate from 1mbit to 100gbit.")
        return cls(rate, bits_per_second)

    @contextmanager
    def between(self, ranks: int) -> Iterator[EmulatedNetwork]:
        """The network of so many ranks; it is removed afterwards, and on an error, Ctrl-C and SIGTERM.

        Raises ValueError where this machine cannot have one.
        """
        self.check_machine()
        _remove_what_killed_runs_left()
        network = EmulatedNetwork(f"rewired-{os.getpid()}", ranks)
        with signals.end_cleanly():
            try:
                network.make(self)
                yield network
            finally:
                _remove_namespaces(network.prefix)

    @staticmethod
    def check_machine() -> None:
        """Raise ValueError, saying what is missing, where this machine cannot emulate links."""
        if sys.platform != "linux":
            raise ValueError("An emulated link needs Linux, whose network namespaces it is made of.")
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise ValueError(f"An emulated link needs the command {tool}: install iproute2.")
        if os.geteuid() != 0:
            raise ValueError("An emulated link needs root: run the command by sudo.")

    @property
    def frame(self) -> int:
        """Bytes of an IP packet: what passes in .5 ms. Each takes the kernel's time from cores that should compute."""
        return min(max(1500, int(self.bits_per_second / 8 * 500e-6)), 65535)

    @property
    def burst(self) -> int:
        """Bytes that pass at once after a silence: a packet, and what would be lost whenever a timer is late."""
        ethernet_header = 14
        return self.frame + ethernet_header + int(self.bits_per_second / 8 * 125e-6)


@dataclass(frozen=True)
class EmulatedNetwork:
    """A namespace a rank, joined twice. Picklable, so that `enter` is a `prepare` of `run_on_ranks`."""

    prefix: str  # of the namespaces' names
    ranks: int

    def enter(self, rank: int) -> None:
        """Move this thread, and those that it starts, into the rank's namespace, where gloo takes the slow link."""
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
        with (_NAMESPACES / self._namespace(rank)).open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        os.environ["GLOO_SOCKET_IFNAME"] = _SLOW

    def make(self, link: EmulatedLink) -> None:
        """Raises ValueError where the kernel refuses."""
        for rank in range(self.ranks):
            _run(f"ip netns add {self._namespace(rank)}")
            _run(f"ip -netns {self._namespace(rank)} link set lo up")  # where several ranks share a namespace
        self._join(_SLOW, "10.0.1", link.frame)
        self._join(_FAST, "10.0.2", 65535)
        queue = 64 << 20  # bytes, more than sockets hold: what does not fit would be lost, and sent again
        limit = f"rate {link.bits_per_second:.0f}bit burst {link.burst} limit {queue}"
        for rank in range(self.ranks):
            _run(f"tc -netns {self._namespace(rank)} qdisc add dev {_SLOW} root tbf {limit}")

    def _join(self, device: str, subnet: str, frame: int) -> None:
        """Two ranks by a cable, more by a switch, which has a namespace of its own."""
        spaces = [self._namespace(rank) for rank in range(self.ranks)]
        if self.ranks == 2:
            _run(f"ip link add {device} netns {spaces[0]} type veth peer name {device} netns {spaces[1]}")
        else:
            switch = f"{self.prefix}-{device}"
            _run(f"ip netns add {switch}")
            _run(f"ip -netns {switch} link add switch mtu {frame} up type bridge")
            for rank, space in enumerate(spaces):
                port = f"port{rank} netns {switch}"
                _run(f"ip link add {device} netns {space} type veth peer name {port}")
                _run(f"ip -netns {switch} link set port{rank} mtu {frame} master switch up")
        for rank, space in enumerate(spaces):
            _run(f"ip -netns {space} address add {subnet}.{rank + 1}/24 dev {device}")
            _run(f"ip -netns {space} link set {device} mtu {frame} up")
            # congestion control that takes the link as it is, whatever this machine's: BBR would pace and probe it
            _run(f"ip -netns {space} route replace {subnet}.0/24 dev {device} congctl reno")

    def _namespace(self, rank: int) -> str:
        return f"{self.prefix}-{rank}"


@contextmanager
def over_fast_link() -> Iterator[None]:
    """In here, ranks that have entered their namespaces make process groups over the link without limit."""
    os.environ["GLOO_SOCKET_IFNAME"] = _FAST  # gloo reads it for every group that it makes
    try:
        yield
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = _SLOW


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise ValueError(f"This machine has no emulated links: `{command}` failed ({reason}).")


def _remove_what_killed_runs_left() -> None:
    for namespace in _NAMESPACES.glob("rewired-*-*"):
        prefix, pid, _ = namespace.name.split("-")
        if not Path("/proc", pid).exists():
            _remove_namespaces(f"{prefix}-{pid}")


def _remove_namespaces(prefix: str) -> None:
    """With them go their links; a namespace that a process is still in goes with that process."""
    for namespace in _NAMESPACES.glob(f"{prefix}-*"):
        _run(f"ip netns delete {namespace.name}")
