"""A student's losses against the original, which costs only the weights that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import AutoModelForCausalLM

import rewired  # noqa: F401 - registers the rewired classes
from rewired.adapt.losses.distillation import Losses, add_losses
from rewired.adapt.losses.token_loss import TokenLoss
from rewired.adapt.model.teacher import Teacher, beside
from rewired.adapt.model.trainable import Changed, choose, rewired_layers
from rewired.adapt.start import Start
from rewired.checkpoint.provenance import record
from rewired.sources import find_source
from tests.adapt.world import LADDER, logits_of, make_rewired

WIRINGS: dict[str, list[dict[str, Any]]] = {
    "ladder": LADDER,
    "peeking from the first layer on": [{"layers": "0-4", "preset": "ladder", "peek": True}],
    "attention of one layer": [{"layers": "1-2:attn", "preset": "desync", "every": 2}],
}


def batch() -> dict[str, torch.Tensor]:
    """Two rows, one of them padded; not all tokens count."""
    ids = torch.randint(3, 259, (2, 13))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def distilled(folder: Path, original: Path, train: str, weight: float = 0.0, **options: Any) -> tuple[Any, Teacher]:
    """The student in `folder`, and its teacher."""
    student: Any = AutoModelForCausalLM.from_pretrained(folder)
    choose(student, train)
    teacher = beside(student, original, **options)
    add_losses(student, teacher, TokenLoss(ce=0.5, kd=2.0), weight, rewired_layers(student.config))
    return student, teacher


def expected(student: torch.Tensor, original: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Cross-entropy and KL, summed over the tokens that count, of both models' logits."""
    counts = labels[:, 1:] != -100
    own, wanted = (logits[:, :-1][counts] for logits in (student, original))
    ce = cross_entropy(own, labels[:, 1:][counts], reduction="sum")
    kl = kl_div(log_softmax(own, -1), log_softmax(wanted, -1), reduction="sum", log_target=True)
    return ce.item(), kl.item()


@pytest.mark.parametrize("train", ["all", "rewired", "norms_and_gains"])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_losses_are_those_of_both_models_run_apart(wiring: str, train: str, dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "m", WIRINGS[wiring])
    student, _ = distilled(folder, folder, train)
    given = batch()
    with torch.no_grad():
        plain = student(given["input_ids"], attention_mask=given["attention_mask"]).logits
        original = AutoModelForCausalLM.from_pretrained(dense)(
            given["input_ids"], attention_mask=given["attention_mask"]
        ).logits
    found: Losses = student(**given, distils=True)
    ce, kl = expected(plain, original, given["labels"])
    assert found.ce.item() == pytest.approx(ce, rel=1e-5)
    assert found.kd.item() == pytest.approx(kl, rel=1e-4)
    assert found.total.item() == pytest.approx(0.5 * ce + 2 * kl, rel=1e-4)
    assert found.tokens == (given["labels"][:, 1:] != -100).sum()


def test_gradients_are_those_of_both_models_run_apart(dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "m", LADDER)
    student, _ = distilled(folder, folder, "rewired")
    given = batch()
    student(**given, distils=True).total.backward()
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    logits = plain(given["input_ids"], attention_mask=given["attention_mask"]).logits
    with torch.no_grad():
        original = AutoModelForCausalLM.from_pretrained(dense)(**{k: given[k] for k in ("input_ids", "attention_mask")})
    counts = given["labels"][:, 1:] != -100
    own, wanted = logits[:, :-1][counts], original.logits[:, :-1][counts]
    loss = 0.5 * cross_entropy(own, given["labels"][:, 1:][counts], reduction="sum") + 2 * kl_div(
        log_softmax(own, -1), log_softmax(wanted, -1), reduction="sum", log_target=True
    )
    loss.backward()
    for (name, parameter), (_, other) in zip(student.named_parameters(), plain.named_parameters(), strict=True):
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("is_rounded", [False, True])
def test_where_nothing_is_rewired_there_is_nothing_to_learn(is_rounded: bool, dense: Path, tmp_path: Path) -> None:
    """Also where autocast computes in bfloat16, and the teacher's own weights are in it."""
    folder = make_rewired(dense, tmp_path / "m", [{"layers": "0-", "preset": "standard"}])
    student, _ = distilled(folder, folder, "all", dtype=torch.bfloat16 if is_rounded else None)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded):
        assert student(**batch(), distils=True).kd == 0


def test_streams_are_compared_after_each_rewired_layer(dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "m", LADDER)
    student, _ = distilled(folder, folder, "rewired", weight=1.0)
    given = batch()
    found = student(**given, distils=True)
    options = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], "output_hidden_states": True}
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(folder)(**options).hidden_states
        wanted = AutoModelForCausalLM.from_pretrained(dense)(**options).hidden_states
    counts = (given["labels"][:, 1:] != -100).flatten()
    errors = []
    for layer in (2, 3):
        a, b = (states[layer + 1][:, :-1].flatten(0, 1)[counts] for states in (own, wanted))
        errors.append(((a - b).norm(dim=-1) ** 2 / b.norm(dim=-1) ** 2).sum())
    assert found.hidden.item() == pytest.approx(torch.stack(errors).mean().item(), rel=1e-4)
    assert found.total.item() == pytest.approx((0.5 * found.ce + 2 * found.kd + found.hidden).item(), rel=1e-5)


def parameters_of(teacher: Teacher) -> list[torch.nn.Parameter]:
    """All that it computes with, the student's own among them."""
    return [*teacher.model.parameters(), *teacher.head.parameters()]


def test_the_teacher_owns_what_the_student_trains_and_nothing_else(dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "m", LADDER)
    for train in ("rewired", "all", "norms_and_gains"):
        student, teacher = distilled(folder, folder, train)
        mine = {id(parameter) for parameter in student.parameters()}
        own = sum(p.numel() for p in parameters_of(teacher) if id(p) not in mine)
        trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
        assert own == trained, train


def test_lora_needs_no_second_weight(dense: Path, tmp_path: Path) -> None:
    folder = make_rewired(dense, tmp_path / "m", LADDER)
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], layers_to_transform=[2, 3], init_lora_weights=False)
    student = get_peft_model(base, lora)
    teacher = beside(base, folder, without_adapters=student.disable_adapter)
    add_losses(base, teacher, TokenLoss(ce=0, kd=1), 0.0, [2, 3])
    mine = {id(parameter) for parameter in student.parameters()}
    assert all(id(parameter) in mine for parameter in parameters_of(teacher))
    ids = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(student(input_ids=ids, original=True), logits_of(dense, ids), rtol=1e-4, atol=1e-4)
        assert student(**batch(), distils=True).kd > 0


def test_refitted_layers_learn_from_the_base(dense: Path, tmp_path: Path) -> None:
    """Whose weights were others: with none of the student's shared."""
    folder = make_rewired(dense, tmp_path / "m", LADDER)
    student: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in student.model.layers[2:]:
            layer.mlp.down_proj.weight.mul_(0.5)
    choose(student, "norms_and_gains")
    teacher = beside(student, dense, changed=Changed((2, 3)))
    add_losses(student, teacher, TokenLoss(ce=0, kd=1), 0.0, [2, 3])
    ids = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(student(input_ids=ids, original=True), logits_of(dense, ids), rtol=1e-4, atol=1e-4)


def test_a_rotated_student_is_compared_in_its_own_basis(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a base that was not rotated: of streams and of predictions, the losses are the same in every basis."""
    monkeypatch.setenv("REWIRED_CACHE", str(tmp_path / "cache"))
    given, losses = batch(), []
    for rotate in (None, "hadamard"):
        folder = make_rewired(dense, tmp_path / f"{rotate}", LADDER, rotate=rotate)
        original = Start(folder, record(find_source(str(dense)), dense), Changed((2, 3))).original
        student, _ = distilled(folder, original, "norms_and_gains", weight=0.5, changed=Changed((2, 3)))
        with torch.no_grad():
            losses.append(student(**given, distils=True))
            assert losses[-1].hidden > 0
            wanted = logits_of(dense, given["input_ids"])
            torch.testing.assert_close(student(input_ids=given["input_ids"], original=True), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)


def test_layers_below_that_were_trained_before_are_the_originals_too(dense: Path, tmp_path: Path) -> None:
    """No layer is trained below the first rewired one now, but one was."""
    folder = make_rewired(dense, tmp_path / "m", LADDER)
    student: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        student.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    choose(student, "rewired")
    add_losses(student, beside(student, dense, changed=Changed((1,))), TokenLoss(ce=0, kd=1), 0.0, [2, 3])
    ids = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(student(input_ids=ids, original=True), logits_of(dense, ids), rtol=1e-4, atol=1e-4)


def test_checkpointed_activations_give_the_same_gradients(dense: Path, tmp_path: Path) -> None:
    folder, given = make_rewired(dense, tmp_path / "m", LADDER), batch()
    grads = []
    for checkpoints in (False, True):
        student, _ = distilled(folder, folder, "rewired", weight=0.1)
        if checkpoints:
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        student.train()
        student(**given, distils=True).total.backward()
        grads.append([parameter.grad for parameter in student.parameters() if parameter.requires_grad])
    torch.testing.assert_close(*grads)
