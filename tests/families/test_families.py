"""Every family is its stock class where wired `standard`, the naive reference elsewhere, and one model on any ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rewired.convert import RefitRequest, Request, convert
from rewired.divergence import divergence
from rewired.families import FAMILIES, classes, stock
from rewired.ranks import run_on_ranks
from tests.evaluate.world import tokenizer
from tests.rewired.reference import reference_logits

from .test_toy_family import forward_and_backward

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
UPPER_WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "mistral": {"head_dim": 6, "sliding_window": 7},
    "mistral-whole": {"sliding_window": None},
    "qwen2": UPPER_WINDOWS,
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 6, **UPPER_WINDOWS},
    "qwen3-bias": {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True},
}
WIRINGS: dict[str, list[dict[str, Any]]] = {
    "ladder": [{"layers": "1-4", "preset": "ladder"}],
    "ladder-peek": [{"layers": "0-4", "preset": "ladder", "peek": True}],
    "desync": [{"layers": "0-4", "preset": "desync", "every": 2}],
    "partial-overlap": [{"layers": "0-3", "preset": "partial", "shared_fraction": 0.5, "overlap": True}],
    "parallel": [{"layers": "0-4", "preset": "parallel"}],
}
MIXED: list[dict[str, Any]] = [
    {"layers": "0-2", "preset": "desync"},
    {"layers": "2-4", "preset": "ladder", "peek": True},
]
TOKENS = torch.arange(3, 67).view(2, 32)
each_config = pytest.mark.parametrize("name", CONFIGS)


def config_of(name: str, kind: str = "stock", **changes: Any) -> Any:
    family = FAMILIES[name.partition("-")[0]]
    of_kind = stock(family, "Config") if kind == "stock" else classes(family, "Config")
    return of_kind(**(SIZES | CONFIGS[name] | changes))


def rewired(name: str, wiring: list[dict[str, Any]], tp_shards: int, **changes: Any) -> Any:
    """A rewired model with random weights, norms and biases too."""
    config = config_of(name, "rewired", wiring=wiring, tp_shards=tp_shards, **changes)
    torch.manual_seed(0)
    return randomised(classes(config.family, "ForCausalLM")(config)).eval()


def randomised(model: Any) -> Any:
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "gain" in parameter_name:
            torch.nn.init.normal_(parameter, 0.0 if parameter_name.endswith("bias") else 1.0, 0.2)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(request.param, tmp_path_factory.mktemp("models") / request.param)


def make_dense(name: str, folder: Path) -> Path:
    config = config_of(name)
    torch.manual_seed(0)
    randomised(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"The river {n} runs over stone {n * n % 97} to the sea." for n in range(200)))
    return path


@each_config
def test_wired_standard_it_is_the_stock_model_bit_for_bit(name: str) -> None:
    model = rewired(name, [], 3)
    twin = AutoModelForCausalLM.from_config(config_of(name)).eval()
    twin.load_state_dict(model.state_dict())
    for ours, theirs in ((model(TOKENS, labels=TOKENS), twin(TOKENS, labels=TOKENS)),):
        assert torch.equal(ours.logits, theirs.logits)
        ours.loss.backward()
        theirs.loss.backward()
    for (parameter_name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), parameter_name


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
@each_config
def test_any_other_wiring_is_what_the_reference_computes(name: str, wiring: list[dict[str, Any]]) -> None:
    model = rewired(name, wiring, 3)
    weights = {key: tensor for key, tensor in model.state_dict().items() if not key.endswith("_gain.weight")}
    with torch.no_grad():
        expected = reference_logits(weights, model.config, wiring, 3, TOKENS, gains_of(model))
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
@each_config
def test_attention_implementations_agree(name: str, attention: str) -> None:
    """Windows included, on layers that have one."""
    model = rewired(name, MIXED, 3, head_dim=16)  # flex attention wants as many, and has no backward on a CPU
    with torch.no_grad():
        expected = model(TOKENS).logits
        model.set_attn_implementation(attention)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    # others have the same code without a window, and the same tied head
    [pytest.param(name, marks=pytest.mark.slow if name in ("mistral-whole", "qwen2-tied") else ()) for name in CONFIGS],
)
def test_compiled_it_computes_the_same_forward_and_backward(name: str) -> None:
    """As one graph; of two layers, of which a window is on the second."""
    wiring = [{"layers": "0-1", "preset": "desync"}, {"layers": "1-2", "preset": "ladder", "peek": True}]
    model = rewired(name, wiring, 3, num_hidden_layers=2, max_window_layers=1)
    expected = model(TOKENS, labels=TOKENS)
    expected.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.compiler.reset()
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(TOKENS, labels=TOKENS)
    found.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits)
    for (parameter_name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6, msg=parameter_name)


def gains_of(model: Any) -> dict[tuple[int, str], torch.Tensor]:
    """As the reference takes them."""
    return {
        (index, which): getattr(layer, module.gain).weight.detach()
        for index, layer in enumerate(model.model.layers)
        for module, which in zip(model.family.modules, ("attn", "mlp"), strict=True)
        if getattr(layer, module.gain) is not None
    }


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_are_one_process_forward_and_backward(dense: Path, tmp_path: Path, ranks: int, compiled: bool) -> None:
    folder = convert(dense, tmp_path / "mixed", Request(MIXED, tp_shards=6)).out
    expected, expected_gradients = forward_and_backward(folder, 1)
    for found, gradients in run_on_ranks(forward_and_backward, ranks, folder, ranks, compiled):
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            pair = map(torch.from_numpy, (gradient, expected_gradients[name]))
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5, msg=name)


def test_tokens_come_from_the_cache_as_from_the_whole(dense: Path, tmp_path: Path) -> None:
    folder = convert(dense, tmp_path / "mixed", Request(MIXED, tp_shards=2)).out
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        whole = model(TOKENS).logits
        cache = model(TOKENS[:, :20], use_cache=True).past_key_values
        rest = [model(TOKENS[:, [at]], past_key_values=cache).logits for at in range(20, 32)]
    torch.testing.assert_close(torch.cat(rest, 1), whole[:, 20:])


def test_their_checkpoints_stand_alone(tmp_path: Path) -> None:
    """One interpreter without the package for all, since it imports for seconds."""
    request = Request(MIXED, tp_shards=2)
    folders = [convert(make_dense(name, tmp_path / "dense" / name), tmp_path / name, request).out for name in CONFIGS]
    program = (
        "import sys; sys.modules['rewired'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "for folder in sys.argv[1:]:\n"
        "    print(type(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)).__name__)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    ran = subprocess.run(
        [sys.executable, "-c", program, *folders], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    expected = [classes(FAMILIES[name.partition("-")[0]], "ForCausalLM").__name__ for name in CONFIGS]
    assert ran.stdout.split() == expected, ran.stderr


def test_back_to_dense_it_is_the_source(dense: Path, tmp_path: Path) -> None:
    there = convert(dense, tmp_path / "mixed", Request(MIXED, tp_shards=2)).out
    back = convert(there, tmp_path / "back", Request([{"layers": "0-", "preset": "standard"}], to_stock=True)).out
    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (dense, back))
    assert after == before | {"_name_or_path": str(back)}
    assert torch.equal(logits(back), logits(dense))


def test_a_refit_sees_the_windows_and_brings_it_closer(dense: Path, text: Path, tmp_path: Path) -> None:
    plain = convert(dense, tmp_path / "plain", Request(MIXED, tp_shards=2)).out
    done = convert(dense, tmp_path / "fit", Request(MIXED, tp_shards=2, refit=RefitRequest(str(text), 4096)))
    ids = AutoTokenizer.from_pretrained(dense)(text.read_text(), return_tensors="pt").input_ids[:, :512].view(4, 128)
    assert kl(dense, done.out, ids) < kl(dense, plain, ids) / 3


def test_a_rotation_leaves_the_function(dense: Path, tmp_path: Path) -> None:
    request = Request([{"layers": "0-", "preset": "standard"}], tp_shards=2, rotate="hadamard")
    rotated = convert(dense, tmp_path / "rotated", request).out
    torch.testing.assert_close(logits(rotated), logits(dense), rtol=1e-3, atol=1e-3)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(TOKENS).logits


def kl(original: Path, other: Path, ids: torch.Tensor) -> float:
    models = [AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (original, other)]
    return divergence(*(lambda ids, model=model: model(ids).logits for model in models), ids).kl
