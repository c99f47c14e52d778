"""Timelines of one rank, one for each wiring: what it computes, and which all-reduces run meanwhile.

As the Ladder paper's Figure 6: in standard, compute waits while an all-reduce runs; in ladder it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .trace import ATTENTION, MLP, RankTrace, Span, read

_COLOURS = {ATTENTION: "#0072b2", MLP: "#e69f00", None: "#7f7f7f"}  # Okabe and Ito's
_PALE = 0.3  # of what is no product, and of an all-reduce that has not begun
_WAITING: dict[str, Any] = {"facecolor": "none", "edgecolor": "#888888", "hatch": "/////", "lw": 0}
_COMPUTE, _COMMUNICATION = (0.55, 0.4), (0.05, 0.4)  # bottom and height of a lane
_LANES = ("all-reduce", "compute")
_LAYERS = 2


def draw_timeline(traces: Mapping[str, Path], png: Path, title: str) -> None:
    """Draw traces of one rank, by the wirings' names and above each other, over two layers of each.

    Of all neighbouring pairs of layers, without the model's first and last, it is the pair of median time.
    What stays white in the lane of compute is norms, the residual stream, Python, or a GPU that is idle.
    """
    figure = timeline({name: read(file) for name, file in traces.items()}, title)
    figure.savefig(png, dpi=150, metadata={"Software": ""})


def timeline(ranks: Mapping[str, RankTrace], title: str) -> Figure:
    """The figure of `draw_timeline`."""
    windows = {name: window(rank) for name, rank in ranks.items()}
    figure = Figure(figsize=(10, 1.4 * len(ranks) + 1.3), layout="constrained")
    panels = figure.subplots(len(ranks), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, rank) in zip(panels, ranks.items(), strict=True):
        _draw_rank(axes, rank, *windows[name])
        axes.set_title(name, fontsize="medium", loc="left")
    panels[-1].set_xlim(0, max(end - start for start, end in windows.values()) / 1e3)
    panels[-1].set_xlabel(f"milliseconds, of {_LAYERS} layers")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="medium", color="#555555")
    return figure


def window(rank: RankTrace) -> tuple[float, float]:
    """Beginning and end of two layers: of all such pairs, but for the model's ends, the one of median length.

    A layer begins with its attention or, where modules are not marked, with every second all-reduce.
    """
    starts = [module.start for module in rank.modules if module.name == ATTENTION]
    starts = starts or [each.launched for each in rank.all_reduces[::2]]
    pairs = list(zip(starts, starts[_LAYERS:], strict=False))
    if not pairs:
        spans = [*rank.modules, *rank.products]
        return min(span.start for span in spans), max(span.end for span in spans)
    inner = pairs[1:] or pairs
    return sorted(inner, key=lambda pair: pair[1] - pair[0])[(len(inner) - 1) // 2]


def _draw_rank(axes: Any, rank: RankTrace, start: float, end: float) -> None:
    def bars(spans: Iterable[tuple[float, float]], lane: tuple[float, float], label: str, **style: Any) -> None:
        shown = [(max(left, start), min(right, end)) for left, right in spans if left < end and right > start]
        milliseconds = [((left - start) / 1e3, (right - left) / 1e3) for left, right in shown]
        axes.broken_barh(milliseconds, lane, label=label, **({"lw": 0} | style))

    for kind, colour in _COLOURS.items():
        modules = [each for each in rank.modules if each.name == kind]
        products = [each for each in rank.products if _module_of(each, rank.modules) == kind]
        own = [each for each in rank.all_reduces if each.module == kind]
        pale = {"color": colour, "alpha": _PALE}
        bars(((each.start, each.end) for each in modules), _COMPUTE, f"{kind}", **pale)
        bars(((each.start, each.end) for each in products), _COMPUTE, f"products of {kind}", color=colour)
        bars(((each.launched, each.start) for each in own), _COMMUNICATION, f"launched by {kind}", **pale)
        bars(((each.start, each.end) for each in own), _COMMUNICATION, f"all-reduce of {kind}", color=colour)
    bars(((wait.start, wait.end) for wait in rank.waits), _COMPUTE, "waits", **_WAITING)
    axes.set_ylim(0, 1)
    axes.set_yticks([sum(_COMMUNICATION) - _COMMUNICATION[1] / 2, sum(_COMPUTE) - _COMPUTE[1] / 2], _LANES)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _module_of(span: Span, modules: Sequence[Span]) -> str | None:
    return next((module.name for module in modules if module.start <= span.start and span.end <= module.end), None)


def _legend() -> list[Patch]:
    return [
        Patch(color=_COLOURS[ATTENTION], label="attention, and its all-reduce"),
        Patch(color=_COLOURS[MLP], label="MLP, and its all-reduce"),
        Patch(color=_COLOURS[None], alpha=_PALE, label="pale: between matrix products; launched, not begun"),
        Patch(**_WAITING, label="waits for an all-reduce"),
    ]
