"""Tiny releases of the project `parcel`, in a folder that stands for PyPI."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from rewired.cache import sha256
from rewired.packages import Package


def use_as_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip look nowhere but there, and give us a cache of our own beside it."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("REWIRED_CACHE", str(folder.parent / "cache"))


def make_sdist(folder: Path, members: Mapping[str, str], *special: tarfile.TarInfo) -> Package:
    """A source archive of these members, its name in an old style, and of members that are no regular files."""
    path = folder / "Parcel-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as sdist:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            sdist.addfile(info, io.BytesIO(text.encode()))
        for info in special:
            sdist.addfile(info)
    return Package("parcel==1.0", sha256(path), 12, "a parcel", is_sdist=True)


def make_wheel(folder: Path, members: Mapping[str, str]) -> Package:
    """A wheel of these members."""
    path = folder / "parcel-1.0-py3-none-any.whl"
    metadata = {"METADATA": "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n", "WHEEL": "Wheel-Version: 1.0\n"}
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**members, **{f"parcel-1.0.dist-info/{name}": metadata[name] for name in metadata}}.items():
            wheel.writestr(name, text)
    return Package("parcel==1.0", sha256(path), 12, "a parcel")
