"""The divergence of a rewired model's predictions from the original's, which several rooms measure with.

A few thousand tokens show what takes a benchmark thousands of items, since every token compares two whole
distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

TOP = (1, 5, 10)
POSITIONS = tuple(2**power for power in range(6, 18))  # where parts of a window begin, after the first
_CHUNK = 128  # positions whose float32 distributions are held at once


@dataclass(frozen=True)
class Divergence:
    """Over all predicted tokens of a text; KL in nats."""

    tokens: int
    perplexity_original: float
    perplexity: float
    kl: float  # mean of KL(original || rewired)
    kl_standard_error: float | None  # over windows; None where there is one
    kl_p95: float
    agreement: dict[int, float]  # k -> share of the original's k likeliest tokens that are among the other's
    kl_by_position: dict[int, float] = field(default_factory=dict)  # in windows, from each position to the next one
    same_top_standard_error: float | None = None  # of `agreement` on the likeliest; over windows, as of KL


@torch.no_grad()
def divergence(
    original: Callable[[torch.Tensor], torch.Tensor],
    rewired: Callable[[torch.Tensor], torch.Tensor],
    windows: torch.Tensor | Sequence[torch.Tensor],
    on_window: Callable[[], None] = lambda: None,
) -> Divergence:
    """The divergence of `rewired` from `original`, functions from input_ids [1, T] to logits [1, T, V].

    `windows` are [W, T], or of different lengths. The logits of one window are in memory at a time.
    """
    compared = []
    for window in windows:
        compared.append(_in_chunks(original(window[None])[0, :-1], rewired(window[None])[0, :-1], window[1:]))
        on_window()
    return _summary(compared)


def _in_chunks(*predicted: torch.Tensor) -> np.ndarray:  # [T, 3 + len(TOP)]
    chunks = zip(*(each.split(_CHUNK) for each in predicted), strict=True)
    return torch.cat([_compare(*chunk) for chunk in chunks]).cpu().numpy()


def _compare(logits_original: torch.Tensor, logits_rewired: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[T, V], [T, V], [T] -> [T, 3 + len(TOP)]: both losses, the KL divergence, and agreement at each k of TOP."""
    ours, theirs = logits_original.float().log_softmax(-1), logits_rewired.float().log_softmax(-1)
    losses = [-log_probs.gather(-1, targets.to(ours.device)[:, None])[:, 0] for log_probs in (ours, theirs)]
    kl = (ours.exp() * (ours - theirs)).sum(-1)
    most = min(TOP[-1], ours.shape[-1])
    first, second = ours.topk(most).indices, theirs.topk(most).indices  # [T, most]
    shared = [(first[:, :k, None] == second[:, None, :k]).any(-1).float().mean(-1) for k in TOP]
    return torch.stack([*losses, kl, *shared], dim=-1)


def _summary(windows: Sequence[np.ndarray]) -> Divergence:  # each [T - 1, 3 + len(TOP)]
    by_token = np.concatenate(windows).astype(np.float64)
    means = by_token.mean(axis=0)
    kls, same_top = ([window[:, column] for window in windows] for column in (2, 3))
    return Divergence(
        tokens=len(by_token),
        perplexity_original=float(np.exp(means[0])),
        perplexity=float(np.exp(means[1])),
        kl=float(means[2]),
        kl_standard_error=_standard_error(kls),
        kl_p95=float(np.percentile(by_token[:, 2], 95)),
        agreement={k: float(mean) for k, mean in zip(TOP, means[3:], strict=True)},
        kl_by_position=_by_position(kls),
        same_top_standard_error=_standard_error(same_top),
    )


def _by_position(windows: Sequence[np.ndarray]) -> dict[int, float]:  # each [T - 1]
    longest = max(map(len, windows))
    starts = [0, *(start for start in POSITIONS if start < longest)]
    parts = [
        np.concatenate([window[start:end] for window in windows])
        for start, end in zip(starts, [*starts[1:], longest], strict=True)
    ]
    return {start: float(part.mean(dtype=np.float64)) for start, part in zip(starts, parts, strict=True)}


def _standard_error(windows: Sequence[np.ndarray]) -> float | None:
    """Of the mean over the tokens of several windows, each [T - 1]; tokens of one window are not independent."""
    if len(windows) == 1:
        return None
    lengths = np.array([len(window) for window in windows])
    means = np.array([window.mean(dtype=np.float64) for window in windows])
    shares = lengths / lengths.sum()
    spread = (shares * (means - shares @ means)) ** 2
    return float(np.sqrt(spread.sum() * len(windows) / (len(windows) - 1)))
