"""Weights that cross nodes as 4-bit differences to what the other node holds, against weights in 8 bits.

    .venv/bin/python studies/weight_differences.py     # writes results/comm-smollm2/differences.md; minutes

A short distillation of SmolLM2-135M as in comm_smollm2.py, but in one process, of some layers' matrices alone. After
each step they are sent in several ways, and what a receiver holds then is compared with what they are. All begin as 8
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from comm_smollm2 import FOLDER, MADE, PLAIN, RANKS, ROW, prepare
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewired.model.quantisation import pack, unpack
from rewired.text import MIX
from rewired.text.documents import sources
from rewired.text.windows import Cutter

STEPS, WARMUP, LEARNING_RATE = 40, 20, 1e-4
LAYERS = (0, 14, 15, 29)
BLOCK = 128
Replica = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # held, before, now -> held


def rounded(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    return unpack(pack(numbers.view(-1, BLOCK), bits), bits, torch.float32).view_as(numbers)


WAYS: dict[str, Replica] = {
    "8 bits": lambda held, before, now: rounded(now, 8),
    "4 bits": lambda held, before, now: rounded(now, 4),
    "4-bit differences to the weights before": lambda held, before, now: held + rounded(now - before, 4),
    "4-bit differences to what is held, in float32": lambda held, before, now: held + rounded(now - held, 4),
    "the same, held in bfloat16": lambda held, before, now: (held + rounded(now - held, 4)).bfloat16().float(),
}
IN_NODE = "the same, sent on inside the node in 8 bits"


def main() -> None:
    prepare()
    student, teacher = (AutoModelForCausalLM.from_pretrained(MADE / name) for name in (f"{PLAIN}/start", "original"))
    matrices = [p for n in LAYERS for p in student.model.layers[n].parameters() if p.ndim == 2]
    student.requires_grad_(False)
    for matrix in matrices:
        matrix.requires_grad_(True)
    optimizer = torch.optim.AdamW(matrices, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / WARMUP, 1.0))
    cutter = Cutter(AutoTokenizer.from_pretrained(MADE / "original"), ROW)
    rows = torch.stack([window for each in sources(MIX) for window in cutter.in_order(each, STEPS)])
    before = [matrix.detach().clone() for matrix in matrices]
    held = {way: [rounded(matrix, 8) for matrix in before] for way in WAYS}
    errors = {way: list[float]() for way in (*WAYS, IN_NODE)}
    moved = list[float]()
    for step in range(STEPS):
        distil(student, teacher, rows[step::STEPS][:RANKS])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        now = [matrix.detach().clone() for matrix in matrices]
        moved.append(relative(before, now))
        for way, send in WAYS.items():
            held[way] = [send(*each) for each in zip(held[way], before, now, strict=True)]
            errors[way].append(relative(held[way], now))
        errors[IN_NODE].append(relative([rounded(each, 8) for each in held["the same, held in bfloat16"]], now))
        before = now
        print(step + 1, f"{moved[-1]:.5%}", *(f"{each[-1]:.4%}" for each in errors.values()), flush=True)
    write(errors, moved)


def distil(student: torch.nn.Module, teacher: torch.nn.Module, rows: torch.Tensor) -> None:
    with torch.no_grad():
        target = teacher(rows).logits.log_softmax(-1)
    loss = kl_div(student(rows).logits.log_softmax(-1), target, log_target=True, reduction="sum") / rows.numel()
    loss.backward()


def relative(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The root mean square of all errors over that of all numbers."""
    errors = sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True))
    return (errors / sum(float(other.square().sum()) for other in expected)) ** 0.5


def write(errors: dict[str, list[float]], moved: list[float]) -> None:
    steps = [n for n in (1, 2, 3, 5, 10, 20, 40) if n <= STEPS]
    rows = [("what a step changes", moved), *errors.items()]
    cells = [f"| {name} | {' | '.join(f'{each[n - 1]:.4%}' for n in steps)} |" for name, each in rows]
    text = _PAGE.format(
        block=BLOCK,
        layers=", ".join(map(str, LAYERS)),
        warmup=WARMUP,
        rate=LEARNING_RATE,
        head=" | ".join(f"step {n}" for n in steps),
        line="---|" * (len(steps) + 1),
        rows="\n".join(cells),
    )
    (Path(FOLDER) / "differences.md").write_text(text)


_PAGE = """# Weights as differences

`python studies/weight_differences.py`: after each step of a distillation of SmolLM2-135M (a ladder in layers 15
to 30, AdamW, learning rate {rate}, reached after {warmup} steps), the matrices of layers {layers}, which alone are
trained, as a receiver has them, sent in blocks of {block}. Error relative to the weights, both as root mean squares.

| | {head} |
|{line}
{rows}
"""


if __name__ == "__main__":
    main()
