"""Names that are not known, and which known one is like them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any


def check_known(names: Iterable[Any], known: Collection[str], where: str) -> None:
    """Raise ValueError, which begins with `where`, for the first of `names` that is not `known`."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(known)}."
            raise ValueError(f"{where} '{name}': {hint}")
