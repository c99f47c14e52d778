"""Source archives (sdists) from where pip looks for packages.

pip cannot just download one: even with --no-deps it runs its setup.py, to learn what it depends on (pypa/pip#1884). So
the pages that pip would read are read here; they are PEP 503's.
"""

from __future__ import annotations

import ast
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import Request, url2pathname, urlopen

_PYPI = "https://pypi.org/simple"
_SUFFIX = ".tar.gz"
_TIMEOUT_SECONDS = 60


def download(requirement: str, folder: Path) -> Path:
    """The .tar.gz of a release such as "bigbench==1.0.0", downloaded into `folder`. Raises ValueError."""
    options = _pip_options()
    target = folder / (requirement.replace("==", "-") + _SUFFIX)
    reason = "none is there"
    for page in _pages(requirement.partition("==")[0], options):
        try:
            for address in _links(page, options):
                if _canonical(_file_name(address)) == _canonical(target.name):
                    with _open(address, options) as reader, target.open("wb") as writer:
                        shutil.copyfileobj(reader, writer)
                    return target
        except (OSError, HTTPException, ValueError) as error:  # ValueError: what is no address, or no text
            reason = str(error)
    raise ValueError(
        f"The source archive of {requirement} could not be downloaded from where pip looks ({reason}): check the "
        "connection, or put the file into a folder that PIP_FIND_LINKS names."
    )


def _pip_options() -> dict[str, str]:
    """What pip is told by its files and by the environment, which comes last; nothing where there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    options: dict[str, str] = {}
    for section in ("global.", "download.", ":env:."):
        entries = (line.removeprefix(section).split("=", 1) for line in lines if line.startswith(section))
        options |= {name: ast.literal_eval(value) for name, value in entries}
    return options


def _pages(project: str, options: dict[str, str]) -> Iterator[str]:
    """Where links to the project's files are: folders and pages first, then its page on each index."""
    yield from options.get("find-links", "").split()
    if options.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = [options.get("index-url", _PYPI), *options.get("extra-index-url", "").split()]
        yield from (f"{index.rstrip('/')}/{_canonical(project)}/" for index in indexes)


def _links(page: str, options: dict[str, str]) -> list[str]:
    """The addresses that a page links to, or those of a local folder's files."""
    parts = urlsplit(page)
    path = Path(url2pathname(parts.path)) if parts.scheme in ("", "file") else None
    if path and path.is_dir() and not (path / "index.html").is_file():
        return [file.absolute().as_uri() for file in path.iterdir()]
    if path:
        page = (path / "index.html" if path.is_dir() else path).absolute().as_uri()
    with _open(page, options) as reader:
        hrefs = re.findall(r"""<a\s[^>]*?href=["']([^"']+)""", reader.read().decode(), re.IGNORECASE)
        return [urljoin(reader.url, unescape(href)) for href in hrefs]


def _open(address: str, options: dict[str, str]) -> HTTPResponse:
    request = Request(address, headers={"Accept": "text/html, */*;q=0.1", "User-Agent": "rewired"})
    context = ssl.create_default_context(cafile=options.get("cert"))
    response: HTTPResponse = urlopen(request, timeout=_TIMEOUT_SECONDS, context=context)
    return response


def _file_name(address: str) -> str:
    return unquote(urlsplit(address).path).rsplit("/", 1)[-1]


def _canonical(name: str) -> str:
    """PEP 503's form of a project's name, and of a file's: old archives keep dots and capitals in theirs."""
    return re.sub(r"[-_.]+", "-", name).lower()
