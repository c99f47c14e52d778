"""The key `comm` of recipes: what it means, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rewired.adapt.recipe.keys import Stage
from rewired.adapt.recipe.reading import read
from rewired.comm.companion import CommKeys
from rewired.comm.options import PRESETS, Comm
from tests.adapt.recipe.test_reading import LEAST, write
from tests.adapt.world import command, distillation, write_recipe


def keys_of(stage: Stage) -> CommKeys:
    (keys,) = stage.companions
    assert isinstance(keys, CommKeys)
    return keys


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"comm": "zero"}, "comm is 'zero': give slow-link, zero\\+\\+, or a mapping of weights, gradients"),
        ({"comm": {"wieghts": "int8"}}, "comm has the unknown key 'wieghts': did you mean 'weights'"),
        ({"comm": {"weights": "int4"}}, "'weights' expected one of .'int8', 'bf16', 'int4-difference'., got int4"),
        ({"comm": {"weights": "int4-difference", "secondary_shard": "none"}}, "a node keeps nothing that they could"),
        ({"comm": {"hadamard": "yes"}}, "'hadamard' expected bool, got str"),
        ({"comm": {"ranks_per_node": 0}}, "pipeline and ranks_per_node are numbers above 0"),
        ({"comm": {"gradients": "bf16", "gradients_in_node": "bf16"}}, "gradients that are not quantised: turn it off"),
        ({"comm": {"pipeline": 0}}, "pipeline and ranks_per_node are numbers above 0"),
        (
            {"comm": {"gradients": {0: "int4", 0.5: "int2"}}},
            "'gradients' expected one of .*, got int2",
        ),
        (
            {"comm": {"gradients": {0.5: "bf16"}}},
            "its keys are parts of the training, 0 first, all below 1: {0: int4, 0.5: bf16}",
        ),
        ({"comm": {"gradients": {0: "int4", 50: "bf16"}}}, "0 first, all below 1"),
        ({"comm": {"weights": {0: "int8", 0.5: "bf16"}}}, "'weights' expected one of .*, got {0: 'int8'"),
        ({"comm": "zero++"}, "comm is how FSDP2 sends weights and gradients: give fsdp_size, too"),
        ({"comm": "zero++", "fsdp_size": 2, "train": "lora"}, "comm does not send adapters"),
        ({"comm": "zero++", "fsdp_size": 2, "fp16": True}, "a whole block of them no numbers: give bf16"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        read(write(tmp_path / "r.yaml", **LEAST | changes), [])


def test_comm_is_a_preset_or_a_mapping(tmp_path: Path) -> None:
    sharded = write(tmp_path / "r.yaml", **LEAST, fsdp_size=4, comm="zero++")
    preset, own, late = (
        read(sharded, flags)[0]
        for flags in (
            [],
            ["--comm", "{gradients: int8, secondary_shard: none}"],
            ["--comm", "{gradients: {0: int4, 0.5: bf16}}"],
        )
    )
    assert preset.given["comm"] == "zero++" and keys_of(preset).options == PRESETS["zero++"]
    assert keys_of(own).options == Comm(gradients="int8", secondary_shard="none")
    assert keys_of(late).options == Comm(gradients={0: "int4", 0.5: "bf16"})
    assert keys_of(read(write(tmp_path / "r.yaml", **LEAST), [])[0]).options is None


def test_a_dry_run_tells_what_is_kept(
    dense: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = distillation(dense, rows, tmp_path / "out") | {"fsdp_size": 4, "comm": {"ranks_per_node": 2}}
    assert command(monkeypatch, write_recipe(tmp_path / "r.yaml", **keys), "--dry-run") == 0
    kept = r"secondary shard [\d.]+ kB, frozen weights gathered once [\d.]+ kB; activations"
    assert re.search(kept, capsys.readouterr().out)


def test_ranks_have_to_make_whole_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write(tmp_path / "own.yaml", **LEAST, fsdp_size=6, comm={"ranks_per_node": 4})
    with pytest.raises(ValueError, match="6 ranks do not make nodes of 4: give another ranks_per_node in comm"):
        read(own, [])
    launched = write(tmp_path / "r.yaml", **LEAST, fsdp_size=6, comm="zero++")
    assert read(launched, [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # of torchrun
    with pytest.raises(ValueError, match="nodes of 4"):
        read(launched, [])


@pytest.mark.parametrize(
    ("on_node", "fsdp_size", "tp_size", "size"),
    [
        (4, 8, 1, 4),
        (4, 4, 2, 2),
        (2, 4, 2, 1),
        (2, 2, 4, 1),
        (8, 2, 2, 2),
        (4, 3, 2, None),
        (4, 3, 1, None),
        (4, 4, 3, None),
    ],
)
def test_of_a_node_s_ranks_some_shard_a_model(on_node: int, fsdp_size: int, tp_size: int, size: int | None) -> None:
    """Those of the same part of a layer, and of one replica."""
    options = Comm(ranks_per_node=on_node)
    if size is not None:
        assert options.node_size(fsdp_size, tp_size) == size
        return
    with pytest.raises(
        ValueError, match=rf"{fsdp_size * tp_size} ranks.* do not make nodes of {on_node}: give another"
    ):
        options.node_size(fsdp_size, tp_size)
