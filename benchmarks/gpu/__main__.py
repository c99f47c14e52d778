"""Everything that only a GPU shows, in one command: tests, wirings among emulated ranks, kernels, a refit,
trainings.

    make gpu               on a machine with one GPU and no network; results/gpu/
    make gpu DEVICE=cpu    the same with tiny shapes, to try it; build/gpu-cpu/

Each part is a process of its own with a limit of time, and writes what it has measured as it goes: one that fails or is
cut off takes nothing from the others. What a part leaves of its time, the next ones get.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TRANSFORMERS = (5, 17)  # at least
NEEDED = ("safetensors", "huggingface_hub", "typer", "rich", "peft", "pytest", "hypothesis", "scipy")
OPTIONAL = ("triton", "trl", "datasets", "flash-attn")
WIRINGS = ("ladder", "ladder+peek", "parallel", "desync-4x", "partial-0.5", "ladder+int8")
LOG = "log.txt"


@dataclass
class Part:
    """A script beside this one. `minutes` are kept for it, also where the parts before it would take more."""

    name: str
    minutes: float
    command: list[str]
    outcome: str = "not reached"
    seconds: float = 0.0
    section: str = ""  # what it wrote; one that was cut off has measured what that shows


def parts(device: str) -> list[Part]:
    """The important first."""
    is_gpu = device == "cuda"
    small, large = ("llama-3.2-1b", "llama-3.1-70b") if is_gpu else ("tiny", "tiny")
    alone = [] if is_gpu else ["--layers", "2", "--prompt", "64", "--new", "4", "--rounds", "3"]
    sizes = [] if is_gpu else ["--tokens", "64", "--hidden", "1024", "--weights", str(1 << 17)]
    calibration = ["--tokens", "65536" if is_gpu else "2048"]
    training = ["--rows", "4", "--length", "1024"] if is_gpu else ["--rows", "2", "--length", "64", "--steps", "3"]
    return [
        Part("tests", 2.3, ["run_tests.py"]),
        Part("emulated", 3.8, ["emulated.py", large, *alone, "--wirings", *WIRINGS]),
        Part("kernels", 0.7, ["kernel_speed.py", *sizes]),
        Part("refit", 0.7, ["refit.py", small, *calibration]),
        Part("training", 1.5, ["training.py", small, *training]),
    ]


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended, too
    chosen = [part for part in parts(args.device) if part.name in args.parts]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / LOG).write_text("")
    with tempfile.TemporaryDirectory(prefix="rewired-gpu-") as scratch:
        for number, part in enumerate(chosen):
            elapsed = time.monotonic() - started
            kept = 60 * sum(later.minutes for later in chosen[number + 1 :])
            limit = 60 * args.minutes - elapsed - kept
            print(f"{elapsed:4.0f} s  {part.name}: at most {limit:.0f} s", flush=True)
            if limit < 20:
                part.outcome = "skipped: no time was left"
            else:
                run(part, args, Path(scratch, part.name), limit)
            elapsed = time.monotonic() - started
            print(f"{elapsed:4.0f} s  {part.name}: {part.outcome}", flush=True)
            (args.out / "README.md").write_text(page(chosen, args, elapsed), encoding="utf-8")
    sys.exit(any(part.outcome in ("failed", "cut off") for part in chosen))


def parse_arguments() -> argparse.Namespace:
    names = [part.name for part in parts("cuda")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument("--minutes", type=float, help="that all may take (default 9, on a CPU 30)")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="(default all)")
    parser.add_argument("--out", type=Path, help="folder (default results/gpu, or build/gpu-cpu)")
    parser.add_argument("--commit", default="unknown", help="of this tree")
    args = parser.parse_args()
    args.out = args.out or REPO / ("results/gpu" if args.device == "cuda" else "build/gpu-cpu")
    args.minutes = args.minutes or (9.0 if args.device == "cuda" else 30.0)
    if why := problem(args.device):
        parser.error(why)
    return args


def problem(device: str) -> str | None:
    """Why nothing can be run here, None if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here; make gpu DEVICE=cpu tries everything with tiny shapes."
    found, how = installed("transformers"), "CONTRIBUTING.md says how to bring it."
    if found is None or tuple(map(int, found.split(".")[:2])) < TRANSFORMERS:
        wanted = ".".join(map(str, TRANSFORMERS))
        return f"transformers {wanted} is needed and {found or 'none'} is here: {how}"
    missing = [package for package in NEEDED if not find_spec(package)]
    return f"{', '.join(missing)} is needed here: {how}" if missing else None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run(part: Part, args: argparse.Namespace, scratch: Path, limit: float) -> None:
    """`scratch` goes with the run: half a file that a part leaves when it is cut off is not the next one's."""
    scratch.mkdir()
    section = scratch / "section.md"
    script, *options = part.command
    command = [sys.executable, str(HERE / script), *options, "--device", args.device, "--section", str(section)]
    started = time.monotonic()
    with (args.out / LOG).open("a") as output:
        output.write(f"\n=== {part.name}: {shlex.join([script, *options])}\n")
        output.flush()
        process = subprocess.Popen(
            command, cwd=REPO, env=surroundings(args.device, scratch), stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            part.outcome = "failed" if process.wait(limit) else "passed"
        except subprocess.TimeoutExpired:
            part.outcome = "cut off"
        finally:
            with suppress(ProcessLookupError):  # nothing that it started is left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    part.seconds = time.monotonic() - started
    part.section = section.read_text(encoding="utf-8") if section.exists() else ""
    if part.outcome != "passed":
        last = (args.out / LOG).read_text(errors="replace").splitlines()[-15:]
        print("\n".join(f"        {line}" for line in last))


def surroundings(device: str, scratch: Path) -> dict[str, str]:
    """The environment of a part: no network, caches that go with the run."""
    changes = {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "huggingface"),
        "REWIRED_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if device == "cpu":
        # threads would wait for a busy machine's others
        changes |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if find_spec("triton"):
            changes["TRITON_INTERPRET"] = "1"
    return os.environ | changes


def page(chosen: list[Part], args: argparse.Namespace, seconds: float) -> str:
    """The parts' outcomes and sections, and where they ran."""
    from rewired.bench.run import machine
    from rewired.tables import markdown

    facts = machine(args.device) | {name: found for name in OPTIONAL if (found := installed(name))}
    where = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    title = "On a GPU" if args.device == "cuda" else "A trial of `make gpu` without a GPU: these figures say nothing"
    command = shlex.join(["make", "gpu", *sys.argv[1:]])
    outcomes = [[part.name, part.outcome, f"{part.seconds:.0f}"] for part in chosen]
    ran = f"{date.today().isoformat()}, commit {args.commit}; {facts['device']}; {where}. {seconds:.0f} s in all."
    blocks = [
        f"# {title}\n",
        f"`{command}`, {ran}\n",
        markdown(["part", f"outcome ([log]({LOG}))", "s"], outcomes),
        *(part.section for part in chosen if part.section),
    ]
    return "\n".join(blocks)


if __name__ == "__main__":
    main()
