"""Gradients on several ranks are those of one process, and their all-reduces hide as the forward's do."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from rewired.comm.late_gradients import compute_late
from rewired.model import collectives, exchange, reductions, residual_stream, sharding, tensor_parallel
from rewired.ranks import run_on_ranks

from .sharded import Events, gradients, load, saved
from .test_lora import PROJECTIONS
from .test_tensor_parallel import HIDDEN, PATIENCE, HeldBack, some_wirings
from .tiny import WIRINGS, tokens


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Relative to each gradient's size; what cancels to almost nothing, on the scale of all gradients."""
    scale = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = np.linalg.norm(found[name] - gradient) / max(np.linalg.norm(gradient), 0.1 * scale)
        assert error < tolerance, f"{name}: relative error {error:.2e}"


@some_wirings
def test_every_gradient_on_two_ranks_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    """Embedding, lm_head, norms, gains and biases included; with gradient checkpointing too; over two batches."""
    folder = saved(WIRINGS[name], tmp_path)
    expected = after_two_batches(folder, 1, False)
    assert len(expected) == len(load(folder).state_dict())
    for plain, checkpointed in run_on_ranks(with_and_without_checkpointing, 2, folder):
        assert_same(plain, expected)
        assert_same(checkpointed, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIRINGS)
def test_every_gradient_on_four_ranks_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path)
    expected = after_two_batches(folder, 1, False)
    for found in run_on_ranks(after_two_batches, 4, folder, 4, False):
        assert_same(found, expected)


def with_and_without_checkpointing(folder: Path) -> tuple[Any, Any]:
    return after_two_batches(folder, 2, False), after_two_batches(folder, 2, True)


def after_two_batches(folder: Path, ranks: int, is_checkpointed: bool) -> dict[str, Any]:
    model = load(folder, ranks).train()
    if is_checkpointed:
        model.activation_checkpointing_enable()
    for batch in tokens(4).split(2):
        model(batch, labels=batch).loss.backward()
    return gradients(model)


@some_wirings
def test_adapters_load_train_and_save_as_in_one_process(name: str, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path / "base")
    config = LoraConfig(r=3, lora_alpha=6, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    adapted = get_peft_model(load(folder), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapters")

    expected = lora_pass(folder, 1, tmp_path / "adapters", tmp_path / "saved by one")
    expected_gradients, expected_logits = expected
    assert len(expected_gradients) == 2 * 7 * 6
    for found, logits in run_on_ranks(lora_pass, 2, folder, 2, tmp_path / "adapters", tmp_path / "saved by two"):
        assert_same(found, expected_gradients)
        assert_same(logits, expected_logits)
    tensors = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "saved by two")]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())


def lora_pass(folder: Path, ranks: int, adapters: Path, saved_to: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients of the adapters, and logits as at inference."""
    model = PeftModel.from_pretrained(load(folder, ranks), adapters, is_trainable=True).train()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    model.save_pretrained(saved_to)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens()).logits
    return gradients(model), {"logits": logits.numpy()}


@pytest.mark.parametrize(
    "name", ["partial", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ladder-peek", "desync-2x"))]
)
def test_a_loss_on_hidden_states_reaches_every_parameter(name: str, tmp_path: Path) -> None:
    """Distillation's loss: hidden states are read beside the stream, also where an update is in flight or local."""
    folder = saved(WIRINGS[name], tmp_path)
    expected = hidden_state_gradients(folder, 1)
    for found in run_on_ranks(hidden_state_gradients, 2, folder, 2):
        assert_same(found, expected)


def hidden_state_gradients(folder: Path, ranks: int) -> dict[str, Any]:
    model = load(folder, ranks).train()
    states = model(tokens(), output_hidden_states=True).hidden_states
    sum(normalize(state, dim=-1)[..., : 4 + i].sum() for i, state in enumerate(states)).backward()  # type: ignore[union-attr]
    return gradients(model)


@some_wirings
def test_backward_hides_the_reductions_that_forward_hides(name: str, tmp_path: Path) -> None:
    """And behind weights' gradients others. Recomputing for gradient checkpointing repeats none that nobody reads."""
    folder = saved(WIRINGS[name], tmp_path)
    for plain, recomputing in run_on_ranks(backward_traffic, 2, folder):
        (forward, _), (backward, hidden), (_, hidden_while_recomputing) = plain[0], plain[1], recomputing[1]
        assert hidden == hidden_while_recomputing == HIDDEN.get(name, 0) + behind_weight_gradients(folder)
        # as many as forward, with one more a layer for norm weights and biases; the head's takes the embedding's place,
        # and one is for the embedding
        assert backward == forward + 6 + 1
        # a layer whose MLP waits for its attention reduces the attention's output again
        waiting = sum(mlp.wait and attn.launches for attn, mlp in load(folder).config.resolved_wiring.layers)
        assert recomputing[1][0] == backward + waiting


def behind_weight_gradients(folder: Path) -> int:
    """All-reduces on two ranks that a module has waited for, and whose gradients hide behind those of its weights."""
    config = load(folder).config
    held = config.tp_shards // 2 if config.depends_on_shards else 1
    pairs = pairwise(config.resolved_wiring.modules)
    return sum(before.launches and module.wait and not (module.reads_shards and held > 1) for before, module in pairs)


def backward_traffic(folder: Path) -> list[list[tuple[int, int]]]:
    """(all-reduces, hidden ones) of forward and backward, without and with gradient checkpointing."""
    model = load(folder, 2).train()
    compute_late(model)
    traffic = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.activation_checkpointing_enable()
        with Events() as forward:
            loss = model(tokens(), labels=tokens()).loss
        with Events() as backward:
            loss.backward()
        traffic.append([(len(events.payloads), events.hidden()) for events in (forward, backward)])
    return traffic


def test_a_weight_s_gradient_is_computed_while_the_all_reduce_of_its_input_s_is_held_back(tmp_path: Path) -> None:
    """Where the module before waits for that at once, as all do in `standard`."""
    folder = saved(WIRINGS["standard"], tmp_path)
    _, was_told = run_on_ranks(with_all_reduces_of_backward_held_back, 2, folder)
    assert was_told == [True] * 4


def with_all_reduces_of_backward_held_back(folder: Path) -> list[bool | None]:
    model, found = load(folder, 2), []
    compute_late(model)
    for index in (2, 3, 5, 6):  # of two layers: before each, what the layer's norms and biases get is summed
        loss = model(tokens(), labels=tokens()).loss
        held = HeldBack(index, products=1)
        with held:
            loss.backward()
        found.append(held.was_told)
    return found


def test_late_gradients_are_autograd_s_own_with_autocast_too(tmp_path: Path) -> None:
    for plain, late in run_on_ranks(without_and_with_late_gradients, 2, saved(WIRINGS["standard"], tmp_path)):
        assert_same(late, plain, 1e-7)


def without_and_with_late_gradients(folder: Path) -> list[dict[str, Any]]:
    found = []
    for is_late in (False, True):
        model, sums = load(folder, 2).train(), {}
        if is_late:
            compute_late(model)
        for is_cast in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = model(tokens(), labels=tokens()).loss
            loss.backward()
            sums |= {f"{name}, {is_cast}": gradient for name, gradient in gradients(model).items()}
        found.append(sums)
    return found


def test_ranks_send_16_bits_and_sum_in_float32(tmp_path: Path) -> None:
    """CAAT-Net, section 4. Two ranks are as far from the exact gradient as one process in bfloat16 is, and send half
    of the bytes of sums that are widened first, whose gradients are the same bit for bit."""
    folder = saved(WIRINGS["partial"], tmp_path)
    exact, _ = bfloat16_gradients(folder, 1, torch.float32)
    one_process, _ = bfloat16_gradients(folder, 1, torch.bfloat16)
    for (found, sent), (widened, sent_widened) in run_on_ranks(narrow_and_widened, 2, folder):
        assert distance(found, exact) < 1.1 * distance(one_process, exact)
        assert all(np.array_equal(found[name], gradient) for name, gradient in widened.items())
        assert 2 * sum(sent) == sum(sent_widened) > 0


def narrow_and_widened(folder: Path) -> list[tuple[dict[str, Any], list[int]]]:
    narrow, sent = bfloat16_gradients(folder, 2, torch.bfloat16), list[int]()

    def widened_sum(own: torch.Tensor, group: str) -> torch.Tensor:
        sent.append(own.float().nbytes)  # what a ring of two ranks sends of it
        return reductions.finish(reductions.start_all_reduce(own.float(), group)).to(own.dtype)

    reductions.start_wide_sum = widened_sum  # type: ignore[assignment]
    return [narrow, (bfloat16_gradients(folder, 2, torch.bfloat16)[0], sent)]


@pytest.mark.parametrize(("name", "overlaps"), [("ladder", True), ("standard", False)])
def test_modules_run_while_16_bits_before_them_are_held_back(name: str, overlaps: bool, tmp_path: Path) -> None:
    folder = saved(WIRINGS[name], tmp_path)
    _, was_told = run_on_ranks(with_16_bits_held_back, 2, folder, PATIENCE if overlaps else 0.5)
    assert was_told == [overlaps] * 2


def with_16_bits_held_back(folder: Path, patience: float) -> list[bool | None]:
    """In forward, and in backward, where sums of norms' gradients come between."""
    model = load(folder, 2, dtype=torch.bfloat16).train()
    forward, backward = (HeldBack(index, ("start_wide_sum",), patience=patience) for index in (4, 7))
    with forward:
        loss = model(tokens(), labels=tokens()).loss
    with backward:
        loss.backward()
    return [forward.was_told, backward.was_told]


def distance(found: dict[str, Any], exact: dict[str, Any]) -> float:
    return sum(((found[name] - gradient) ** 2).sum() for name, gradient in exact.items()) ** 0.5


def bfloat16_gradients(folder: Path, ranks: int, dtype: torch.dtype) -> tuple[dict[str, Any], list[int]]:
    """Gradients, and the bytes that the rank sends in each exchange's two steps."""
    model, sent = load(folder, ranks, dtype=dtype).train(), list[int]()
    with mock.patch.object(exchange, "post", side_effect=partial(post, exchange.post, sent)):
        model(tokens(), labels=tokens()).loss.backward()
    return gradients(model), sent


def post(function: Any, sent: list[int], rows: Any, received: Any, group: Any) -> Any:
    sent.append(sum(row.nbytes for rank, row in enumerate(rows) if rank != group.rank()))
    return function(rows, received, group)


@pytest.mark.parametrize(
    ("name", "is_right"),
    [
        ("standard", True),
        ("partial", False),
        pytest.param("desync-2x", False, marks=pytest.mark.slow),
        pytest.param("ladder-peek", False, marks=pytest.mark.slow),
    ],
)
def test_megatron_s_placement_is_wrong_where_views_differ(name: str, is_right: bool, tmp_path: Path) -> None:
    """Reducing the gradient before the norm's backward, and norm weights' gradients not at all, is right only while
    all ranks see the same (CAAT-Net, section 4). It is simpler; this test is why we do not."""
    folder = saved(WIRINGS[name], tmp_path, attention_bias=False, mlp_bias=False)
    expected = after_two_batches(folder, 1, False)
    for found in run_on_ranks(megatron_gradients, 2, folder):
        if is_right:
            assert_same(found, expected)
        else:
            with pytest.raises(AssertionError, match="relative error"):
                assert_same(found, expected, tolerance=0.01)


def megatron_gradients(folder: Path) -> dict[str, Any]:
    """f before the column-parallel projections, g at the write, nothing at the stream's entry and exit."""

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor, group: str) -> torch.Tensor:
            return reductions.finish(reductions.start_all_reduce(output, group))

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient, None

    def column_parallel(projection: Any, shards: Any, packed: torch.Tensor) -> torch.Tensor:
        return own_column_parallel(projection, shards, *collectives.sum_gradients(shards.group, packed))

    own_column_parallel = sharding.column_parallel
    sharding.column_parallel = column_parallel
    tensor_parallel.sum_gradients = residual_stream.sum_gradients = lambda group, *tensors: tensors
    residual_stream.split_gradient = lambda tensor, ranks: tensor
    residual_stream.land_and_launch = lambda settled, total, put_in, reduction, overlapped: (
        settled if total is None else reductions.add(settled, total),
        (G.apply(put_in, reduction.group),),
    )
    residual_stream.land = lambda settled, total, group, after=None: reductions.add(settled, total)
    return after_two_batches(folder, 2, False)


@pytest.mark.parametrize(
    ("name", "second"),
    [pytest.param("ladder-peek", "dp_replicate_size", marks=pytest.mark.slow), ("mixed", "fsdp_size")],
)
def test_a_step_on_two_by_two_ranks_is_that_of_one_process(name: str, second: str, tmp_path: Path) -> None:
    """Tensor parallelism times FSDP2, and what it saves loads anywhere."""
    folder = saved(WIRINGS[name], tmp_path / "base")
    expected = load(folder)
    optimiser_step(expected, tokens(4))
    run_on_ranks(step_on_two_by_two, 4, folder, tmp_path / "out", second)

    state = load(tmp_path / "out").state_dict()
    assert state.keys() == expected.state_dict().keys()
    for parameter_name, parameter in expected.state_dict().items():
        torch.testing.assert_close(state[parameter_name], parameter, rtol=1e-5, atol=1e-6, msg=parameter_name)


def step_on_two_by_two(folder: Path, saved_to: Path, second: str) -> None:
    distributed = DistributedConfig(tp_plan="auto", tp_size=2, **{second: 2})
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed)
    optimiser_step(model, tokens(4).chunk(2)[torch.distributed.get_rank() // 2])
    model.save_pretrained(saved_to)


def optimiser_step(model: Any, batch: torch.Tensor) -> None:
    # a large eps, so that the step is about proportional to the gradient and hides no error in its size
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1)
    model.train()(batch, labels=batch).loss.backward()
    optimiser.step()
