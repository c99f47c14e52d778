"""A checkpoint's tokenizer, loaded without any code that the checkpoint brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewired.loading import loading


def load_tokenizer(folder: Path, because: str = "") -> Any:
    """Raises ValueError where there is none, it is broken or it needs code of its own; the sentence says `because`."""
    from transformers import AutoTokenizer

    with loading(f"{folder} has no tokenizer that can be loaded{because}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
