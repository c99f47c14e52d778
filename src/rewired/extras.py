"""Optional dependencies: one sentence for whatever is not installed, with the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
    return (
        f"{what} needs the package '{package}', which is not installed: pip install -e '.[{extra}]' in rewired's clone"
    )
