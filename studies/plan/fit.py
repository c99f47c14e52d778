"""Engines from what is published: `python -m studies.plan.fit` writes benchmarks.toml, with --score what it is worth.

Fitted are sixteen physical parameters (logarithms, by least squares) on the Ladder authors' 70B runs and on what their
text says of other models. No parameter belongs to a model or a batch. The priors are wide, and were chosen by hand with
the same runs in view. `--score` leaves out each run in turn, and whole groups of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewired.model.presets import STANDARD

from . import caat_benchmark
from .ladder_benchmark import (
    HERE,
    NAME,
    PublishedSpeed,
    Run,
    predicted_speedup,
    predicted_speedups,
    published,
    timed,
    tokens_per_second,
)

_PAGE = """# The engines of published benchmarks, as `python -m studies.plan.fit` fits them.

# The Ladder paper's benchmark: 70B on H100, and what its text says.
{ladder}

# CAAT-Net's benchmark: its 70B on Gaudi 3.
{caat}
"""

# name: (prior, its standard deviation in the logarithm)
PRIORS = {
    "flops_share": (0.6, 0.25),
    "memory_share": (0.9, 0.1),
    "overhead": (28e-6, 0.5),  # of a layer
    "attention_part": (0.6, 0.15),  # of it
    "slack": (4e-6, 0.6),
    "network_step": (7e-6, 0.4),
    "hide": (0.84, 0.08),
    "hide_loss": (0.06, 0.5),
    "copied_hide_loss": (0.06, 0.5),
    "fused_saving": (4e-6, 0.5),
    "cache_passes": (3.0, 0.6),
    "base": (15e-6, 0.5),
    "step": (1.5e-6, 0.5),
    "far_step": (2.5, 0.4),  # times a near one
    "bandwidth": (27e9, 0.4),
    "far_bandwidth": (1.7, 0.4),  # times smaller than a near one
}
_OWN = ("flops_share", "memory_share", "slack", "network_step", "hide", "hide_loss", "fused_saving", "cache_passes")
# What the paper's text says of other models, and how exactly: its tables of them are not in our copy. The two small
# ones are the models that the authors trained, whose sizes they do not give (shapes.toml).
TEXT = (
    *((Run("405b", batch, 16, True, "ladder"), 1.33, 0.05) for batch in (1, 4, 16)),  # "more than 30%"
    *((Run("405b", batch, 16, False, "ladder"), 1.50, 0.05) for batch in (1, 4, 16)),  # "around 50%"
    (Run("ladder-1b", 4, 8, True, "ladder"), 1.57, 0.05),  # "over 55%"
    (Run("ladder-3b", 4, 8, True, "ladder"), 1.57, 0.05),
    (Run("8b", 1, 8, True, "ladder@16-32"), 1.19, 0.04),  # "14.5%" in section 4.2, "23%" in section 7
)
THROUGHPUT_ERROR, SPEEDUP_ERROR = 0.04, 0.01  # how far off a run may be to count as one


def parameters(values: Mapping[str, float]) -> dict[str, Any]:
    """The table of benchmarks.toml that fitted `values` make, with the benchmark's habits."""
    overhead, part = values["overhead"], values["attention_part"]
    return {name: values[name] for name in _OWN} | {
        "attention_overhead": overhead * part,
        "mlp_overhead": overhead * (1 - part),
        "hide_least": 0.6,
        "static_cache": 1536,
        "score_passes": 4.0,
        "shards_head": False,
        "logits_of_prompt": True,
        "without_p2p": {
            "base": values["base"],
            "step": values["step"],
            "far_step": values["step"] * values["far_step"],
            "bandwidth": values["bandwidth"],
            "far_bandwidth": values["bandwidth"] / values["far_bandwidth"],
            "hide_loss": values["copied_hide_loss"],
            "up_to_here": 256 * 1024,
            "up_to_across": 4 * 1024 * 1024,
            "nvls_slack": 10e-6,
        },
    }


def fit(rows: Sequence[PublishedSpeed], text: Sequence[tuple[Run, float, float]] = TEXT) -> dict[str, Any]:
    """The parameters that come nearest to `rows`, to the paper's `text` and to the priors."""
    import numpy as np
    from scipy.optimize import least_squares

    def residuals(logs: Any) -> list[float]:
        values = {name: math.exp(log) for name, log in zip(PRIORS, logs, strict=True)}
        table = parameters(values)
        return (
            [error for row in rows for error in _errors(row, table)]
            + [(predicted_speedup(run, table) - said) / error for run, said, error in text]
            + [math.log(values[name] / prior) / error for name, (prior, error) in PRIORS.items()]
        )

    start = np.log([prior for prior, _ in PRIORS.values()])
    logs = least_squares(residuals, start, diff_step=1e-3).x
    return parameters({name: math.exp(log) for name, log in zip(PRIORS, logs, strict=True)})


def _errors(row: PublishedSpeed, table: Mapping[str, Any]) -> list[float]:
    throughput = math.log(tokens_per_second(row.run, table) / row.tokens_per_second) / THROUGHPUT_ERROR
    if row.run.wiring == STANDARD:
        return [throughput]
    return [throughput, (predicted_speedup(row.run, table) - row.speedup) / SPEEDUP_ERROR]


def points(rows: Sequence[PublishedSpeed], table: Mapping[str, Any] | None = None) -> list[float]:
    """Predicted less published speedups of all but standard runs, in points."""
    rewired = [row for row in rows if row.run.wiring != STANDARD]
    return [100 * (predicted_speedup(row.run, table) - row.speedup) for row in rewired]


def left_out(group: Callable[[PublishedSpeed], Any]) -> list[float]:
    """Points off of each run, by a fit that saw nothing of the runs in its group."""
    rows = published()
    keys = dict.fromkeys(group(row) for row in rows if row.run.wiring != STANDARD)
    off: list[float] = []
    for key in keys:
        held_out = [row for row in rows if group(row) == key]
        off += points(held_out, fit([row for row in rows if group(row) != key]))
    return off


def said_left_out(model: str) -> dict[Run, float]:
    """Points off of what the paper's text says of a model, by a fit that saw nothing of it."""
    table = fit(published(), [said for said in TEXT if said[0].model != model])
    return {run: 100 * (predicted_speedup(run, table) - said) for run, said, _ in TEXT if run.model == model}


GROUPS: Mapping[str, Callable[[PublishedSpeed], Any]] = {
    "each run": lambda row: row.run,
    "each wiring": lambda row: row.run.wiring,
    "each number of GPUs": lambda row: row.run.tp,
    "each batch": lambda row: row.run.batch,
}


def mean_absolute(off: Sequence[float]) -> float:
    return sum(map(abs, off)) / len(off)


def toml(name: str, table: Mapping[str, Any]) -> str:
    """A table and its subtables."""
    lines = [f"[{name}]"]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", toml(f"{name}.{key}", value)]
        else:
            lines.append(f"{key} = {f'{value:.4g}' if isinstance(value, float) else str(value).lower()}")
    return "\n".join(lines)


def main() -> None:
    table, caat = fit(published()), caat_benchmark.fit()
    if "--score" in sys.argv[1:]:
        _score(table, caat)
        return
    page = _PAGE.format(ladder=toml(NAME, table), caat=toml(caat_benchmark.NAME, caat))
    (HERE / "benchmarks.toml").write_text(page, "utf-8")


def raw_errors(table: Mapping[str, Any] | None = None) -> dict[tuple[bool, str], tuple[int, list[float], list[float]]]:
    """By NVLink and wiring: how many raw runs, and how far off their speedups are in prefill, decoding and both, in
    points: the mean absolute error of each, and the mean."""
    off: dict[tuple[bool, str], list[list[float]]] = {}
    for each in timed():
        if each.run.wiring != STANDARD:
            pairs = zip(predicted_speedups(each.run, table), each.speedups, strict=True)
            off.setdefault((each.run.nvlink, each.run.wiring), []).append([100 * (one - other) for one, other in pairs])
    return {
        key: (
            len(rows),
            [mean_absolute(part) for part in zip(*rows, strict=True)],
            [sum(part) / len(part) for part in zip(*rows, strict=True)],
        )
        for key, rows in off.items()
    }


def _score_raw(table: Mapping[str, Any]) -> None:
    for (nvlink, wiring), (runs, absolute, mean) in sorted(raw_errors(table).items()):
        parts = ", ".join(
            f"{part} {error:.1f} ({bias:+.1f})"
            for part, error, bias in zip(("prefill", "decode", "both"), absolute, mean, strict=True)
        )
        print(f"Ladder authors' raw runs, {'NVLink' if nvlink else 'no P2P'}, {wiring}, {runs}: {parts}")


def _score(table: Mapping[str, Any], caat: Mapping[str, Any]) -> None:
    _score_raw(table)
    print(f"Ladder benchmark, fitted runs: {mean_absolute(points(published(), table)):.2f} points of speedup")
    runs = caat_benchmark.published()
    for model, tp in dict.fromkeys((run.model, run.tp) for run in runs):
        off = caat_benchmark.points([run for run in runs if (run.model, run.tp) == (model, tp)], caat)
        seen = "fitted" if model == caat_benchmark.FITTED else "held out"
        print(f"CAAT-Net benchmark, {model} at TP {tp}, {seen}: {mean_absolute(off):.2f} points of time saved")
    for model in dict.fromkeys(run.model for run, *_ in TEXT):
        off = list(said_left_out(model).values())
        print(f"Ladder paper, text on {model} left out: {mean_absolute(off):.2f} points of speedup", flush=True)
    for name, group in GROUPS.items():
        print(f"Ladder benchmark, {name} left out in turn: {mean_absolute(left_out(group)):.2f}", flush=True)


if __name__ == "__main__":
    main()
