"""CUDA's streams over tensors of a CPU, and what two of them do to the same memory in no order.

Operations run at once, on real tensors, and are noted as if the current stream had been given them. A stream has a
vector clock: how far it has come, and how far it knows that others have. Memory that nobody holds any more is what its
own stream allocates next. A compiled program reuses memory at once after the last operation that takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rewired.model import reductions

# what a graph holds, opened: its own kernels are noted, too
OPENED = {each._qualname: each._init_fn for each in (reductions.land, reductions.land_and_launch, reductions.own)}
PLAIN = {torch.Tensor, torch.nn.Parameter}
COLLECTIVES = ("c10d", "_c10d_functional")
NO_USES = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


class Stream:
    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device = device
        self.clock: Clock = {self: 0}

    def tick(self) -> int:
        self.clock[self] += 1
        return self.clock[self]

    def follow(self, clock: Clock) -> None:
        for stream, moment in clock.items():
            self.clock[stream] = max(moment, self.clock.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.follow(other.clock)

    def record_event(self) -> Event:
        return Event(dict(self.clock))


Clock = dict[Stream, int]


@dataclass
class Event:
    clock: Clock

    def wait(self) -> None:
        torch.cuda.current_stream().follow(self.clock)


class Use(NamedTuple):
    stream: Stream
    moment: int
    name: str


@dataclass
class Memory:
    """A storage, and how it was used."""

    storage: StorageWeakRef
    home: Stream  # that it was allocated on
    written: Use | None = None  # the last time
    used: dict[Stream, Use] = field(default_factory=dict)  # by each stream, the last time
    taken: Clock | None = None  # the last time by an operation of a graph


class HappensBefore(TorchDispatchMode):
    """The current stream, and what runs on it and on others."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.is_graph = False

    def races(self, work: Callable[[], Any], is_graph: bool) -> list[str]:
        """What `work` does in no order; as a graph, where that is asked, which runs without a compiler."""
        self.is_graph, self.is_opened = is_graph, False
        self.memory: dict[int, Memory] = {}
        self.shared: set[int] = set()  # that other streams than their own have used
        self.free: dict[Stream, list[Memory]] = {}
        self.sent: dict[int, list[torch.Tensor]] = {}  # by the memory of what is received
        self.found: set[str] = set()
        with self:
            work()
        for memory in self.memory.values():
            if memory.taken is not None and memory.written is not None:
                self._check(memory.taken, *memory.used.values(), name="another's use of its memory")
        self.is_graph = False
        return sorted(self.found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:  # DTensor's, which asks for shapes
            return func(*args, **(kwargs or {}))
        if not {*types} <= PLAIN:
            return NotImplemented  # a tensor that waits, or is split: what it does, it does with plain ones
        kwargs, name = kwargs or {}, func._schema.name
        self._give_back()
        taken = _tensors((*args, *kwargs.values()))
        if name in OPENED:
            result = self._open(OPENED[name], args, kwargs)
        elif func.is_view or name in NO_USES:
            result = func(*args, **kwargs)
        else:
            mutated = [args[at] if at < len(args) else kwargs.get(each) for each, at in _mutated(func).items()]
            self._take(taken, _tensors(mutated), name)
            result = func(*args, **kwargs)
            if func.namespace not in COLLECTIVES:  # what these give is noted by the line that runs them
                self._make(_tensors([result]), taken, name)
        if self.is_graph and not self.is_opened:
            self._take_in_graph(func, taken, result)
        return result

    def read(self, tensor: torch.Tensor, name: str) -> None:
        memory = self._memory_of(tensor)
        if memory.written is not None:
            self._check(self.current.clock, memory.written, name=name)
        memory.used[self.current] = self._use(name)

    def write(self, tensor: torch.Tensor, name: str) -> None:
        memory = self._memory_of(tensor)
        self._check(self.current.clock, *memory.used.values(), name=name)
        memory.used[self.current] = memory.written = self._use(name)

    def _open(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.is_opened = True
        with self:
            result = operation(*args, **kwargs)
        self.is_opened = False
        return result

    def _take(self, taken: list[torch.Tensor], mutated: list[torch.Tensor], name: str) -> None:
        for tensor in taken:
            if not _is_of(tensor, mutated):
                self.read(tensor, name)
        for tensor in mutated:
            self.write(tensor, name)

    def _take_in_graph(self, func: Any, taken: list[torch.Tensor], result: Any) -> None:
        """Of a collective, Inductor keeps what is sent until the wait."""
        if func.namespace == "_c10d_functional":
            self.sent[_key(result)] = taken = taken + self.sent.get(_key(result), [])
        for tensor in taken:
            self._memory_of(tensor).taken = dict(self.current.clock)

    def _make(self, made: list[torch.Tensor], taken: list[torch.Tensor], name: str) -> None:
        for tensor in made:
            if "empty" in name:
                self._memory_of(tensor)
            elif not _is_of(tensor, taken):
                self.write(tensor, name)

    def _use(self, name: str) -> Use:
        return Use(self.current, self.current.tick(), name)

    def _check(self, clock: Clock, *uses: Use, name: str) -> None:
        for use in uses:
            if clock.get(use.stream, 0) < use.moment:
                self.found.add(f"{use.name} and {name}")

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        key = _key(tensor)
        if key not in self.memory:
            self.memory[key] = Memory(StorageWeakRef(tensor.untyped_storage()), self.current)
            for freed in self.free.pop(self.current, []):
                self._check(self.current.clock, *freed.used.values(), name="another's use of its memory")
        if self.memory[key].home is not self.current:
            self.shared.add(key)
        return self.memory[key]

    def _give_back(self) -> None:
        for key in [key for key in self.shared if self.memory[key].storage.expired()]:
            self.shared.remove(key)
            self.free.setdefault(self.memory[key].home, []).append(self.memory[key])

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@contextmanager
def streams_of_a_gpu() -> Iterator[HappensBefore]:
    """While it lasts, tensors of a CPU take the ways of a GPU's."""
    watch = HappensBefore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", watch.on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: watch.current)
        patch.setattr(torch.compiler, "is_compiling", lambda: watch.is_graph)
        yield watch


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Of arguments or results, of which some are lists. Those on the meta device are DTensor's, for shapes."""
    flat = chain.from_iterable(value if isinstance(value, (list, tuple)) else [value] for value in values)
    return [value for value in flat if isinstance(value, torch.Tensor) and not value.is_meta]


def _key(tensor: torch.Tensor) -> int:
    """Its memory's, and nobody else's while a weak reference to it is kept."""
    return tensor.untyped_storage()._cdata


def _is_of(tensor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Whether it has the memory of one of them."""
    return any(_key(tensor) == _key(other) for other in others)


@cache
def _mutated(func: Any) -> dict[str, int]:
    """Arguments that an operation writes to, and where they stand."""
    arguments = enumerate(func._schema.arguments)
    return {each.name: at for at, each in arguments if each.alias_info is not None and each.alias_info.is_write}
