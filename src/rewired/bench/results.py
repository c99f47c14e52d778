"""The results of a bench: cells as they were measured, and the rows that follow from them.

`measured.jsonl` has a line for each cell, written when the cell is done: an interrupted bench goes on after the last.
`results.json` is what `rewired plan --calibrate` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rewired.cache import write_whole
from rewired.grid.size import TpSize

from .contenders import NONE, STANDARD, STOCK
from .request import BenchRequest
from .runs import DECODE, DECODE_COMPILED, MEASURES, PREFILL, PREFILL_COMPILED, TRAINING

GENERATION = "generation"
_MACHINE = "machine's "  # before what a request's record says of where it ran
_NOTICEABLE = 0.05  # of a time; a share of less says nothing
Samples = Mapping[str, Sequence[float]]  # seconds of a prefill, a token or a step, by measure; one for each round


@dataclass(frozen=True)
class Cell:
    """Everything that was timed in turns: all contenders on all links, for one number of ranks and one batch."""

    tp: int | str  # "2x2" on a grid
    batch: int
    samples: Mapping[str, Mapping[str, Samples]]  # by link and contender
    bytes_sent: Mapping[str, Mapping[str, float]]  # by a rank, by contender and measure
    all_reduce: Sequence[Mapping[str, Any]] = field(default_factory=list)


class CellFile:
    """The file of cells that are done."""

    def __init__(
        self, folder: Path, request: BenchRequest, where: Mapping[str, Any], content: Mapping[str, str] | None = None
    ) -> None:
        """`where` is the machine and its software. `content` has the SHA-256 of the model's files: another model may
        lie under the same name.

        Raises ValueError where the folder holds cells of another request, model or machine, or another kind of file.
        """
        of_machine = {f"{_MACHINE}{name}": value for name, value in where.items()}
        of_content = {} if content is None else {"config or weights": content}
        self.file = folder / "measured.jsonl"
        self.request = json.loads(json.dumps({**asdict(request), **of_machine, **of_content}))
        self.cells: list[Cell] = []
        for recorded, cell in self._recorded():
            if recorded != self.request:
                names = recorded | self.request
                differs = [name for name in names if recorded.get(name) != self.request.get(name)]
                raise ValueError(
                    f"{folder} holds another bench, with another {' and '.join(differs)}: give another --out, or the "
                    "options of that one to continue it."
                )
            self.cells.append(cell)

    def add(self, cell: Cell) -> None:
        """Write it too, whole or not at all."""
        self.cells.append(cell)
        lines = [json.dumps({"request": self.request, **asdict(each)}) + "\n" for each in self.cells]
        write_whole(self.file, "".join(lines))

    def is_done(self, tp: TpSize, batch: int) -> bool:
        return any((cell.tp, cell.batch) == (tp.written, batch) for cell in self.cells)

    def _recorded(self) -> list[tuple[dict[str, Any], Cell]]:
        if not self.file.exists():
            return []
        try:
            lines = [json.loads(line) for line in self.file.read_text("utf-8").splitlines()]
            return [(line.pop("request"), Cell(**line)) for line in lines]
        except (UnicodeDecodeError, json.JSONDecodeError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{self.file} is not what this version of rewired bench writes: remove it.") from None


def to_json(request: BenchRequest, layers: int, cells: Sequence[Cell], header: Mapping[str, Any]) -> dict[str, Any]:
    """The whole of results.json; `layers` is how many were run."""
    ordered = sorted(cells, key=lambda cell: (*_rank_order(cell), cell.batch))
    all_reduces = {
        (entry["gpus"], entry["link"], entry["bytes"]): entry for cell in ordered for entry in cell.all_reduce
    }
    common = {"model": request.model, "layers": layers, "prompt": request.prompt, "new": request.new}
    return {
        "format": 1,
        **header,
        "request": asdict(request),
        "link": request.link,
        "all_reduce": list(all_reduces.values()),
        "rows": [common | row for cell in ordered for row in _rows(cell, request)],
    }


def _rank_order(cell: Cell) -> tuple[int, int]:
    size = TpSize.parse(str(cell.tp))
    return size, size.y


def _rows(cell: Cell, request: BenchRequest) -> Iterator[dict[str, Any]]:
    for link, contenders in cell.samples.items():
        for wiring, samples in contenders.items():
            row: dict[str, Any] = {
                "tp": cell.tp,
                "fsdp": request.fsdp,
                "batch": cell.batch,
                "link": link,
                "wiring": wiring,
            }
            for measure in MEASURES:
                if measure in samples:
                    low, middle, high = quantiles(samples[measure], n=4, method="inclusive")
                    row |= {f"{measure}_seconds": middle, f"{measure}_quartiles": [low, high]}
            tokens = cell.batch * request.fsdp * (request.prompt if request.trains else request.new)
            row["tokens_per_second"] = tokens / median(_seconds(samples, _whole(samples), request))
            row |= _speedups(samples, contenders, request)
            row["hidden"], row["waits"] = _hidden(samples, contenders), _waits(samples, contenders)
            row["bytes_sent"] = cell.bytes_sent[wiring]
            if link == request.link and len(cell.samples) > 1 and request.emulation is None:
                row |= _of_link(cell, link, wiring)
            yield row


def _of_link(cell: Cell, link: str, wiring: str) -> dict[str, Any]:
    """The seconds that a slow link adds to what a wiring takes on the machine's own, and two shares of standard's.

    `saved` is the share of what the link adds to standard that it does not add to the wiring. `won` is what the wiring
    is faster by than standard on the link, whatever the reason. Without anything to save, both are left out.
    """
    own = next(samples for name, samples in cell.samples.items() if name != link)
    adds, saved, won = {}, {}, {}
    for measure in own[wiring]:
        slow, standard_slow = (median(cell.samples[link][name][measure]) for name in (wiring, STANDARD))
        adds[measure] = slow - median(own[wiring][measure])
        hideable = standard_slow - median(own[STANDARD][measure])
        if hideable > _NOTICEABLE * standard_slow:
            saved[measure] = 1 - adds[measure] / hideable
            won[measure] = (standard_slow - slow) / hideable
    return {"link_adds": adds, "link_saved": saved, "link_won": won}


def _seconds(samples: Samples, measure: str, request: BenchRequest) -> Sequence[float]:
    """Of every round; a generation is a prompt and all new tokens, both in the faster mode."""
    if measure != GENERATION:
        return samples[measure]
    prefills, decode = (
        min((samples[name] for name in modes if name in samples), key=median)
        for modes in ((PREFILL, PREFILL_COMPILED), (DECODE, DECODE_COMPILED))
    )
    return [prefill + request.new * token for prefill, token in zip(prefills, decode, strict=True)]


def _whole(samples: Mapping[str, Any]) -> str:
    """The measure that tokens per second are of."""
    return TRAINING if TRAINING in samples else GENERATION


def _speedups(samples: Samples, of_all: Mapping[str, Samples], request: BenchRequest) -> dict[str, Any]:
    """The rounds' own ratios over standard and over stock: the median of each, and the range that it is in."""
    found: dict[str, Any] = {"speedup": {}, "speedup_range": {}}
    for measure in dict.fromkeys((*samples, _whole(samples))):
        own = _seconds(samples, measure, request)
        bases = {
            baseline: _seconds(of_all[baseline], measure, request)
            for baseline in (STANDARD, STOCK)
            if baseline in of_all
        }
        ratios = {name: [base / each for base, each in zip(bases[name], own, strict=True)] for name in bases}
        found["speedup"][measure] = {baseline: median(each) for baseline, each in ratios.items()}
        found["speedup_range"][measure] = {baseline: median_range(each) for baseline, each in ratios.items()}
    return found


def median_range(values: Sequence[float]) -> list[float]:
    """Two of the values, between which the median of more of them lies with 95 %; the ends, where they are few."""
    draws, ordered = len(values), sorted(values)
    below = [sum(comb(draws, k) for k in range(cut + 1)) / 2**draws for cut in range(draws // 2)]
    cut = max(sum(chance <= 0.025 for chance in below) - 1, 0)
    return [ordered[cut], ordered[draws - 1 - cut]]


def _hidden(samples: Samples, contenders: Mapping[str, Samples]) -> dict[str, float]:
    """The share of the time that communication takes which the wiring saves: (standard - own) / (standard - none).

    Left out where standard is not certainly slower than none, so that there may be nothing to hide.
    """
    shares = {}
    if NONE in contenders:
        for measure in samples:
            each_of = contenders[STANDARD][measure], samples[measure], contenders[NONE][measure]
            standard, own, none = map(median, each_of)
            if median_range([base / bound for base, _, bound in zip(*each_of, strict=True)])[0] > 1:
                shares[measure] = (standard - own) / (standard - none)
    return shares


def _waits(samples: Samples, contenders: Mapping[str, Samples]) -> dict[str, float]:
    """The share of a wiring's time that is communication which nothing hides: 1 - none / own."""
    return {
        measure: 1 - median(contenders[NONE][measure]) / median(samples[measure])
        for measure in samples
        if NONE in contenders
    }
