"""A picture of a plan: what each wiring wins over what it costs in quality, one panel a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf, log10
from pathlib import Path
from typing import Any

from rewired.extras import needs
from rewired.model.wiring_text import NONE

from .ranking import Priced, Ranking

_GREY = "#888888"


def draw(plan: Ranking, path: Path) -> None:
    """Speedups with their ranges over KL: a colour and a line for each wiring, filled where it is recommended.

    The dashed line is the bound, no communication at all; the dotted one, the largest KL that is recommended.
    """
    with needs("convert", "A plot"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot writes a PNG: call it {path.with_suffix('.png')}.")
    drawn = [row for row in plan.rows if row.candidate.is_rewired and 0 < row.kl < inf]
    kinds = list(dict.fromkeys(row.candidate.kind for row in drawn))
    kls = [row.kl for row in drawn] or [1.0]
    colours = colormaps["turbo"].resampled(len(kinds) or 1)
    figure = Figure(figsize=(4.2 * len(plan.caches) + 2, 4.2), layout="constrained")
    panels = figure.subplots(1, len(plan.caches), squeeze=False, sharex=True, sharey=True)[0]
    for axes, batch in zip(panels, plan.caches, strict=True):
        for number, kind in enumerate(kinds):
            rows = [row for row in drawn if (row.candidate.kind, row.batch) == (kind, batch)]
            _draw_wiring(axes, rows, plan.recommended(batch), colours(number))
        axes.axhline(
            next(row.speedup for row in plan.listed(batch) if row.candidate.name == NONE), color=_GREY, ls="--"
        )
        if plan.request.limit:
            axes.axvline(plan.request.limit, color=_GREY, ls=":")
        axes.set_xscale("log")
        axes.set_xlim(10 ** floor(log10(min(kls))), 10 ** (floor(log10(max(kls))) + 1))  # a tick at each end
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize="small")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(f"batch {batch}", fontsize="medium")
        axes.set_xlabel("KL, nats a token")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"predicted speedup, {plan.request.goal}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, dpi=120, metadata={"Software": ""})


def _draw_wiring(axes: Any, rows: Sequence[Priced], recommended: Sequence[Priced], colour: Any) -> None:
    """One wiring's rows of a batch, from few layers to many."""
    rows = sorted(rows, key=lambda row: row.kl)
    axes.plot([row.kl for row in rows], [row.speedup for row in rows], color=colour, lw=0.8)
    for row in rows:
        bars = [[row.speedup - row.low], [row.high - row.speedup]]
        face = colour if row in recommended else "white"
        axes.errorbar([row.kl], [row.speedup], bars, fmt="o", color=colour, mfc=face, ms=5, lw=0.8)
    axes.plot([], [], "o", color=colour, label=rows[0].candidate.kind)
