"""The commands as a user runs them, each in a process of its own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from rewired import ranks, scripts

WIDE = {"COLUMNS": "200"}
READ_AT_IMPORT = ("HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_MODULES_CACHE")


def read_at_import(variables: Mapping[str, str]) -> list[str | None]:
    """What Hugging Face's packages do not read again."""
    return [variables.get(name) for name in READ_AT_IMPORT]


_IMPORTED_WITH = read_at_import(os.environ)


def run(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """An installed command: `run("convert", source, "--ladder-layers", "2-4", cwd=folder)`.

    A new interpreter imports for seconds, so the command runs in a fork of the process that ranks are forked from,
    unless `environment` would make it import something else.
    """
    words = [str(Path(sys.executable).parent / arguments[0]), *map(str, arguments[1:])]
    variables = os.environ | WIDE | environment
    if read_at_import(variables) != _IMPORTED_WITH:
        return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=variables)
    with TemporaryDirectory() as folder:
        printed = [Path(folder, name) for name in ("stdout", "stderr")]
        ranks._start_server()
        process = get_context("forkserver").Process(target=_run_forked, args=(words, cwd, variables, printed))
        process.start()
        process.join()
        return subprocess.CompletedProcess(words, process.exitcode or 0, *(path.read_text() for path in printed))


def _run_forked(words: list[str], cwd: Path, variables: dict[str, str], printed: list[Path]) -> None:
    gc.freeze()
    for number, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = words
    getattr(scripts, Path(words[0]).name)()
