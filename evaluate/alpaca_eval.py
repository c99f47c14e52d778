"""AlpacaEval: answers in the format of its own tool, and the verdict of its judge where the tool is installed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from rewired.extras import not_installed

from .answers import Logs

TASK = "alpaca_eval"
JUDGE = "weighted_alpaca_eval_gpt4_turbo"  # AlpacaEval 2's, as in the Ladder paper
_KEY = "OPENAI_API_KEY"
# in an environment of its own: its data is a script, which our `datasets` does not run, and it imports pkg_resources
_INSTALL = "pipx install --preinstall 'datasets<4' --preinstall 'setuptools<81' alpaca_eval"


def write_outputs(logs: Logs, generator: str, file: Path) -> None:
    """The model's answers in `alpaca_eval`'s format."""
    outputs = [
        {
            "dataset": log["doc"]["dataset"],
            "instruction": log["doc"]["instruction"],
            "output": log["responses"][0],
            "generator": generator,
        }
        for log in logs
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(outputs, indent=1, ensure_ascii=False), encoding="utf-8")


def judge(file: Path) -> str:
    """The judge's verdict on the outputs in `file` or, without the tool or a key, the command that gives it."""
    command = ["alpaca_eval", "--model_outputs", str(file), "--annotators_config", JUDGE]
    needed = {
        not_installed("AlpacaEval's judge", "alpaca_eval", _INSTALL): shutil.which(command[0]),
        f"AlpacaEval's judge needs a key: export {_KEY}=...": os.environ.get(_KEY),
    }
    missing = [sentence for sentence, is_there in needed.items() if not is_there]
    if missing:
        return f"{'; '.join(missing)}; then: {shlex.join(command)}"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        return f"AlpacaEval's judge failed ({last}): {shlex.join(command)}"
    return done.stdout.strip()
