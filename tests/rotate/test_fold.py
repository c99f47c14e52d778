"""Weights in another basis: the same function, on a stream that is the original's times the basis."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from rewired.checkpoint import Checkpoint
from rewired.rotate.fold import write_rotated
from tests.convert.checkpoints import INDEX, edit_tensors, make_llama
from tests.rewired.tiny import LLAMA3_ROPE, SIZES, tokens

shapes = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(1, 20).map(lambda quarter: 4 * quarter),
        "intermediate_size": st.integers(1, 50),
        "num_hidden_layers": st.integers(1, 3),
        "num_attention_heads": st.just(4),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "head_dim": st.sampled_from([2, 6]),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "rope_parameters": st.sampled_from([{"rope_type": "default", "rope_theta": 10000.0}, LLAMA3_ROPE]),
    }
)


def random_llama(shape: dict[str, Any]) -> LlamaForCausalLM:
    """Norm weights and biases are random, too."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | shape))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    return model


def random_basis(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0].float()


def names_by_file(folder: Path) -> dict[str, set[str]]:
    return {path.name: set(load_file(path)) for path in folder.glob("*.safetensors")}


@contextmanager
def rotated(model: LlamaForCausalLM, basis: torch.Tensor, **options: Any) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        model.save_pretrained(source, **options)
        out.mkdir()
        checkpoint = Checkpoint.open(source)
        write_rotated(checkpoint, basis, out, checkpoint.config)
        yield out


@settings(max_examples=25)
@given(shape=shapes)
def test_the_function_is_the_same_and_the_stream_is_in_the_basis(shape: dict[str, Any]) -> None:
    """The reference is the stock model itself: of its own hidden states, each is turned."""
    model = random_llama(shape)
    basis = random_basis(shape["hidden_size"])
    with rotated(model, basis) as out, torch.no_grad():
        other = LlamaForCausalLM.from_pretrained(out).eval()
        before, after = (each(tokens(), output_hidden_states=True) for each in (model, other))
    scale = float(before.logits.abs().max())
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=2e-5 * scale)
    for mine, theirs in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):
        torch.testing.assert_close(theirs, mine @ basis, rtol=0, atol=2e-5 * float(mine.abs().max()))
    assert all(bool((weight == 1).all()) for name, weight in other.named_parameters() if "norm" in name)


@pytest.mark.parametrize("is_tied", [False, True])
def test_files_stay_as_they_were_cut_and_a_tied_head_lies_beside_the_embedding(is_tied: bool) -> None:
    model = random_llama({"tie_word_embeddings": is_tied})
    with rotated(model, random_basis(32), max_shard_size="60KB") as out:
        source = out.parent / "source"
        before, after = map(names_by_file, (source, out))
        home = next(name for name, tensors in before.items() if "model.embed_tokens.weight" in tensors)
        before[home] |= {"lm_head.weight"} if is_tied else set()
        assert after == before
        assert len(after) > 1
        head = load_file(out / home).get("lm_head.weight")
        assert (out / INDEX).read_text().count("lm_head.weight") == 1
        assert not Checkpoint.open(out).shape.tie_word_embeddings
        if is_tied:
            assert head is not None
            assert not torch.equal(head, load_file(out / home)["model.embed_tokens.weight"])


def test_a_head_that_a_tied_checkpoint_has_all_the_same_is_read(tmp_path: Path) -> None:
    """By transformers."""
    source, out = make_llama(tmp_path / "source", sharded=False, tie_word_embeddings=True), tmp_path / "out"
    edit_tensors(source / "model.safetensors", {"lm_head.weight": torch.randn(61, 32)})
    out.mkdir()
    checkpoint = Checkpoint.open(source)
    write_rotated(checkpoint, random_basis(32), out, checkpoint.config)
    with torch.no_grad():
        before, after = (LlamaForCausalLM.from_pretrained(each)(tokens()).logits for each in (source, out))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("asked", "written"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_dtypes_stay_unless_another_is_asked_for(asked: str | None, written: torch.dtype, tmp_path: Path) -> None:
    source, out = make_llama(tmp_path / "source", dtype=torch.bfloat16), tmp_path / "out"
    out.mkdir()
    write_rotated(Checkpoint.open(source), random_basis(32), out, Checkpoint.open(source).config, asked)
    dtypes = {tensor.dtype for path in out.glob("*.safetensors") for tensor in load_file(path).values()}
    assert dtypes == {written}
    assert {oct(path.stat().st_mode) for path in out.glob("*.safetensors")} == {
        oct(path.stat().st_mode) for path in source.glob("*.safetensors")
    }
