"""A stage's trainer is put together of the recipe's config, which stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rewired.adapt.assemble import make_trainer
from rewired.adapt.preflight import check_stage
from rewired.adapt.recipe.reading import read
from rewired.adapt.start import prepare

from .world import CHATML, write_recipe


def test_the_trainer_has_a_config_of_its_own(keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    """Without what TRL would do once more: load a model, set a template, mask labels."""
    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    keys |= {"chat_template_path": str(template), "model_init_kwargs": {"attn_implementation": "eager"}}
    (stage,) = read(write_recipe(tmp_path / "r.yaml", **keys), [])
    before = stage.config.to_dict()
    folder = tmp_path / "stage-1"
    checked = check_stage([stage], dense)
    trainer = make_trainer(stage, folder, prepare(stage.recipe, folder / "start"), checked)
    assert stage.config.to_dict() == before
    changed = {name for name, value in trainer.args.to_dict().items() if value != before[name]}
    assert changed == {"output_dir", "assistant_only_loss", "model_init_kwargs", "chat_template_path"}
    assert trainer.args.output_dir == str(folder) and not trainer.args.assistant_only_loss
    assert trainer.args.model_init_kwargs is trainer.args.chat_template_path is None
    assert trainer.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("how", ["all", "lora"])
def test_gains_and_norms_are_spared_weight_decay(how: str, keys: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    keys |= {"wiring": "ladder+peek@2-4", "train": how, "weight_decay": 0.1}
    (stage,) = read(write_recipe(tmp_path / "r.yaml", **keys), [])
    checked = check_stage([stage], dense)
    trainer = make_trainer(stage, tmp_path / "out", prepare(stage.recipe, tmp_path / "start"), checked)
    decayed, *_ = trainer.create_optimizer().param_groups
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and decayed["params"]
    assert not [names[each] for each in decayed["params"] if "norm" in names[each] or "gain" in names[each]]
