"""A naive refit, from design section 4 alone: the naive model's stream, module by module, and numpy's least squares.

It shares nothing with the package; the stream and the modules are those of `tests/rewired/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from tests.rewired.reference import (
    STANDARD,
    Answers,
    Stream,
    answers_by_module,
    attention,
    layer_weights,
    mlp,
    rms_norm,
    rotary_table,
)

Streams = Sequence[Sequence[Stream]]  # those that are fitted on, and those that judge

INPUTS = {"attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "mlp": ("mlp.gate_proj", "mlp.up_proj")}
OUTPUT = {"attn": "self_attn.o_proj", "mlp": "mlp.down_proj"}
GAIN = {"attn": "input_gain", "mlp": "post_attention_gain"}
NORM = {"attn": "input_layernorm", "mlp": "post_attention_layernorm"}


def reference_refit(
    state_dict: dict[str, Tensor],
    config: LlamaConfig,
    wiring: Sequence[dict[str, Any]],
    tp_shards: int,
    fit_on: Sequence[Tensor],  # texts of one length each, [B, T]
    judge: Sequence[Tensor],
    input_ridges: Sequence[float],
    output_ridges: Sequence[float],
    pull: float,  # the share of what their stream lacks that those who are fitted on are given, after each module
    fits_gains: bool = False,
) -> dict[str, Tensor]:
    """The weights after one sweep, and gains if they are fitted too, in float64.

    What is fitted is each module that `wiring` names, and each other one that reads a stream with local parts.
    """
    fitted = {name: tensor.double() for name, tensor in state_dict.items()}
    original = dict(fitted)
    wired = answers_by_module(wiring, config)
    first = min(layer for layer, _ in wired)
    embedding = fitted["model.embed_tokens.weight"]
    starts = [[F.embedding(input_ids, embedding) for input_ids in texts] for texts in (fit_on, judge)]
    ours, theirs = ([[Stream(start, tp_shards) for start in some] for some in starts] for _ in range(2))
    for layer in range(config.num_hidden_layers):
        for kind in ("attn", "mlp"):
            answers, prefix = wired.get((layer, kind), STANDARD), f"model.layers.{layer}."
            for stream in chain(*theirs):
                run(stream, layer_weights(original, layer), config, kind, STANDARD)
            gain = None
            if (layer, kind) in wired or has_local_parts(ours[0][0]):
                if fits_gains and answers.peek and any(part.any() for part in own_parts(ours[0][0], answers)):
                    gain = fitted_gain(answers, ours, theirs)
                    fitted[f"{prefix}{GAIN[kind]}.weight"] = gain
                fit_what_it_reads(fitted, prefix, config, kind, answers, gain, ours, theirs, input_ridges)
                fit_what_it_writes(fitted, prefix, config, layer, kind, answers, gain, ours, theirs, output_ridges)
            for stream in chain(*ours):
                following = (layer, "mlp") if kind == "attn" else (layer + 1, "attn")
                delay = wired.get(following, STANDARD).delay
                run(stream, layer_weights(fitted, layer), config, kind, answers, gain, delay)
            if layer >= first:
                for stream, other in zip(ours[0], theirs[0], strict=True):
                    missing = everything(other) - everything(stream)
                    stream.S = [settled + pull * missing for settled in stream.S]
    return fitted


def has_local_parts(stream: Stream) -> bool:
    return any(bool(part.any()) for part in stream.d)


def own_parts(stream: Stream, answers: Answers) -> list[Tensor]:
    """d^k, and q^k where the module does not wait for it."""
    return [stream.parts(k, answers.delay)[1] for k in range(stream.r)]


def fitted_gain(answers: Answers, ours: Streams, theirs: Streams) -> Tensor:  # [r, H]
    """<u_c, z^k_c> / <z^k_c, z^k_c> on tokens weighted by 1 / rms; ones where that is no better on the judges."""

    def pair(stream: Stream, other: Stream) -> tuple[Tensor, Tensor]:  # [r, N, H], [N, H]
        scale = 1 / everything(other).square().mean(-1, keepdim=True).sqrt()
        own = torch.stack([scale * part for part in own_parts(stream, answers)])
        settled, _ = stream.parts(0, answers.delay)
        return own.flatten(1, 2), (scale * (everything(stream) - settled)).flatten(0, 1)

    (own, missing), (judged_own, judged) = (
        tuple(torch.cat(parts, -2) for parts in zip(*map(pair, *some), strict=True))
        for some in zip(ours, theirs, strict=True)
    )
    gain = (own * missing).sum(1) / own.square().sum(1)
    gain = torch.where(own.square().sum(1) > 0, gain, 1.0)
    errors = [(judged - g[:, None] * judged_own).square().mean() for g in (gain, torch.ones_like(gain))]
    return gain if errors[0] < errors[1] else torch.ones_like(gain)


def fit_what_it_reads(
    fitted: dict[str, Tensor],
    prefix: str,
    config: LlamaConfig,
    kind: str,
    answers: Answers,
    gain: Tensor | None,
    ours: Streams,
    theirs: Streams,
    ridges: Sequence[float],
) -> None:
    """W_k <- W_k diag(gamma) M_k^T and gamma <- 1, M_k from n(view^k) to n(fresh), of an MLP's neurons placed anew."""
    gamma, ones = fitted[f"{prefix}{NORM[kind]}.weight"], torch.ones(config.hidden_size, dtype=torch.float64)
    deltas, judged = [], []
    for k in range(ours[0][0].r):
        pairs = []
        for some in ours:
            x = torch.cat([rms_norm(stream.read(k, answers, gain), ones, config).flatten(0, 1) for stream in some])
            y = torch.cat([rms_norm(everything(stream), ones, config).flatten(0, 1) for stream in some])
            pairs.append((x, y - x))
        deltas.append(best(*pairs, ridges))
        x, y = pairs[1]
        judged.append((x if deltas[-1] is None else x + x @ deltas[-1], x + y))
    if kind == "mlp" and any(not torch.equal(x, judged[0][0]) for x, _ in judged):
        rms = torch.cat([everything(stream).square().mean(-1).sqrt().flatten() for stream in theirs[1]])
        place(fitted, f"{prefix}mlp.", gamma, [x for x, _ in judged], judged[0][1], rms)
    if all(delta is None for delta in deltas):
        return
    fitted[f"{prefix}{NORM[kind]}.weight"] = ones
    for name in INPUTS[kind]:
        rows = (fitted[f"{prefix}{name}.weight"] * gamma).chunk(len(deltas))
        new = [
            row if delta is None else row @ (torch.eye(len(ones)) + delta).T
            for row, delta in zip(rows, deltas, strict=True)
        ]
        fitted[f"{prefix}{name}.weight"] = torch.cat(new)


def place(
    fitted: dict[str, Tensor], prefix: str, gamma: Tensor, views: Sequence[Tensor], fresh: Tensor, rms: Tensor
) -> None:
    """Neurons change ranks, two at a time, as long as what each adds comes closer to what it is on the fresh stream;
    and all change back if what they add together does not."""
    gate, up, down = (fitted[f"{prefix}{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    hidden = [F.silu((x * gamma) @ gate.T) * ((x * gamma) @ up.T) for x in (*views, fresh)]
    sizes = down.square().sum(0)
    errors = [
        [float((((h - hidden[-1])[:, j] / rms) ** 2).sum() * sizes[j]) for j in range(len(sizes))] for h in hidden
    ]
    at = [list(block) for block in torch.arange(len(sizes)).chunk(len(views))]
    before, total = float("inf"), sum(errors[k][j] for k, neurons in enumerate(at) for j in neurons)
    while total < before:
        for a, b in combinations(range(len(at)), 2):
            while True:
                i = max(at[a], key=lambda j: errors[a][j] - errors[b][j])
                j = max(at[b], key=lambda j: errors[b][j] - errors[a][j])
                if errors[a][i] + errors[b][j] <= errors[b][i] + errors[a][j]:
                    break
                at[a].remove(i), at[b].remove(j)
                at[a].append(j), at[b].append(i)
        before, total = total, sum(errors[k][j] for k, neurons in enumerate(at) for j in neurons)

    def wrong(at: Sequence[Sequence[int]]) -> float:
        missing = sum((h - hidden[-1])[:, list(js)] @ down[:, list(js)].T for h, js in zip(hidden, at, strict=False))
        return float((missing / rms[:, None]).square().sum())

    if wrong(at) >= wrong(torch.arange(len(sizes)).chunk(len(views))):
        return
    order = torch.tensor([int(j) for neurons in at for j in sorted(neurons)])
    fitted |= {f"{prefix}gate_proj.weight": gate[order], f"{prefix}up_proj.weight": up[order]}
    fitted[f"{prefix}down_proj.weight"] = down[:, order]


def fit_what_it_writes(
    fitted: dict[str, Tensor],
    prefix: str,
    config: LlamaConfig,
    layer: int,
    kind: str,
    answers: Answers,
    gain: Tensor | None,
    ours: Streams,
    theirs: Streams,
    ridges: Sequence[float],
) -> None:
    """W_o += ridge(h -> what the stream lacks), tokens weighted by 1 / rms of the original's stream."""
    weights = layer_weights(fitted, layer)

    def pair(stream: Stream, other: Stream) -> tuple[Tensor, Tensor]:  # [N, A], [N, H]
        h = sum(module_outputs(stream, weights, config, kind, answers, gain, only_hidden=True))
        after = deepcopy(stream)
        run(after, weights, config, kind, answers, gain)
        scale = 1 / everything(other).square().mean(-1, keepdim=True).sqrt()
        return (scale * h).flatten(0, 1), (scale * (everything(other) - everything(after))).flatten(0, 1)

    pairs = [
        tuple(torch.cat(parts) for parts in zip(*map(pair, *some), strict=True))
        for some in zip(ours, theirs, strict=True)
    ]
    delta = best(*pairs, ridges)
    if delta is not None:
        stays = {"all": 10**9, "none": 0, "shared": answers.shared_channels}[answers.reduce]
        share = ours[0][0].r if answers.merge == "mean" else 1  # of which a mean takes one
        delta[:, stays:] *= share
        fitted[f"{prefix}{OUTPUT[kind]}.weight"] = fitted[f"{prefix}{OUTPUT[kind]}.weight"] + delta.T


def best(fit_on: tuple[Tensor, Tensor], judge: tuple[Tensor, Tensor], ridges: Sequence[float]) -> Tensor | None:
    """The ridge solution with the least error on `judge`; None if that is no better than none."""
    x, y = (tensor.numpy() for tensor in fit_on)
    found: Tensor | None = None
    least = judge[1].square().sum()
    for ridge in ridges:
        penalty = np.sqrt(ridge * np.square(x).sum(0).mean()) * np.eye(x.shape[1])
        rows = np.vstack([x, penalty]), np.vstack([y, np.zeros((x.shape[1], y.shape[1]))])
        delta = torch.from_numpy(np.linalg.lstsq(*rows, rcond=None)[0])
        error = (judge[0] @ delta - judge[1]).square().sum()
        if error < least:
            found, least = delta, error
    return found


def everything(stream: Stream) -> Tensor:
    """What was contributed so far, reduced or as it will be folded."""
    left = (flight.e_scale * part for flight in stream.flights for part in flight.e)
    return stream.parts(0, 0)[0] + sum(stream.d_folded) + sum(left)


def run(
    stream: Stream,
    weights: dict[str, Tensor],
    config: LlamaConfig,
    kind: str,
    answers: Answers,
    gain: Tensor | None = None,
    next_delay: int = 0,
) -> None:
    stream.write(module_outputs(stream, weights, config, kind, answers, gain), answers, next_delay)


def module_outputs(
    stream: Stream,
    weights: dict[str, Tensor],
    config: LlamaConfig,
    kind: str,
    answers: Answers,
    gain: Tensor | None,
    only_hidden: bool = False,
) -> list[Tensor]:
    """Each rank's partial output or, with `only_hidden`, its part of what the last projection is given."""
    if only_hidden:
        name = f"{OUTPUT[kind]}.weight"
        weights = weights | {name: torch.eye(weights[name].shape[1], dtype=torch.float64)}
    outputs = []
    for k in range(stream.r):
        x = rms_norm(stream.read(k, answers, gain), weights[f"{NORM[kind]}.weight"], config)
        if kind == "attn":
            rotary = tuple(table.double() for table in rotary_table(config, x, x.shape[1]))
            outputs.append(attention(x, weights, config, rotary, k, stream.r))
        else:
            outputs.append(mlp(x, weights, k, stream.r))
    return outputs
