"""The picture results/bench-comm.png: a training step's seconds in every way of communication, from bench-comm.md.

.venv/bin/python studies/comm_report.py
"""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "results"
_HEADING = re.compile(r"bench_comm\.py --link (\S+)")
_ROW = re.compile(r"\| ([^|]+) \| (\d+\.\d+) \| (\d+\.\d+) \(")


def main() -> None:
    tables = _read((RESULTS / "bench-comm.md").read_text())
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    for axis, (link, ways) in zip(figure.subplots(1, len(tables)), tables.items(), strict=True):
        colours = ["lightgrey" if name == "no network" else "tab:blue" for name in ways]
        bars = axis.barh(list(ways), [seconds for seconds, _ in ways.values()], color=colours)
        axis.bar_label(bars, [f"{faster:.2f} x" for _, faster in ways.values()], padding=3, fontsize=8)
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.set_title(f"{link} between two nodes", fontsize=10)
        axis.set_xlabel("seconds a step (times as fast as FSDP2)")
    figure.savefig(RESULTS / "bench-comm.png", dpi=100)


def _read(page: str) -> dict[str, dict[str, tuple[float, float]]]:
    """By link, the seconds of each way, and how many times as fast as FSDP2 that is."""
    tables: dict[str, dict[str, tuple[float, float]]] = {}
    for line in page.splitlines():
        if heading := _HEADING.search(line):
            ways = tables.setdefault(heading[1], {})
        elif row := _ROW.match(line):
            ways[row[1]] = float(row[2]), float(row[3])
    return tables


if __name__ == "__main__":
    main()
