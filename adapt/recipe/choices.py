"""The values that a recipe's `train` and `divergence` may have."""

from __future__ import annotations

from collections.abc import Callable

LORA = "lora"
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")  # computed in losses/token_loss.py


def _everything(name: str, rewired: tuple[str, ...]) -> bool:
    return True


def _in_rewired_layers(name: str, rewired: tuple[str, ...]) -> bool:
    return name.startswith(rewired)


def _norms_and_gains(name: str, rewired: tuple[str, ...]) -> bool:
    return name.startswith(rewired) and name.endswith(("norm.weight", "gain.weight"))


# whether a parameter is trained, by its name and the prefixes of those in rewired layers
CHOICES: dict[str, Callable[[str, tuple[str, ...]], bool]] = {
    "all": _everything,
    "rewired": _in_rewired_layers,
    "norms_and_gains": _norms_and_gains,
}
