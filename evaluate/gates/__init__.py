"""Gates: whether a model may stand for its original, by measures with their intervals. One YAML file a gate, under
`gates/`.

Each check passes, fails, or is undecided: where the interval of what was measured holds the bound, more items have to
say. A gate is passed where all checks are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from ..named_yaml import read_yaml, refuse_unknown

FOLDER = Path(__file__).parent
PASSED, FAILED, UNDECIDED, TOLD = "passed", "failed", "undecided", "not asked"
_Z = 1.96  # standard errors to each side of an interval of 95 %


@dataclass(frozen=True)
class Gate:
    """Bounds; None asks for nothing. Recovery is a model's score over the original's."""

    name: str
    about: str = ""
    suite: str | None = None  # whose tasks are asked, where none are named
    mean_recovery: float | None = None  # at least, of the mean over tasks
    task_recovery: float | None = None  # at least, of each task
    kl: float | None = None  # at most, nats a token, on each text
    retrieval_loss: float | None = None  # at most, of the share that is found again in long texts
    same_top: float | None = None  # at least, the share of tokens whose likeliest one is the original's, on each text

    @property
    def asks_tasks(self) -> bool:
        return self.mean_recovery is not None or self.task_recovery is not None

    @property
    def asks_texts(self) -> bool:
        return self.kl is not None or self.same_top is not None


@dataclass(frozen=True)
class Check:
    """A measure beside its bound, None where none is asked. `error` is its standard error, None of a single item."""

    what: str
    value: float
    error: float | None
    bound: float | None
    at_least: bool = True
    items: int | None = None  # that it was measured on, where more would narrow its interval

    @property
    def interval(self) -> tuple[float, float]:
        half = _Z * (self.error or 0.0)
        return self.value - half, self.value + half

    @property
    def verdict(self) -> str:
        if self.bound is None:
            return TOLD
        low, high = self.interval
        if self.error is None or low < self.bound < high:
            return UNDECIDED
        return PASSED if (self.value >= self.bound if self.at_least else self.value <= self.bound) else FAILED

    @property
    def items_to_decide(self) -> int | None:
        """About how many items would decide, if the value stayed what it is."""
        if self.verdict != UNDECIDED or self.bound is None or not self.items or self.value == self.bound:
            return None
        return math.ceil(self.items * (_Z * (self.error or 0.0) / (self.value - self.bound)) ** 2)


def load_gate(name: str) -> Gate:
    """A gate that comes with the package, by name, or any other, by the path of its YAML file. Raises ValueError."""
    path, content = read_yaml("gate", name, FOLDER)
    content = content if isinstance(content, dict) else {}
    refuse_unknown(content, [each.name for each in fields(Gate) if each.name != "name"], f"The gate {path}")
    for key, value in content.items():
        if key not in ("about", "suite") and not (type(value) in (int, float) and 0 <= value < math.inf):
            raise ValueError(f"The gate {path} has {key} '{value}': give a number from 0 on.")
    gate = Gate(path.stem, **content)
    if not (gate.asks_tasks or gate.asks_texts or gate.retrieval_loss is not None):
        raise ValueError(f"The gate {path} asks for nothing: give it a bound, such as mean_recovery: 0.99.")
    return gate


def verdict(found: Sequence[Check]) -> str:
    """Of a gate: failed where one check is, and undecided where one is and none failed."""
    verdicts = {check.verdict for check in found}
    return FAILED if FAILED in verdicts else UNDECIDED if UNDECIDED in verdicts else PASSED
