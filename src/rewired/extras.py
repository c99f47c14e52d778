"""Optional dependencies: one sentence for whatever is not installed, with the command that installs it here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from urllib.parse import urlsplit
from urllib.request import url2pathname


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Raise ValueError where an import inside fails, since `what` needs the packages of `extra` of pyproject.toml."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "rewired"):  # a fault of ours, not a missing package
            raise
        raise ValueError(missing(extra, what, package)) from None


def missing(extra: str, what: str, package: str) -> str:
    """The sentence for `what`, which needs `package` of `extra`."""
    return f"{what} needs the package '{package}', which is not installed: {install_command(extra)}"


def install_command(extra: str) -> str:
    """The `pip install` that adds `extra` to this installation of rewired, wherever it came from (PEP 610)."""
    recorded = distribution("rewired").read_text("direct_url.json")
    if recorded is None:  # from an index
        return f"pip install {shlex.quote(f'rewired[{extra}]')}"
    origin = json.loads(recorded)
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        folder = url2pathname(urlsplit(origin["url"]).path)
        return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
    address = f"{origin['vcs_info']['vcs']}+{origin['url']}" if "vcs_info" in origin else origin["url"]
    return f"pip install {shlex.quote(f'rewired[{extra}] @ {address}')}"
