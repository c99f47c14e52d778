"""Engines from what is published: `python -m studies.plan.fit` writes benchmarks.toml; studies.plan.score scores them.

Fitted are seventeen physical parameters (logarithms, by least squares) on the Ladder authors' runs of 70B and 8B, each
prefill and decoding against its own time, and on what their text says of other models. No parameter belongs to a model.
The priors are wide, and were chosen by hand with the same runs in view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rewired.model.presets import STANDARD

from . import caat_benchmark
from .ladder_benchmark import (
    HERE,
    NAME,
    NEW,
    Run,
    Seconds,
    predicted,
    published,
    speedups,
    standard_of,
    timed,
)

_PAGE = """# The engines of published benchmarks, as `python -m studies.plan.fit` fits them.

# The Ladder paper's benchmark: 70B and 8B on H100, and what its text says.
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
    "of_one": (0.8, 0.3),  # the share of overheads and slack that one sequence has
    "slack": (4e-6, 0.6),
    "network_step": (7e-6, 0.4),
    "hide": (0.4, 0.3),
    "slow_hide": (0.85, 0.1),
    "fused_saving": (4e-6, 0.5),
    "cache_passes": (1.0, 0.6),
    "score_passes": (12.0, 0.6),
    "base": (7e-6, 0.5),
    "step": (1.5e-6, 0.5),
    "far_step": (2.5, 0.4),  # times a near one
    "bandwidth": (18e9, 0.4),
    "switch_step": (4e-6, 0.5),
}
_OWN = (
    *("flops_share", "memory_share", "of_one", "slack", "network_step", "hide", "slow_hide"),
    *("fused_saving", "cache_passes", "score_passes"),
)
# What the paper's text says of other models, and how exactly: its tables of them are not in our copy. The two small
# ones are the models that the authors trained, whose sizes they do not give (shapes.toml).
TEXT = (
    *((Run("405b", batch, 16, True, "ladder"), 1.33, 0.05) for batch in (1, 4, 16)),  # "more than 30%"
    *((Run("405b", batch, 16, False, "ladder"), 1.50, 0.05) for batch in (1, 4, 16)),  # "around 50%"
    (Run("ladder-1b", 4, 8, True, "ladder"), 1.57, 0.05),  # "over 55%"
    (Run("ladder-3b", 4, 8, True, "ladder"), 1.57, 0.05),
    (Run("8b", 1, 8, True, "ladder@16-32"), 1.19, 0.04),  # "14.5%" in section 4.2, "23%" in section 7
)
UNSEEN = "desync-2x"  # the wiring whose runs no fit has seen
TIME_ERROR = 0.06  # how far off a time may be to count as one, as a share,
SPEEDUP_ERRORS = 0.05, 0.02, 0.012  # and a speedup: of prefill, decoding and both


def parameters(values: Mapping[str, float]) -> dict[str, Any]:
    """The table of benchmarks.toml that fitted `values` make, with the benchmark's habits."""
    overhead, part = values["overhead"], values["attention_part"]
    return {name: values[name] for name in _OWN} | {
        "attention_overhead": overhead * part,
        "mlp_overhead": overhead * (1 - part),
        "static_cache": 1536,
        "shards_head": False,
        "logits_of_prompt": True,
        "without_p2p": {
            **{name: values[name] for name in ("base", "step", "bandwidth", "switch_step")},
            "far_step": values["step"] * values["far_step"],
        },
    }


def fit(sees: Callable[[Run], bool] = lambda run: True) -> dict[str, Any]:
    """The parameters that come nearest to the priors and to the runs that the fit `sees`."""
    import numpy as np
    from scipy.optimize import least_squares

    def residuals(logs: Any) -> list[float]:
        values = {name: math.exp(log) for name, log in zip(PRIORS, logs, strict=True)}
        from_priors = [math.log(values[name] / prior) / error for name, (prior, error) in PRIORS.items()]
        return _errors(parameters(values), sees) + from_priors

    start = np.log([prior for prior, _ in PRIORS.values()])
    logs = least_squares(residuals, start, diff_step=1e-3, max_nfev=30).x
    return parameters({name: math.exp(log) for name, log in zip(PRIORS, logs, strict=True)})


def _errors(table: Mapping[str, Any], sees: Callable[[Run], bool]) -> list[float]:
    """In times of what each may be off: of raw runs, of published ones that are not among them, and of the text."""
    raw = [each for each in timed() if each.run.wiring != UNSEEN and sees(each.run)]
    in_raw = {each.run for each in timed()}
    others = [row for row in published() if row.run not in in_raw and sees(row.run)]
    said = [(run, speedup, error) for run, speedup, error in TEXT if sees(run)]
    runs = [each.run for each in (*raw, *others)] + [run for run, *_ in said]
    seconds = {run: predicted(run, table) for run in {*runs, *map(standard_of, runs)}}

    def faster(run: Run) -> tuple[float, float, float]:
        return speedups(seconds[standard_of(run)], seconds[run])

    off = [_log_error(seconds[each.run], (each.prefill, each.decode)) for each in raw]
    errors = [log / TIME_ERROR for pair in off for log in pair]
    for each in raw:
        if each.run.wiring != STANDARD:
            pairs = zip(faster(each.run), each.speedups, SPEEDUP_ERRORS, strict=True)
            errors += [(one - other) / error for one, other, error in pairs]
    for row in others:
        errors.append(math.log(row.run.batch * NEW / sum(seconds[row.run]) / row.tokens_per_second) / TIME_ERROR)
        errors.append((faster(row.run)[2] - row.speedup) / SPEEDUP_ERRORS[2])
    return errors + [(faster(run)[2] - speedup) / error for run, speedup, error in said]


def _log_error(own: Seconds, measured: Seconds) -> list[float]:
    return [math.log(one / other) for one, other in zip(own, measured, strict=True)]


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
    page = _PAGE.format(ladder=toml(NAME, fit()), caat=toml(caat_benchmark.NAME, caat_benchmark.fit()))
    (HERE / "benchmarks.toml").write_text(page, "utf-8")


if __name__ == "__main__":
    main()
