"""Everything that only a GPU shows, in one command: tests, speed against stock Llama, a refit, kernels, trainings.

    make gpu               on a machine with one GPU and no network; results/gpu/
    make gpu DEVICE=cpu    the same with tiny shapes, to try it; build/gpu-cpu/

Each part is a process of its own with a limit of time, and writes what it has measured as it goes: one that fails or is
cut off takes nothing from the others. What a part leaves of its time, the next ones get.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import environment, problem
from report import markdown

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
OTHERS = ("ladder+peek", "parallel", "desync-4x", "partial-0.5")  # wirings
LOG, COMPILED = "log.txt", "inductor"


@dataclass(frozen=True)
class Part:
    """A script beside this one. `minutes` are kept for it, also where the parts before it would take more."""

    name: str
    minutes: float
    command: list[str]


def parts(device: str) -> list[Part]:
    """The important first."""
    is_gpu = device == "cuda"
    small = "llama-3.2-1b" if is_gpu else "tiny"
    timing = ["--prompt", "2048", "--new", "32", "--rounds", "7"] if is_gpu else ["--prompt", "64", "--new", "4"]
    speed = [*timing, "--wirings"]
    calibration = ["--tokens", "65536" if is_gpu else "2048"]
    sizes = [] if is_gpu else ["--tokens", "64", "--hidden", "1024", "--weights", str(1 << 17)]
    training = ["--rows", "4", "--length", "1024"] if is_gpu else ["--rows", "2", "--length", "64", "--steps", "3"]
    all_parts = [
        Part("tests", 2.0, ["run_tests.py"]),
        Part("speed-1b", 1.3, ["speed.py", small, *speed, "ladder"]),
        Part("speed-8b", 1.5, ["speed.py", "llama-3.1-8b", *speed, "ladder"]),
        Part("refit", 0.5, ["refit.py", small, *calibration]),
        Part("kernels", 0.5, ["kernel_speed.py", *sizes]),
        Part("training", 1.2, ["training.py", small, *training]),
        Part("speed-1b-others", 0.9, ["speed.py", small, *speed, *OTHERS]),
        Part("speed-8b-others", 1.1, ["speed.py", "llama-3.1-8b", *speed, *OTHERS]),
    ]
    return [part for part in all_parts if is_gpu or "8b" not in part.name]


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended, too
    chosen = [part for part in parts(args.device) if part.name in args.parts]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / LOG).write_text("")
    results: dict[str, Any] = {
        "command": shlex.join(["make", "gpu", *args.given]),
        "commit": args.commit,
        "environment": environment(args.device),
        "parts": {part.name: {"status": "not reached"} for part in chosen},
    }
    with tempfile.TemporaryDirectory(prefix="rewired-gpu-") as scratch:
        for number, part in enumerate(chosen):
            elapsed = time.monotonic() - started
            kept = 60 * sum(later.minutes for later in chosen[number + 1 :])
            limit = 60 * args.minutes - elapsed - kept
            results["parts"][part.name] = run(part, args, Path(scratch), elapsed, limit)
            results["seconds"] = round(time.monotonic() - started, 1)
            write(results, args.out)
    print(f"{results['seconds']:4.0f} s  {args.out / 'README.md'}")
    sys.exit(any(part["status"] not in ("passed", "skipped") for part in results["parts"].values()))


def parse_arguments() -> argparse.Namespace:
    names = [part.name for part in parts("cuda")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument("--minutes", type=float, help="that all may take (default 9, on a CPU 30)")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="(default all)")
    parser.add_argument("--out", type=Path, help="folder (default results/gpu, or build/gpu-cpu)")
    parser.add_argument("--commit", help="of this tree, where there is no git to say it")
    args = parser.parse_args()
    args.given = sys.argv[1:]
    args.out = args.out or REPO / ("results/gpu" if args.device == "cuda" else "build/gpu-cpu")
    args.minutes = args.minutes or (9.0 if args.device == "cuda" else 30.0)
    args.commit = args.commit or commit_of_tree()
    if why := problem(args.device):
        parser.error(why)
    return args


def commit_of_tree() -> str:
    command = ["git", "-C", str(REPO), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return done.stdout.strip() or "unknown" if done else "unknown"


def run(part: Part, args: argparse.Namespace, scratch: Path, elapsed: float, limit: float) -> dict[str, Any]:
    """What came of a part: its status, its seconds, and the data that it wrote."""
    print(f"{elapsed:4.0f} s  {part.name}: at most {limit:.0f} s", flush=True)
    if limit < 20:
        return {"status": "skipped", "why": "no time was left"}
    data = scratch / f"{part.name}.json"
    script, *options = part.command
    command = [sys.executable, str(HERE / script), *options, "--device", args.device, "--data", str(data)]
    started = time.monotonic()
    with (args.out / LOG).open("a") as output:
        output.write(f"\n=== {part.name}: {shlex.join([script, *options])}\n")
        output.flush()
        process = subprocess.Popen(
            command, cwd=REPO, env=surroundings(args.device, scratch), stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = "failed" if process.wait(limit) else "passed"
        except subprocess.TimeoutExpired:
            status = "cut off"
        finally:
            end(process)
    if status == "cut off":
        shutil.rmtree(scratch / COMPILED, ignore_errors=True)  # the next parts' compilers would load half a file
    outcome: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if data.exists():
        outcome["data"] = json.loads(data.read_text())
    if status != "passed":
        last = (args.out / LOG).read_text(errors="replace").splitlines()[-15:]
        print("\n".join(f"        {line}" for line in last))
    print(f"{elapsed + outcome['seconds']:4.0f} s  {part.name}: {status}", flush=True)
    return outcome


def end(process: subprocess.Popen[bytes]) -> None:
    """End what a part has started, and has left running."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def surroundings(device: str, scratch: Path) -> dict[str, str]:
    """The environment of all parts: this tree's packages, no network, caches that go with the run."""
    paths = [str(REPO / "src"), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch / "huggingface"),
        "REWIRED_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / COMPILED),
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if device == "cpu":
        changes |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }  # threads would wait for a busy machine's others
        if find_spec("triton"):
            changes["TRITON_INTERPRET"] = "1"
    return os.environ | changes


def write(results: dict[str, Any], out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
