"""The keys of a recipe that are ours, beside those of TRL's SFTConfig."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trl import SFTConfig

from rewired.families import FAMILIES
from rewired.grid.size import TpSize
from rewired.model.wiring_text import parse_wiring
from rewired.text import MIX

from .companions import Companion
from .dataset_entry import DatasetEntry
from .unknown import check_known

LORA, SCRATCH = "lora", "scratch"
NO_REFIT = ("none", "false", "no")
_MINIMA = dict.fromkeys(("held_out", "cache_gathers"), 0) | dict.fromkeys(
    ("refit_tokens", "lora_r", "lora_alpha", "fsdp_size", "dp_replicate_size", "tp_size"), 1
)
_PROJECTIONS = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.linears))


def _key(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class Recipe:
    """The keys that `adapt` adds to TRL's SFTConfig. Raises ValueError for values that make no sense."""

    model: str = _key("", "A checkpoint: a folder, a hub id or a short name; dense or rewired.")
    wiring: list[dict] | str | None = _key(  # type: ignore[type-arg]  # noqa: RUF009
        None, "Rewire it first: ladder@16-32, or a list of {layers: 16-32, preset: ladder}."
    )
    init: Literal["scratch"] | None = _key(
        None, "scratch: random weights in the sizes of `model`, a checkpoint or a shape."
    )
    tokenizer: str | None = _key(None, "From scratch: a checkpoint whose tokenizer to take.")
    tp_shards: int | None = _key(None, "Logical tensor-parallel shards, as for convert.")
    refit: str | None = _key(
        None,
        "Text to refit on after rewiring: a file, a folder, a dataset, mix, or none. Recipes that distill "
        "take mix by default.",
    )
    refit_tokens: int = _key(32_768, "How many tokens to refit on.")
    retrain: bool = _key(False, "Rewire a model whose weights were trained or fitted to another wiring.")
    datasets: list[dict] | None = _key(  # type: ignore[type-arg]  # noqa: RUF009
        None, "What to train on: paths, or {path, name, split, weight, languages, sources}."
    )
    streaming: bool = _key(False, "Read datasets while training; needs max_steps.")
    skip_bad: bool = _key(False, "Leave bad rows out and count them.")
    held_out: int = _key(16, "How many rows only measure KL: each dataset's first, in equal shares.")
    train: Literal["all", "rewired", "norms_and_gains", "lora"] = _key("all", "Which weights learn.")
    lora_r: int = _key(16, "The rank of LoRA.")
    lora_alpha: int = _key(32, "The alpha of LoRA, which is scaled by alpha / rank.")
    lora_target_modules: list[str] | None = _key(  # noqa: RUF009
        None, "The projections that get LoRA; all seven of a layer by default."
    )
    load_in_4bit: bool = _key(False, "Hold the projections that LoRA does not train in 4 bits (NF4 of bitsandbytes).")
    fsdp_size: int = _key(1, "Ranks that the model is sharded over (FSDP2).")
    cache_gathers: int = _key(
        0, "How many of the last layers stay gathered from forward to backward, which takes memory."
    )
    dp_replicate_size: int = _key(1, "How many such groups there are, each with a model (HSDP).")
    tp_size: int = _key(1, "Ranks that share each layer's work (tensor parallelism); 2x2 is a grid of X x Y.")
    ce_weight: float = _key(1.0, "Weight of the cross-entropy with the data: SFT.")
    kd_weight: float = _key(0.0, "Weight of the divergence from the original.")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = _key("forward_kl", "Which divergence.")
    temperature: float = _key(1.0, "Temperature of both models' logits in the divergence.")
    hidden_weight: float = _key(0.0, "Weight of the stream's relative squared error after each rewired layer.")

    def __post_init__(self) -> None:
        self.tp_size = self.grid
        if self.from_scratch:
            self.held_out = 0  # there is no original to measure KL to
        if not self.model:
            raise ValueError("The recipe names no model: give model, a checkpoint's folder or hub id.")
        if not self.datasets:
            raise ValueError("The recipe names no datasets: give a list of paths.")
        self._check_numbers()
        self._check_combinations()
        self._check_init()
        if not isinstance(self.wiring, list | str | None):
            raise ValueError(f"wiring is {self.wiring!r}: give a text, such as ladder@16-32, or a list of regions.")
        _ = self.mix, self.regions  # raise for what makes no sense

    @property
    def regions(self) -> list[dict[str, Any]]:
        """Of the wiring, as config.json has them."""
        return parse_wiring(self.wiring) if isinstance(self.wiring, str) else self.wiring or []

    @property
    def from_scratch(self) -> bool:
        return self.init == SCRATCH

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole model."""
        return max(self.fsdp_size, self.tp_size, self.dp_replicate_size) > 1

    @property
    def grid(self) -> TpSize:
        """The ranks that share each layer's work, as a grid."""
        return TpSize.of(self.tp_size)

    @property
    def ranks(self) -> int:
        """The number of ranks that the model is split or replicated over."""
        return self.fsdp_size * self.dp_replicate_size * self.tp_size

    @property
    def refit_text(self) -> str | None:
        """The text to refit on after rewiring; for a recipe that distills, the packaged mix by default."""
        text = self.refit or (MIX if self.distills else NO_REFIT[0])
        return None if text.lower() in NO_REFIT else text

    @property
    def distills(self) -> bool:
        """Whether the original is needed to train."""
        return self.kd_weight > 0 or self.hidden_weight > 0

    @property
    def losses(self) -> list[str]:
        """The names of the losses that are logged in a distillation, cross-entropy always."""
        if not self.distills:
            return []
        weights = {"ce": 1.0, "kd": self.kd_weight, "hidden": self.hidden_weight}
        return [name for name, weight in weights.items() if weight]

    @property
    def mix(self) -> list[DatasetEntry]:
        entries = self.datasets if isinstance(self.datasets, list) else [self.datasets]
        return [DatasetEntry.from_recipe(entry) for entry in entries]

    def _check_numbers(self) -> None:
        for name in ("ce_weight", "kd_weight", "hidden_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more.")
        if not self.ce_weight + self.kd_weight + self.hidden_weight:
            raise ValueError("ce_weight, kd_weight and hidden_weight are all 0: there is nothing to minimise.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: give one above 0.")
        for name, minimum in _MINIMA.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} is {getattr(self, name)}: give {minimum} or more.")

    def _check_combinations(self) -> None:
        check_known(self.lora_target_modules or (), _PROJECTIONS, "lora_target_modules has the unknown projection")
        if self.load_in_4bit and self.train != LORA:
            raise ValueError("load_in_4bit is for frozen weights beside adapters: say train: lora.")
        if self.load_in_4bit and self.grid.y > 1:
            raise ValueError(
                f"tp_size {self.grid} is a grid, which splits no weights in 4 bits: give tp_size {int(self.grid)}, or "
                "leave load_in_4bit out."
            )
        if self.cache_gathers and self.fsdp_size == 1:
            raise ValueError("cache_gathers keeps layers that FSDP2 has gathered: give fsdp_size, too.")

    def _check_init(self) -> None:
        if self.tokenizer and not self.from_scratch:
            raise ValueError("tokenizer is for a model from scratch: say init: scratch, or leave it out.")
        if self.from_scratch and (self.distills or self.refit_text or self.train != "all"):
            raise ValueError(
                "A model from scratch has no original to learn from, or to fit to, and no weights to keep: with init: "
                "scratch, leave kd_weight, hidden_weight, refit and train out."
            )


@dataclass(frozen=True)
class Stage:
    """One training; a recipe without `stages` has one."""

    recipe: Recipe
    config: SFTConfig
    given: dict[str, Any]  # the keys in the file and on the command line; all others have their defaults
    companions: tuple[Companion, ...] = ()
