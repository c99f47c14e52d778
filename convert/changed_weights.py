"""Weights that are not the original's (trained, refitted, quantised, with gains of their present wiring): what may be
made of them, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import compress
from typing import Any

from rewired.checkpoint import provenance
from rewired.checkpoint.checkpoint import Checkpoint, gain_names
from rewired.checkpoint.quantised import check_groups, schemes
from rewired.model.family import Family
from rewired.model.wiring import ModuleWiring, Wiring
from rewired.model.wiring_text import wiring_text
from rewired.refit.request import RefitRequest

from .request import Request

_RETRAIN = "Or pass --retrain, and train the result."


def check_weights(checkpoint: Checkpoint, wiring: Wiring, tp_shards: int, request: Request) -> bool:
    """Whether the weights were refitted to this `wiring`.

    Raises ValueError if they are no longer the original's, and what is asked needs those: a refit, a layer that was
    rewired and is dense in `wiring`, or another wiring of what was fitted.
    """
    config, refit = checkpoint.config, request.refit
    if request.retrain and provenance.base_of(config):
        if refit:
            raise ValueError("--retrain takes changed weights, and a refit fits the original's: leave one out.")
        return False
    pairs = zip(checkpoint.wiring.modules, wiring.modules, strict=True)
    loses_a_wiring = any(old.is_rewired and not new.is_rewired for old, new in pairs)
    for record, what in _TRAININGS.items():
        if (loses_a_wiring or refit) and _changes(config, record):
            raise _refusal(checkpoint, what, record)
    if "refit" not in config:
        return False
    if _changes_fitted(checkpoint, wiring, tp_shards, refit):
        raise _refusal(checkpoint, "refitted to its wiring", "refit")
    if refit and refit.gains:
        raise ValueError(
            f"{checkpoint.folder} was refitted to the gains that it has: --calibrate the base that it was made from, "
            f"{_base(config['refit'])}."
        )
    return True


_TRAININGS = {
    provenance.TRAINED: "trained as it is wired",
    provenance.AGAIN: "fitted or trained to an earlier wiring",
}


def _changes(config: Mapping[str, Any], name: str) -> bool:
    """Whether there is a record of that name of changed weights: earlier wirings may have had the original's."""
    record = config.get(name)
    return record is not None and (name != provenance.AGAIN or bool(record["layers"] or record["ends"]))


def _refusal(checkpoint: Checkpoint, what: str, record: str) -> ValueError:
    return ValueError(
        f"{checkpoint.folder} was {what}, and its weights are no longer the original's: convert the base that they "
        f"were made from instead, {_base(checkpoint.config[record])}. {_RETRAIN}"
    )


def _changes_fitted(checkpoint: Checkpoint, wiring: Wiring, tp_shards: int, refit: RefitRequest | None) -> bool:
    """Whether `wiring` is another one of the modules that were refitted; where there is a `refit`, of any module."""
    fitted = checkpoint.shape.wiring(checkpoint.config["refit"]["wiring"])
    before, after = (list(map(_function, each.modules)) for each in (fitted, wiring))
    is_rewired = [module.is_rewired for module in fitted.modules]
    other_shards = tp_shards != checkpoint.tp_shards and fitted.depends_on_shards
    changes = list(compress(before, is_rewired)) != list(compress(after, is_rewired))
    return bool(other_shards or changes or (refit and before != after))


def record_of_wirings(checkpoint: Checkpoint, wiring: Wiring, tp_shards: int, retrain: bool) -> dict[str, Any] | None:
    """What a config records of weights that were trained, or with `retrain` fitted, to another wiring: the original,
    the layers that are not its own any more, and each wiring before. None where they were not.
    """
    base = provenance.base_of(checkpoint.config)
    is_same = tp_shards == checkpoint.tp_shards and differ_only_in_bits(checkpoint.wiring, wiring)
    of_another = any(_changes(checkpoint.config, record) for record in _TRAININGS)
    if base is None or is_same or not (retrain or of_another):
        return None
    changed = provenance.changed(checkpoint.config)
    earlier = checkpoint.config.get(provenance.AGAIN, {"before": []})["before"]
    text = f"{wiring_text(checkpoint.wiring.regions)} on {checkpoint.tp_shards} shards, {_making(checkpoint.config)}"
    return {"base": base, **changed._asdict(), "before": [*earlier, text]}


def _making(config: Mapping[str, Any]) -> str:
    """How the weights of `config` came to their wiring."""
    if record := config.get(provenance.TRAINED):
        return f"trained on {provenance.trained_tokens(record):,} tokens by then"
    return "refitted" if "refit" in config else "calibrated" if "calibrated" in config else "not trained"


def check_quantised(checkpoint: Checkpoint, request: Request, copies: int, tp_shards: int, wiring: Wiring) -> None:
    """Raise ValueError where quantised weights would have to change, or shards to cut what shares a scale."""
    fitting = "--refit" if request.refit and request.refit.matrices else "--calibrate"
    asked = {fitting: request.refit, "--rotate": request.rotate, "--dtype": request.dtype}
    changes = [option for option, value in asked.items() if value] + ["--tp-shards (KV heads copied)"] * (copies > 1)
    if changes:
        raise ValueError(
            f"{changes[0]} changes weights, and those of this checkpoint are quantised "
            f"({'; '.join(schemes(checkpoint.config))}): convert the original so, and quantise the result."
        )
    if wiring.depends_on_shards:
        shape = checkpoint.shape
        writers = {module.writer.name: shape.size(module.writer.width) for module in shape.family.modules}
        check_groups(checkpoint.config, writers, tp_shards)


def check_gains(checkpoint: Checkpoint, stored: Collection[str], wiring: Wiring, tp_shards: int) -> None:
    """Raise ValueError where a gain that is `stored` would be one of something else; new modules get new ones."""
    before, after = (_gained(checkpoint.shape.family, each) for each in (checkpoint.wiring, wiring))
    if stored and (tp_shards != checkpoint.tp_shards or any(before.get(name) != after.get(name) for name in stored)):
        known = provenance.base_of(checkpoint.config)
        base = f"{known['name']}, which it was made from" if known else "the model that it was made from"
        raise ValueError(
            f"{checkpoint.folder} holds gains (*_gain.weight) of its present wiring, and this would change it there: "
            f"name other layers, or convert {base}. {_RETRAIN}"
        )


def check_basis(checkpoint: Checkpoint, gains: Collection[str] = ()) -> None:
    """Raise ValueError where a rotation would leave what fits the channels that there are, such as stored `gains`."""
    for name, what in _IN_A_BASIS.items():
        if _changes(checkpoint.config, name):
            raise ValueError(
                f"{checkpoint.folder} was {what} in the basis that it has: --rotate the base that it was made from, "
                f"{_base(checkpoint.config[name])}."
            )
    if gains:
        raise ValueError(
            f"{checkpoint.folder} holds gains (*_gain.weight) of its channels, and --rotate would change those: rotate "
            "the model that it was trained from."
        )


_IN_A_BASIS = {
    **{"rotation": "rotated", "adapted": "trained", "refit": "refitted", "calibrated": "calibrated"},
    provenance.AGAIN: "fitted or trained",
}


def _gained(family: Family, wiring: Wiring) -> dict[str, tuple[Any, ...]]:
    """What each module that has a gain computes by."""
    return dict(zip(gain_names(family, wiring), (_function(m) for m in wiring.modules if m.reads_shards), strict=True))


def _function(module: ModuleWiring) -> tuple[Any, ...]:
    """What a module computes by; how its all-reduce runs is no part of it."""
    return (*_in_any_bits(module), module.sections)


def differ_only_in_bits(wiring: Wiring, other: Wiring) -> bool:
    """Whether no weights need another fit or training for the `other` wiring."""
    return list(map(_in_any_bits, wiring.modules)) == list(map(_in_any_bits, other.modules))


def _in_any_bits(module: ModuleWiring) -> tuple[Any, ...]:
    """The same but for the bits that are sent, which weights need no training for."""
    reads = (module.delay, module.late, module.reads_shards, module.lacks_something)
    return (*reads, module.region.peek, module.reduce, module.merge, module.shared_channels)


def _base(record: Mapping[str, Any]) -> Any:
    """The name of the original, in the config's `record` of a fit or a training."""
    base = record.get("base")
    return base.get("name") if isinstance(base, Mapping) else base
