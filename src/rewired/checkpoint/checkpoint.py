"""A checkpoint folder on disk, its content checked before anything is written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rewired.families import family_of
from rewired.model.family import Family
from rewired.model.wiring import Wiring
from rewired.sources.adapters import check_none_beside, missing_config

from .quantised import ENTRY, check_method, knows_method, missing, schemes
from .records import check_records, check_rope, check_tokens, check_windows
from .safetensors_header import TensorInfo, read_header
from .shape import Shape, source_wiring

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A model's config, shape and wiring, and, once `weights` were checked, its tensors and their files."""

    folder: Path
    config: dict[str, Any]
    shape: Shape
    wiring: Wiring

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads config.json only. Raises ValueError without one of a sound model, and for a PEFT adapter."""
        if not (folder / "config.json").is_file():
            raise ValueError(missing_config(folder, str(folder)))
        check_none_beside(folder)
        config = read_json(folder / "config.json")
        shape = Shape.from_config(config)
        wiring = source_wiring(config, shape)
        check_rope(config)
        if shape.family.has_windows:
            check_windows(config, shape.num_hidden_layers)
        check_records(config, shape.num_key_value_heads)
        check_method(config)
        return cls(folder, config, shape, wiring)

    @property
    def is_rewired(self) -> bool:
        return bool(self.config["model_type"] != self.shape.family.model_type)

    @property
    def is_quantised(self) -> bool:
        return bool(self.config.get(ENTRY))

    @property
    def tp_shards(self) -> int | None:
        """The number of logical shards that the config records; None for a dense one."""
        return self.config.get("tp_shards")

    def shards(self, asked: int | None = None) -> int:
        """The logical shards of a model made of it: those `asked` for, or its own, or else the shape's default.

        Raises ValueError where one of the model's sizes is no multiple of them.
        """
        shards = next(r for r in (asked, self.tp_shards, self.shape.default_shards()) if r is not None)
        self.shape.check_shards(shards)
        return shards

    @property
    def dtype(self) -> str:
        """What the config says its weights are."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16")

    def weight_files(self) -> list[Path]:
        """The safetensors files, in order. Raises ValueError if there are none or one is missing or outside."""
        named = self.config.get("transformers_weights")  # transformers would load these instead of what is checked here
        if named not in (None, SINGLE, INDEX):
            raise ValueError(
                f"config.json takes the weights from {named!r} (transformers_weights), and only {SINGLE} and {INDEX} "
                "are read: rename that file, and remove the entry."
            )
        if (self.folder / INDEX).is_file():
            names = sorted(set(self._weight_map().values()))
            if SINGLE not in names and os.path.lexists(self.folder / SINGLE):
                raise ValueError(
                    f"{self.folder} holds {SINGLE}, which transformers would load, and {INDEX} of other files: remove "
                    f"{SINGLE}, or {INDEX} and the files that it names."
                )
            for name in names:
                if not name.endswith(".safetensors") or ".." in name or "/" in name:
                    raise ValueError(
                        f"{self.folder / INDEX} names '{name}', which is not a .safetensors file of its folder."
                    )
            return [inside(self.folder, name) for name in names]
        if os.path.lexists(self.folder / SINGLE):
            return [inside(self.folder, SINGLE)]
        pickled = [path.name for pattern in _PICKLED for path in self.folder.glob(pattern)]
        if pickled:
            raise ValueError(
                f"{self.folder} holds only pickled weights ({pickled[0]}), and loading a pickle can run any code: "
                "save it as safetensors first, with model.save_pretrained(folder), or take a revision that has them."
            )
        raise ValueError(f"{self.folder} holds no weights: neither {SINGLE} nor {INDEX} is there.")

    def tensors(self, may_be_quantised: bool = False) -> dict[str, TensorInfo]:
        """Every tensor of every file.

        Raises ValueError unless all that the config implies is there, once, and in as many bits as is asked for.
        """
        if not may_be_quantised:
            self.check_unquantised()
        tensors: dict[str, TensorInfo] = {}
        for path in self.weight_files():
            for name, info in read_header(path).items():
                if name in tensors:
                    raise ValueError(f"Tensor '{name}' is in both {tensors[name].file} and {path.name}: remove one.")
                tensors[name] = info
        self._check_index(tensors)
        self._check_shapes(tensors)
        return tensors

    def check_unquantised(self) -> None:
        """Raise ValueError for quantised weights, where those of 16 or 32 bits are needed."""
        if self.is_quantised:
            raise ValueError(
                f"This checkpoint's weights are quantised ({'; '.join(schemes(self.config))}): take the original for "
                "this, and quantise what is made of it."
            )

    def gains(self, tensors: Iterable[str]) -> list[str]:
        """Those of `tensors` that are stored gains of peeking modules."""
        suffixes = tuple(f"{gain}.weight" for gain in self.shape.family.gains)
        return [name for name in tensors if name.endswith(suffixes)]

    def _weight_map(self) -> Mapping[str, str]:
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{self.folder / INDEX} has no weight_map of tensor and file names.")
        return weight_map

    def _check_index(self, tensors: Mapping[str, TensorInfo]) -> None:
        if not (self.folder / INDEX).is_file():
            return
        for name, file in self._weight_map().items():
            if name not in tensors or tensors[name].file != file:
                raise ValueError(f"{INDEX} places '{name}' in {file}, which does not hold it.")

    def _check_shapes(self, tensors: Mapping[str, TensorInfo]) -> None:
        embedding = f"{self.shape.family.in_base(self.shape.family.embedding)}.weight"
        for name, shape in self.shape.tensors().items():
            if self.is_quantised and len(shape) == 2 and name != embedding:
                if lacks := missing(name, shape, tensors, self.config[ENTRY]["quant_method"]):
                    raise ValueError(f"{self.folder} lacks the tensor '{lacks}', which its quantised weights need.")
                continue
            if name not in tensors:
                raise ValueError(f"{self.folder} lacks the tensor '{name}', which its config.json implies.")
            if tensors[name].shape != shape:
                raise ValueError(
                    f"Tensor '{name}' in {tensors[name].file} has shape {list(tensors[name].shape)}, and config.json "
                    f"implies {list(shape)}."
                )
        if stray := self._stray(tensors):
            raise ValueError(
                f"Tensor '{stray[0]}' in {tensors[stray[0]].file} has no place in a {self.shape.family.name} of this "
                "config.json, whose modules would compute something else without it: is it the config.json that came "
                "with these weights?"
            )

    def _stray(self, tensors: Iterable[str]) -> list[str]:
        """Weights and biases of modules that no model of this config reads."""
        family, known = self.shape.family, self.shape.tensors()
        layers = range(self.shape.num_hidden_layers)
        paths = tuple(f"{family.layer(layer)}.{module.path}." for layer in layers for module in family.modules)
        own = (name for name in tensors if name.startswith(paths) and name.endswith((".weight", ".bias")))
        return [name for name in own if name not in known]


def check_loadable(folder: Path) -> None:
    """Raise ValueError where the checkpoint in `folder` is not whole, not safetensors, or not what would be run, and
    where it generates until a token that cannot be.

    Transformers alone judges those of other families, and those quantised in a way that is not known here.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(missing_config(folder, str(folder)))
    config = read_json(folder / "config.json")
    family = family_of(config.get("model_type"))
    if family and "wiring" in config and config["model_type"] != family.rewired_type:
        raise ValueError(
            f"{folder} has a wiring in its config.json but says model_type {family.model_type}, so it would run as a "
            f"dense {family.name} and ignore it: its model_type must be {family.rewired_type}."
        )
    if family and knows_method(config):
        Checkpoint.open(folder).tensors(may_be_quantised=True)
    if (folder / GENERATION).is_file():
        check_tokens(read_json(folder / GENERATION), GENERATION)


def inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`, which in the hub's cache is a link to one of the repository's blobs.

    Raises ValueError when the name, or another link, leads out of `folder`, or when nothing is there.
    """
    path, pure = folder / name, PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"'{name}' leads out of {folder}.")
    target = Path(os.path.realpath(path))  # which takes a link to itself for missing
    home = folder.resolve()
    homes = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    if not any(home in target.parents for home in homes):
        raise ValueError(f"{path} is a link that leaves its folder, to {target}: put the file itself there.")
    if not target.is_file():
        raise ValueError(f"The file {path} is missing: download it again.")
    return path


def gain_names(family: Family, wiring: Wiring) -> list[str]:
    """The gains that a model of this wiring has: one for each module whose view differs per shard."""
    return [
        f"{family.layer(layer)}.{module.gain}.weight"
        for layer, wirings in enumerate(wiring.layers)
        for module, of_module in zip(family.modules, wirings, strict=True)
        if of_module.reads_shards
    ]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`. Raises ValueError with its name when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON that can be read ({error}).") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return value
