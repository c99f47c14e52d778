"""Layer-local alignment, against the original's own modules, wired by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rewired.adapt.losses.alignment import add_alignment
from rewired.adapt.model.teacher import beside
from rewired.adapt.model.trainable import Changed, choose
from rewired.convert import Request, convert
from tests.adapt.world import logits_of, make_rewired

from .test_distillation import batch


def aligned(folder: Path, layers: list[int], train: str = "rewired") -> Any:
    """The student in `folder`, its weights changed a little."""
    student: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for index in layers:
            for parameter in student.model.layers[index].parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    choose(student, train)
    add_alignment(student, beside(student, folder, changed=Changed(tuple(layers)), whole=True), layers)
    return student


def relative(own: torch.Tensor, wanted: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    errors = (own - wanted).norm(dim=-1) ** 2 / wanted.norm(dim=-1) ** 2
    return errors[:, :-1][counts].sum()


def test_a_ladders_layer_is_given_both_streams(dense: Path, tmp_path: Path) -> None:
    """Layer i reads the original's stream without its last update, and then with it, but without its own attention."""
    folder = make_rewired(dense, tmp_path / "m", [{"layers": "1-4", "preset": "ladder"}])
    student = aligned(folder, [1, 2, 3])
    given = batch()
    given["attention_mask"] = torch.ones_like(given["attention_mask"])
    found = student(**given, distils=True)

    original: Any = AutoModelForCausalLM.from_pretrained(dense)
    ids, counts = given["input_ids"], given["labels"][:, 1:] != -100
    rotary = original.model.rotary_emb(original.model.embed_tokens(ids), torch.arange(ids.shape[1])[None])
    errors, stream = [], original.model.embed_tokens(ids)
    last = torch.zeros_like(stream)
    for own, layer in zip(student.model.layers, original.model.layers, strict=True):
        before = stream
        attention = own.self_attn(
            hidden_states=own.input_layernorm(before - last), position_embeddings=rotary, attention_mask=None
        )[0]
        mine = before + attention + own.mlp(own.post_attention_layernorm(before))
        stream = (
            stream
            + layer.self_attn(
                hidden_states=layer.input_layernorm(stream), position_embeddings=rotary, attention_mask=None
            )[0]
        )
        last = layer.mlp(layer.post_attention_layernorm(stream))
        stream = stream + last
        errors.append(relative(mine, stream, counts))
    expected = torch.stack(errors[1:]).mean()
    torch.testing.assert_close(found.total, expected, rtol=1e-4, atol=1e-6)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(found.total, parameters), torch.autograd.grad(expected, parameters), rtol=2e-3, atol=1e-5
    )


@pytest.mark.parametrize(
    "preset", [{"preset": "desync", "every": 4}, {"preset": "partial", "shared_fraction": 0.5}], ids=str
)
def test_one_shard_has_all_parts_and_so_nothing_to_learn(preset: dict[str, Any], dense: Path, tmp_path: Path) -> None:
    for tp_shards in (1, 4):
        out = tmp_path / str(tp_shards)
        folder = convert(dense, out, Request([preset | {"layers": "1-3"}], tp_shards=tp_shards)).out
        student: Any = AutoModelForCausalLM.from_pretrained(folder)
        choose(student, "rewired")
        add_alignment(student, beside(student, folder, whole=True), [1, 2])
        error = student(**batch(), distils=True).hidden.item()
        assert error < 1e-8 if tp_shards == 1 else error > 1e-4


def test_the_original_stays_what_it_is(dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "m", [{"layers": "1-4", "preset": "ladder", "peek": True}])
    student = aligned(folder, [1, 2, 3])
    ids = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(student(input_ids=ids, original=True), logits_of(dense, ids), rtol=1e-4, atol=1e-4)
