"""Traces of a prefill by each contender, and the timeline that they draw of the first rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from .contenders import NONE
from .trace import traced


@dataclass(frozen=True)
class Profile:
    """Where a prefill of so many sequences is traced to, by every contender on one link."""

    folder: Path
    batch: int

    def trace(self, models: Mapping[str, Any], tokens: torch.Tensor) -> None:
        """Run on every rank, which writes its own traces; `models` are by contender, and warm."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, model in models.items():
            if name != NONE:
                run = partial(model, tokens, logits_to_keep=1)
                run()
                distributed.barrier()
                traced(run, self.file(name, distributed.get_rank()))

    def draw(self, names: Iterable[str], title: str) -> Path:
        """Draw the first rank's timelines, next to the folder."""
        from .timeline import draw_timeline

        png = self.folder.parent / "timeline.png"
        draw_timeline({name: self.file(name, 0) for name in names if name != NONE}, png, title)
        return png

    def file(self, name: str, rank: int) -> Path:
        """Without the colon that a contender's name may have, and a file system may not."""
        return self.folder / f"{name.replace(':', '-')}.rank{rank}.json.gz"
