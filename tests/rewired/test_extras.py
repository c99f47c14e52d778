"""Missing extras: one sentence, with the command that installs them."""

from __future__ import annotations

import sys

import pytest

from rewired.extras import needs


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    sentence = (
        r"^Reading it needs the package 'gguf', which is not installed: pip install -e '\.\[gguf\]' in rewired's clone$"
    )
    with pytest.raises(ValueError, match=sentence), needs("gguf", "Reading it"):
        import gguf  # noqa: F401


def test_a_fault_of_ours_is_no_missing_package() -> None:
    with pytest.raises(ImportError), needs("gguf", "Reading it"):
        from rewired import nothing_of_this_name  # noqa: F401
