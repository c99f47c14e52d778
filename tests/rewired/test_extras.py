"""Missing extras: one sentence, with a command that works for this installation."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rewired import extras
from rewired.extras import install_command, needs


@pytest.fixture
def installed_from(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that pip recorded another origin of the installation; None is an index."""

    class Installed:
        def __init__(self, origin: dict[str, Any] | None) -> None:
            self.origin = origin

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if self.origin is None else json.dumps(self.origin)

    return lambda origin: monkeypatch.setattr(extras, "distribution", lambda name: Installed(origin))


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'rewired[gguf]'"),
        ({"url": "file:///my%20src/rewired", "dir_info": {"editable": True}}, "pip install -e '/my src/rewired[gguf]'"),
        ({"url": "file:///src/rewired", "dir_info": {}}, "pip install '/src/rewired[gguf]'"),
        (
            {"url": "https://host/rewired.git", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'rewired[gguf] @ git+https://host/rewired.git'",
        ),
        (
            {"url": "file:///dist/rewired-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'rewired[gguf] @ file:///dist/rewired-0.1.0-py3-none-any.whl'",
        ),
    ],
)
def test_the_command_is_for_where_it_was_installed_from(
    origin: dict[str, Any] | None, command: str, installed_from: Any
) -> None:
    installed_from(origin)
    assert install_command("gguf") == command


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, installed_from: Any) -> None:
    installed_from(None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    sentence = r"^Reading it needs the package 'gguf', which is not installed: pip install 'rewired\[gguf\]'$"
    with pytest.raises(ValueError, match=sentence), needs("gguf", "Reading it"):
        import gguf  # noqa: F401


def test_a_fault_of_ours_is_no_missing_package() -> None:
    with pytest.raises(ImportError), needs("gguf", "Reading it"):
        from rewired import nothing_of_this_name  # noqa: F401
