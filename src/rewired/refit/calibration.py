"""Calibration text as windows of tokens, some of which are held out: fits are chosen by their errors on those."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from typing import Any

import torch

from rewired.text import MIX
from rewired.text.conversations import Document
from rewired.text.documents import shuffled, sources
from rewired.text.windows import WINDOW, Cutter

from .cost import FIRST, HELD_OUT

_LEAST_SHARE = 4  # windows of a file; those that give fewer are read as one


@dataclass(frozen=True)
class Calibration:
    """Windows of tokens, and which of them are held out."""

    windows: torch.Tensor  # [W, T], int64
    held_out: tuple[bool, ...]  # of each window
    name: str  # as a model card says it

    @property
    def tokens(self) -> int:
        return self.windows.numel()

    @property
    def held_out_tokens(self) -> int:
        return sum(self.held_out) * self.windows.shape[1]

    def texts(self, held_out: bool) -> list[torch.Tensor]:
        """The windows that are held out, or the others, [W, T]; and some of their tokens as texts of their own, [S, 1].

        A text's first token is what later ones attend to most, and its stream is like no other. Windows have too few of
        them to fit that, unless all begin with the same one. A token alone is the same text wherever it is from: those
        that are held out are tokens that the fit does not see alone, no fewer of a window where it has so many.
        """
        is_held_out = torch.tensor(self.held_out)
        fitted, unfitted = self.windows[~is_held_out], self.windows[is_held_out]
        windows = unfitted if held_out else fitted
        if bool((self.windows[:, 0] == self.windows[0, 0]).all()):
            return [windows]
        alone = fitted.flatten()[::FIRST]
        if held_out:
            unseen = unfitted[~torch.isin(unfitted, alone)]
            alone = unseen[:: max(len(unseen) * FIRST // unfitted.numel(), 1)]
        return [windows, alone[:, None]] if len(alone) else [windows]

    @property
    def sha256(self) -> str:
        """Of the tokens, and of which windows are held out."""
        return hashlib.sha256(self.windows.numpy().tobytes() + bytes(self.held_out)).hexdigest()


def load(text: str, tokenizer: Any, tokens: int, context: int = WINDOW) -> Calibration:
    """At most `tokens` tokens, but at least two windows, of `text`: a file, a folder, a dataset on the hub, or `mix`.

    Windows are no longer than a model's `context`. Files share them equally, and what short ones lack the others give.
    One window in eight is held out, the last ones of each file, so that at most one of its documents is on both sides.
    Raises ValueError where there is no such text, or too little of it.
    """
    cutter = Cutter(tokenizer, min(WINDOW, context))
    most = max(tokens // cutter.length, 2)
    shares = _shared_out(_groups(sources(text), cutter, most), cutter, most)
    counts = _held_out_counts([len(windows) for windows in shares])
    if not counts:
        raise ValueError(
            f"{text} is too short to calibrate on: it has to have {2 * cutter.length} tokens at least, in "
            "conversations that the model's chat template takes or in plain text."
        )
    held_out = [
        number >= len(windows) - count
        for windows, count in zip(shares, counts, strict=True)
        for number in range(len(windows))
    ]
    name = "the packaged mix of prose, chat and lists" if text == MIX else text
    return Calibration(torch.stack([window for windows in shares for window in windows]), tuple(held_out), name)


@dataclass(frozen=True)
class _Group:
    """Files that are read as one."""

    documents: list[Document]
    files: int = 1


def _groups(files: list[list[Document]], cutter: Cutter, most: int) -> list[_Group]:
    """A file is a group, but for those whose share is short, and for those of one document each where they are many:
    of a group's documents the last ones are held out."""
    if len(files) == 1:
        return [_Group(files[0])]
    share = most // len(files)
    are_many = sum(len(documents) == 1 for documents in files) >= HELD_OUT
    is_joined = [
        (are_many and len(documents) == 1) or len(cutter.spread(documents, share)) < _LEAST_SHARE for documents in files
    ]
    if sum(is_joined) < 2:
        return [_Group(documents) for documents in files]
    joined = list(compress(files, is_joined))
    in_turn = zip_longest(*shuffled(joined))
    together = [document for row in in_turn for document in row if document is not None]
    alone = [_Group(documents) for documents, joins in zip(files, is_joined, strict=True) if not joins]
    return [*alone, _Group(together, len(joined))]


def _shared_out(groups: Sequence[_Group], cutter: Cutter, most: int) -> list[list[torch.Tensor]]:
    """The windows of each, `most` in all where they have so many."""
    share = most // sum(group.files for group in groups)
    wanted = [share * group.files for group in groups]
    shares = [cutter.spread(group.documents, count) for group, count in zip(groups, wanted, strict=True)]
    while missing := most - sum(map(len, shares)):
        longer = [number for number, windows in enumerate(shares) if len(windows) == wanted[number]]
        if not longer:
            break
        for place, number in enumerate(longer):
            wanted[number] += missing // len(longer) + (place < missing % len(longer))
            shares[number] = cutter.spread(groups[number].documents, wanted[number])
    return shares


def _held_out_counts(counts: list[int]) -> list[int]:
    """How many of the windows of each file are held out, one in eight of all; empty where none would be left to fit."""
    wanted, held_out = max(sum(counts) // HELD_OUT, 1), [0] * len(counts)
    if sum(counts) < 2:
        return []
    while sum(held_out) < wanted:
        # of the file that has most left for each that it has given
        number = max(range(len(counts)), key=lambda n: (counts[n] - held_out[n]) / (held_out[n] + 1))
        held_out[number] += 1
    return held_out
