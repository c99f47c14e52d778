"""The other way into vLLM, which the plugin did not take: a subclass of its Transformers backend on our own model.

.venv-vllm/bin/python studies/vllm_backend.py                # on one rank
.venv-vllm/bin/torchrun --nproc-per-node 2 studies/vllm_backend.py

Each rank holds one shard, so transformers' stock modules run on every view, with what vLLM's fusers make of them. Both
ways must continue with transformers' tokens; then they and vLLM's own Llama are timed in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaModel
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory, tensor_model_parallel_all_reduce
from vllm.model_executor.models.transformers import TransformersForCausalLM

from rewired.bench.timing import interleaved
from rewired.convert import Request, convert
from rewired.model.modeling_rewired_llama import RewiredLlamaDecoderLayer, RewiredLlamaModel
from rewired.model.reductions import own
from rewired.model.residual_stream import ResidualStream
from rewired.model.wiring import ModuleWiring
from rewired.model.wiring_text import parse_wiring
from rewired.serve.vllm.llama import _peek_gain, _shards

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
BACKEND = "RewiredOnTransformersBackend"
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
WIRINGS = ("standard", "ladder", "ladder+peek", "desync-2x")
OWN = "vLLM's own Llama"
TIMED = ("standard", "ladder")
PREFILL, TOKEN = "prefill", "token"
BATCH, PROMPT, NEW = 4, 64, 16


class OneShardLayer(RewiredLlamaDecoderLayer):
    """Our layer on stock modules, which know no shard axis: a rank's one shard comes off before, and goes on after."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        stream = ResidualStream.open(hidden_states, self.shards)
        attention = partial(self.self_attn, **kwargs)
        stream = self._run(
            stream, self.attn_wiring, self.input_gain, self.input_layernorm, lambda x: attention(hidden_states=x)[0]
        )
        stream = self._run(stream, self.mlp_wiring, self.post_attention_gain, self.post_attention_layernorm, self.mlp)
        return stream.total(self.shards) if self.is_last else stream

    def _run(
        self,
        stream: ResidualStream,
        wiring: ModuleWiring,
        gain: Any,
        norm: Callable[[torch.Tensor], torch.Tensor],
        module: Callable[[torch.Tensor], torch.Tensor],
    ) -> ResidualStream:
        view, stream = stream.read(wiring, gain, self.shards)  # [1, T, H] or [1, 1, T, H]
        output = module(norm(view.flatten(0, -3)))
        if wiring.is_rewired or wiring.overlapped:
            output = own(output)
        at_once = None if self.shards.group is None or wiring.overlapped else tensor_model_parallel_all_reduce
        return stream.write(output[None] if wiring.gives_partials else output, wiring, self.shards, at_once)


class RewiredOnTransformersBackend(TransformersForCausalLM):
    """vLLM's Transformers backend, its all-reduces left to our layers. Biases would count once a rank."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        vllm_config.model_config.hf_config.base_model_tp_plan = LlamaConfig.base_model_tp_plan
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _decorate_for_torch_compile(self) -> None:
        RewiredLlamaModel.forward = LlamaModel.forward  # names its arguments; ours gives hidden states, too
        super()._decorate_for_torch_compile()

    def recursive_replace(self) -> None:
        for layer in self.model.layers:
            layer.__class__ = OneShardLayer
            layer.self_attn.__class__, layer.mlp.__class__ = LlamaAttention, LlamaMLP
            layer.shards = _shards()
            layer.input_gain = _peek_gain(self.config, layer.attn_wiring)
            layer.post_attention_gain = _peek_gain(self.config, layer.mlp_wiring)
        super().recursive_replace()
        for layer in self.model.layers:
            layer.self_attn.o_proj.reduce_results = layer.mlp.down_proj.reduce_results = False

    def load_weights(self, weights: Any) -> set[str]:
        gains = {name for name, _ in self.named_parameters() if name.endswith("_gain.weight")}
        return super().load_weights(weights) | gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiled", action="store_true", help="vLLM's default mode, instead of eager")
    args = parser.parse_args()
    ModelRegistry.register_model(BACKEND, RewiredOnTransformersBackend)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prompts = torch.randint(1, SIZES["vocab_size"], (BATCH, PROMPT)).tolist()
    with TemporaryDirectory() as folder:
        dense = Path(folder) / "dense"
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(dense)
        models = {
            name: convert(dense, Path(folder) / name, Request(parse_wiring(name), tp_shards=RANKS)).out
            for name in WIRINGS
        }
        expected = {name: _greedy(model, prompts) for name, model in models.items()}  # the backend changes our classes
        engines = {OWN: _engine(dense, args.compiled)}
        for name, rewired in models.items():
            found = {
                f"{name}, plugin": _engine(rewired, args.compiled),
                f"{name}, backend": _engine(_on_backend(rewired), args.compiled),
            }
            for way, engine in found.items():
                is_right = _tokens(engine, prompts) == expected[name]
                _say(f"{way}: {'the same tokens' if is_right else 'OTHER TOKENS'}")
            engines |= found  # they share their process groups, and end together
        timed = [name for name in engines if name.split(",")[0] in (OWN, *TIMED)]
        runs = {name: partial(_timed, engines[name], prompts) for name in timed}
        for run in runs.values():
            run()
        samples = interleaved(runs, args.rounds, "round")
        mode = "compiled" if args.compiled else "eager"
        _say(f"\n{RANKS} ranks, {mode}, {args.rounds} rounds, {platform.machine()}: of {OWN}'s speed\n")
        _say(_table(samples))
        cleanup_dist_env_and_memory()


def _engine(model: Path, is_compiled: bool) -> Any:
    several = {"distributed_executor_backend": "external_launcher"} if RANKS > 1 else {}
    return LLM(
        str(model),
        tensor_parallel_size=RANKS,
        dtype="float32",
        seed=0,
        skip_tokenizer_init=True,
        enforce_eager=not is_compiled,
        enable_prefix_caching=False,
        disable_log_stats=True,
        max_model_len=128,
        max_num_seqs=BATCH,
        kv_cache_memory_bytes=1 << 26,
        **several,
    )


def _on_backend(model: Path) -> Path:
    """The same checkpoint under the other architecture's name."""
    copy = model.with_name(f"{model.name}-backend")
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    config.pop("auto_map")
    (copy / "config.json").write_text(json.dumps(config | {"architectures": [BACKEND]}))
    return copy


@torch.no_grad()
def _greedy(model: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    ours = AutoModelForCausalLM.from_pretrained(model)
    ours.generation_config.eos_token_id = None
    return ours.generate(torch.tensor(prompts), max_new_tokens=NEW, do_sample=False)[:, PROMPT:].tolist()


def _sampling() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)


def _tokens(engine: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], _sampling(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


_request_ids = map(str, count())


def _timed(engine: Any, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Seconds of the prefill of all prompts, and of each step after it."""
    if distributed.is_initialized():
        distributed.barrier()
    start = time.perf_counter()
    for prompt in prompts:
        engine.llm_engine.add_request(next(_request_ids), {"prompt_token_ids": prompt}, _sampling())
    engine.llm_engine.step()
    first = time.perf_counter()
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()
    return {PREFILL: first - start, TOKEN: (time.perf_counter() - first) / (NEW - 1)}


def _table(samples: Any) -> str:
    lines = [f"| | {PREFILL} (quartiles) | {TOKEN} (quartiles) |", "|---|---|---|"]
    for name in list(samples)[1:]:
        cells = []
        for what in (PREFILL, TOKEN):
            pairs = zip(samples[OWN][what], samples[name][what], strict=True)
            low, middle, high = quantiles([stock / other for stock, other in pairs], n=4, method="inclusive")
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, flush=True)


if __name__ == "__main__":
    main()
