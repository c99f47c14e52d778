"""The README of a run: what was run on which machine, and a table for each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

GOAL = 0.85  # of the bound, for compiled decoding at batch 1
KERNEL_GOAL = 0.7  # of a copy's bandwidth
MEASURES = {"prefill": "prefill ms", "decode": "token ms, eager", "decode_compiled": "token ms, compiled"}
BASELINE = "SFT, stock Llama, TRL"

Data = Mapping[str, Any]


def markdown(results: Data) -> str:
    machine = dict(results["environment"])
    device = machine.pop("device")
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "date")
    title = "On a GPU" if "cuda" in machine else "A trial of `make gpu` without a GPU: these figures say nothing"
    blocks = [
        f"# {title}",
        f"`{results['command']}`, {machine['date']}, commit {results['commit']}; {device}; {facts}. "
        f"{results['seconds']:.0f} s in all.",
        table(["part", "outcome", "s"], [outcome(name, part) for name, part in results["parts"].items()]),
    ]
    for name, part in results["parts"].items():
        if "data" in part:
            section = next(make for prefix, make in SECTIONS.items() if name.startswith(prefix))
            blocks += section(part["data"])
    return "\n\n".join(blocks) + "\n"


def outcome(name: str, part: Data) -> list[str]:
    """A part that was cut off has measured what its section shows."""
    status = part["status"] + (f": {part['why']}" if "why" in part else "")
    log = "" if status == "passed" or "seconds" not in part else " ([log](log.txt))"
    return [name, status + log, f"{part['seconds']:.0f}" if "seconds" in part else ""]


def tests(data: Data) -> Iterator[str]:
    found = data["outcomes"]
    counts = Counter(each["outcome"] for each in found.values())
    yield "## Tests"
    yield ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name]) + "."
    failed = [f"- `{name}`: {each['why']}" for name, each in found.items() if each["outcome"] == "failed"]
    if failed:
        yield "\n".join(failed)
    files = Counter((name.split("::")[0], each["outcome"], each["why"]) for name, each in found.items())
    rows = [
        [file, kind, str(count), why if kind == "skipped" else ""]
        for (file, kind, why), count in sorted(merged(files).items())
    ]
    yield table(["file", "outcome", "tests", "why"], rows)


def merged(files: Counter[tuple[str, str, str]]) -> Counter[tuple[str, str, str]]:
    """Only of skipped tests does the reason make a line of its own."""
    lines = Counter[tuple[str, str, str]]()
    for (file, kind, why), count in files.items():
        lines[file, kind, why if kind == "skipped" else ""] += count
    return lines


def speed(data: Data) -> Iterator[str]:
    bound = data["bytes_per_token"] / data["bandwidth"]
    yield f"## Speed, {data['model']}"
    yield (
        f"Batch 1, a prompt of {data['prompt']} tokens, {data['new']} new ones, random bfloat16 weights. Medians of "
        f"{data['rounds']} interleaved rounds, ± half of the quartiles' distance; x is the speedup over stock Llama, "
        f"the median of the rounds' own ratios. A token takes {data['bytes_per_token'] / 1e9:.2f} GB of weights and "
        f"cache, and a copy moves {data['bandwidth'] / 1e12:.3f} TB/s: no token can take less than "
        f"{1e3 * bound:.3g} ms, the bound."
    )
    headings = [heading for title in MEASURES.values() for heading in (title, "x")]
    yield table(["wiring", *headings, "of the bound"], [speed_cells(row, bound) for row in data["rows"]])
    yield "\n".join(goal(row, bound) for row in data["rows"] if row["wiring"] in ("stock", "standard", "ladder"))


def speed_cells(row: Data, bound: float) -> list[str]:
    cells = [row["wiring"]]
    for measure in MEASURES:
        middle, (low, high) = row[f"{measure}_seconds"], row[f"{measure}_quartiles"]
        cells += [f"{1e3 * middle:.3g} ±{50 * (high - low) / middle:.0f}%", f"{row['speedup'][measure]['stock']:.3f}"]
    return [*cells, f"{bound / row['decode_compiled_seconds']:.0%}"]


def goal(row: Data, bound: float) -> str:
    share = bound / row["decode_compiled_seconds"]
    verdict = "reached" if share >= GOAL else "missed"
    return f"- {row['wiring']}, compiled: {share:.0%} of the bound; the goal of {GOAL:.0%} is {verdict}."


def refit(data: Data) -> Iterator[str]:
    yield f"## Refit, {data['model']}"
    yield (
        f"The upper half of {data['layers']} layers of random weights, on windows of random tokens. The walk is the "
        "refit itself, and all seconds those of `convert`, which also reads, hashes and writes the weights; the first "
        "one pays for what it loads. Passes are forward passes of the original over the same tokens."
    )
    yield table(
        ["wiring", "tokens", "walk, s", "all, s", "passes", "KL converted", "KL refitted"],
        [refit_cells(row) for row in data["rows"]],
    )


def refit_cells(row: Data) -> list[str]:
    seconds = (f"{row[name]:.1f}" for name in ("layers_seconds", "seconds", "passes"))
    return [row["preset"], f"{row['tokens']:,}", *seconds, f"{row['kl_converted']:.3g}", f"{row['kl']:.3g}"]


def kernels(data: Data) -> Iterator[str]:
    yield "## Kernels of what is quantised"
    yield (
        f"A payload of {data['tokens']:,} tokens of {data['hidden']:,} channels in bfloat16 on one of eight ranks; a "
        f"layer of {data['weights']:,} weights on one of two nodes' sixteen. MB are what goes in and comes out, and a "
        "copy is of as many; medians, and that of the rounds' own ratios, all three in turns."
    )
    headings = ["step", "bits", "MB", "ms", "of a copy's bandwidth", "ms, eager", "equal to eager"]
    yield table(headings, [kernel_cells(row) for row in data["rows"]])
    reached = sum(row["of_a_copy"] >= KERNEL_GOAL for row in data["rows"])
    yield f"{reached} of {len(data['rows'])} reach the goal of {KERNEL_GOAL:.0%} of a copy's bandwidth."


def kernel_cells(row: Data) -> list[str]:
    sizes = [f"{row['bytes'] / 1e6:.1f}", f"{1e3 * row['kernel']:.3g}", f"{row['of_a_copy']:.0%}"]
    return [row["step"], str(row["bits"]), *sizes, f"{1e3 * row['eager']:.3g}", "yes" if row["same"] else "no"]


def training(data: Data) -> Iterator[str]:
    yield f"## Training, {data['model']}"
    yield (
        f"Random float32 weights, {data['rows_per_step']} rows of {data['length']} tokens a step: forward, backward, "
        f"AdamW; the median of {data['steps']} steps and its quartiles. `adapt` has liger-kernel's losses where an "
        "original teaches, and not in SFT."
    )
    done = [row for row in data["rows"] if "tokens_per_second" in row]
    base = next((row["tokens_per_second"] for row in done if row["training"] == BASELINE and not row["liger"]), None)
    yield table(
        ["training", "liger-kernel", "tokens/s", "of TRL's", "peak GB"], [training_cells(row, base) for row in done]
    )
    missing = [
        f"- {row['training']}, {'with' if row['liger'] else 'without'} liger-kernel, {how}: {row[how]}"
        for row in data["rows"]
        for how in ("skipped", "failed")
        if how in row
    ]
    if missing:
        yield "\n".join(missing)


def training_cells(row: Data, base: float | None) -> list[str]:
    slow, fast = row["quartiles"]
    rate = f"{row['tokens_per_second']:,.0f} ({slow:,.0f} to {fast:,.0f})"
    ratio = f"{row['tokens_per_second'] / base:.2f}" if base else ""
    memory = f"{row['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in row else ""
    return [row["training"], "yes" if row["liger"] else "no", rate, ratio, memory]


SECTIONS: dict[str, Callable[[Data], Iterator[str]]] = {
    "tests": tests, "speed": speed, "refit": refit, "kernels": kernels, "training": training,
}  # fmt: skip


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(headings), "|".join(["---"] * len(headings)), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if line != lines[1] else f"|{line}|" for line in lines)
