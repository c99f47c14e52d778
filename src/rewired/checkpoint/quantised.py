"""Quantised weights, as a checkpoint's config and files have them: by compressed-tensors, GPTQ or AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .safetensors_header import TensorInfo

ENTRY = "quantization_config"
_FORMATS = {"int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"}
_GROUPS = "config_groups"  # of projections, by what they are quantised to, in compressed-tensors' entry
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_SCALES = ("weight_scale", "scales")
# what stands for a weight [out, in] where numbers are packed: its dimension that still counts, and that of the weight
_PACKED = {"compressed-tensors": ("weight_packed", 0, 0), "gptq": ("qweight", 1, 0), "awq": ("qweight", 0, 1)}


def knows_method(config: Mapping[str, Any]) -> bool:
    """Whether a config's weights are quantised by a method that is known here, or not at all."""
    entry = config.get(ENTRY)
    return not entry or (isinstance(entry, Mapping) and str(entry.get("quant_method")) in _PACKED)


def check_method(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a config's weights are quantised in a way that is not known here."""
    entry: Any = config.get(ENTRY)
    if not entry:
        return
    method = entry.get("quant_method") if isinstance(entry, Mapping) else None
    if not knows_method(config):
        raise ValueError(
            f"config.json says that the weights are quantised by {method!r}, which is not known here: convert the "
            f"original, or quantise it by {', '.join(_PACKED)}."
        )
    if method in _BITS and entry.get("bits") not in _BITS[method]:
        raise ValueError(f"config.json says {method} of {entry.get('bits')!r} bits: it takes {_BITS[method]}.")
    if method not in _BITS:
        groups = entry.get(_GROUPS)
        every = list(groups.values()) if isinstance(groups, Mapping) else [None]
        are_sound = all(isinstance(each, Mapping) and isinstance(each.get("weights"), Mapping) for each in every)
        formats = [each.get("format") for each in (entry, *every) if isinstance(each, Mapping)]
        if not are_sound or not all(each in (None, "mixed-precision", *_FORMATS) for each in formats):
            raise ValueError(
                f"config.json has a {ENTRY} of compressed-tensors that is not known here: it takes {_GROUPS} with "
                f"weights, in the formats {', '.join(sorted(_FORMATS))}."
            )


def schemes(config: Mapping[str, Any]) -> list[str]:
    """What the weights are quantised to, in words: `int4 weights in groups of 128`; none where they are not."""
    entry = config.get(ENTRY) or {}
    if entry.get("quant_method") in _BITS:
        return [_scheme({"num_bits": entry["bits"], "type": "int", "group_size": entry.get("group_size")})]
    return sorted({_scheme(g["weights"], g.get("input_activations")) for g in entry.get(_GROUPS, {}).values()})


def check_groups(config: Mapping[str, Any], inputs: Mapping[str, int], tp_shards: int) -> None:
    """Raise ValueError where shards would cut groups of weights that share a scale.

    `inputs` are the numbers of inputs of the projections whose columns shards share out, by name.
    """
    entry = config.get(ENTRY) or {}
    of_groups = (group["weights"].get("group_size") for group in entry.get(_GROUPS, {}).values())
    for group in (each for each in (entry.get("group_size"), *of_groups) if type(each) is int and each > 0):
        for name, size in inputs.items():
            if size // tp_shards % group:
                raise ValueError(
                    f"The {size // tp_shards} inputs of {name} on each of {tp_shards} shards are not whole groups of "
                    f"{group} weights that share a scale: take fewer shards (--tp-shards), or quantise in groups that "
                    "divide them."
                )


def missing(name: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo], method: str) -> str | None:
    """The tensor that a projection's quantised weight `name`, of `shape`, lacks; None where it is whole."""
    path = name.removesuffix("weight")
    packed, dimension, of_weight = _PACKED[method]
    stored = tensors.get(path + packed)
    if stored is not None and (len(stored.shape) < 2 or stored.shape[dimension] != shape[of_weight]):
        return f"{path}{packed} of {shape[of_weight]} {'rows' if dimension == 0 else 'columns'}"
    if stored is None and (name not in tensors or tensors[name].shape != shape):
        return path + packed
    is_plain = stored is None and tensors[name].dtype.startswith(("F32", "F16", "BF16"))
    if is_plain or any(path + scale in tensors for scale in _SCALES):
        return None
    return path + next(scale for scale in _SCALES if (scale == "weight_scale") == (packed == "weight_packed"))


def _scheme(weights: Mapping[str, Any], activations: Any = None) -> str:
    def number(args: Mapping[str, Any]) -> str:
        return ("fp" if args.get("type") == "float" else "int") + str(args.get("num_bits"))

    group = weights.get("group_size")
    words = f"{number(weights)} weights" + (f" in groups of {group}" if type(group) is int and group > 0 else "")
    return words + (f", {number(activations)} activations" if isinstance(activations, Mapping) else "")
