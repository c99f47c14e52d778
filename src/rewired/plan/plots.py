"""A picture of a plan: what each wiring wins over what it costs in quality, one panel a batch."""

from __future__ import annotations

from pathlib import Path

from rewired.extras import needs
from rewired.model.wiring_text import NONE

from .ranking import Ranking

_COLOURS = ("#2e86ab", "#1b4965", "#e07a5f", "#b56576", "#81b29a", "#588157", "#6d597a", "#444444")
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)  # nats


def draw(plan: Ranking, path: Path) -> None:
    """Speedups with their ranges over KL; the dashed line is the bound, no communication at all."""
    with needs("convert", "A plot"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot writes a PNG: call it {path.with_suffix('.png')}.")
    batches = list(plan.caches)
    figure = Figure(figsize=(4.2 * len(batches) + 1.5, 4.2), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    kinds = list(dict.fromkeys(row.candidate.kind for row in plan.rows if row.candidate.is_rewired))
    for axes, batch in zip(panels, batches, strict=True):
        for row in plan.rows:
            if row.batch == batch and row.candidate.name == NONE:
                axes.axhline(row.speedup, color="#888888", ls="--", lw=1)
            if row.batch != batch or not row.candidate.is_rewired or row.quality is None:
                continue
            colour = _COLOURS[kinds.index(row.candidate.kind) % len(_COLOURS)]
            bars = [[row.speedup - row.low], [row.high - row.speedup]]
            face = colour if row.quality.is_refitted else "none"
            axes.errorbar([row.quality.kl], [row.speedup], yerr=bars, fmt="o", color=colour, mfc=face, ms=5, lw=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_TICKS))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(f"batch {batch}", fontsize="medium")
        axes.set_xlabel("KL, nats a token (open: as converted)")
        axes.spines[["top", "right"]].set_visible(False)
    for number, kind in enumerate(kinds):
        panels[0].plot([], [], "o", color=_COLOURS[number % len(_COLOURS)], label=kind)
    panels[0].set_ylabel(f"predicted speedup, {plan.request.goal}")
    panels[-1].legend(*panels[0].get_legend_handles_labels(), fontsize="small", frameon=False, loc="best")
    figure.savefig(path, dpi=120, metadata={"Software": ""})
