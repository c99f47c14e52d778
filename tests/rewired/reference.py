"""A naive reference of rewired Llama, from the papers and docs/semantics.md alone; it shares nothing with the package.

One python loop over r tensor-parallel ranks, each with its own stream, its own slice of the weights and its own heads.

- standard: ladder-residual eq. 1. ladder: Algorithm 1 and eq. 2. parallel: section 3.3.1. desync: section 5.
- partial: CAAT-Net section 3.1, eq. 8 and 12; for any number of ranks appendix A, eq. 20 and 22.
- the stream, peek, gains and merge: docs/semantics.md. What one rank holds: docs/tensor-parallel.md. Payloads:
  docs/payloads.md.

It computes in the dtype of the weights throughout, so compare in fp32; where payloads are quantised, in fp64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Module = tuple[int, str]  # (layer, "attn" or "mlp")


def reference_logits(
    state_dict: dict[str, Tensor],
    config: LlamaConfig,
    wiring: Sequence[dict],
    tp_shards: int,
    input_ids: Tensor,  # [B, T]
    gains: dict[Module, Tensor] | None = None,  # each [r, H]
) -> Tensor:  # [B, T, V]
    """Logits of the Llama in `state_dict` (stock names), its modules wired as `wiring` says, over `tp_shards` ranks."""
    r, gains = tp_shards, gains or {}
    for size in (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size):
        assert size % r == 0, f"{r} ranks do not divide {size}"
    embedding = state_dict["model.embed_tokens.weight"]
    rotary = rotary_table(config, embedding, input_ids.shape[1])
    wired = answers_by_module(wiring, config)

    stream = Stream(F.embedding(input_ids, embedding), r)
    for layer in range(config.num_hidden_layers):
        weights = layer_weights(state_dict, layer)
        afterwards = wired.get((layer, "mlp"), STANDARD), wired.get((layer + 1, "attn"), STANDARD)

        answers, gain = wired.get((layer, "attn"), STANDARD), gains.get((layer, "attn"))
        z = []
        for k in range(r):
            x = rms_norm(stream.read(k, answers, gain), weights["input_layernorm.weight"], config)
            z.append(attention(x, weights, config, rotary, k, r, window_of(config, layer)))
        stream.write(z, answers, afterwards[0].delay)

        answers, gain = wired.get((layer, "mlp"), STANDARD), gains.get((layer, "mlp"))
        z = []
        for k in range(r):
            x = rms_norm(stream.read(k, answers, gain), weights["post_attention_layernorm.weight"], config)
            z.append(mlp(x, weights, k, r))
        stream.write(z, answers, afterwards[1].delay)

    x = rms_norm(stream.read(0, STANDARD, None), state_dict["model.norm.weight"], config)
    return F.linear(x, embedding if config.tie_word_embeddings else state_dict["lm_head.weight"])


# ---- The residual stream: docs/semantics.md ----


@dataclass(frozen=True)
class Answers:
    """What one module answers to the semantics' four questions, and how its local part is folded later."""

    delay: int = 0
    peek: bool = False
    reduce: str = "all"  # "all", "none", "shared"
    shared_channels: int = 0  # floor(p * H), for "shared"
    merge: str = "sum"  # "sum", "mean"
    payload: tuple[tuple[int, int, int], ...] = ()  # (bits, bits of the sum, channels) in order; none: all in full
    is_last: bool = False  # of its region


STANDARD = Answers()


@dataclass
class Flight:
    """A reduction in flight: u, q and e of docs/semantics.md, on each rank k."""

    u: list[Tensor]
    q: list[Tensor]
    e: list[Tensor]
    e_scale: float = 1.0  # with which e counts in d_folded
    age: int = 1  # how many modules ago it was launched


class Stream:
    """S and d of docs/semantics.md, on each rank k, and what is in flight."""

    def __init__(self, embedded: Tensor, r: int):
        self.r = r
        self.zeros = torch.zeros_like(embedded)  # [B, T, H]
        self.S = [embedded] * r
        self.flights: list[Flight] = []
        self.d = [self.zeros] * r
        self.d_folded = [self.zeros] * r  # d, but each contribution scaled as its own region's merge says

    def read(self, k: int, answers: Answers, gain: Tensor | None) -> Tensor:
        """view^k = S + [peek] g * (d^k + sum of q^k), after all older than `delay` modules landed."""
        view, own = self.parts(k, answers.delay)
        if answers.peek:
            view = view + (own if gain is None else gain[k] * own)
        return view

    def parts(self, k: int, delay: int) -> tuple[Tensor, Tensor]:
        """S, and d^k + sum of q^k."""
        settled, own = self.S[k], self.d[k]
        for flight in self.flights:
            if flight.age > delay:
                settled, own = settled + flight.u[k], own + flight.e[k]
            else:
                own = own + flight.q[k]
        return settled, own

    def write(self, z: list[Tensor], answers: Answers, next_delay: int) -> None:
        """First land what was read or will be; then reduce `all`, `none` or the `shared` channels of the partials z."""
        staying = [f for f in self.flights if f.age <= answers.delay and f.age < next_delay]
        staying = [] if answers.payload and answers.is_last else staying
        for flight in self.flights:
            if not any(flight is other for other in staying):
                for k in range(self.r):
                    self.S[k] = self.S[k] + flight.u[k]
                    self.d[k] = self.d[k] + flight.e[k]
                    self.d_folded[k] = self.d_folded[k] + flight.e_scale * flight.e[k]
        for flight in staying:
            flight.age += 1
        self.flights = staying

        if answers.payload:
            self.write_quantised(z, answers)
        elif answers.reduce == "all":
            self.launch_all_reduce([z[k] + self.d_folded[k] for k in range(self.r)])
            self.d = [self.zeros] * self.r
            self.d_folded = [self.zeros] * self.r
        elif answers.reduce == "none":
            self.keep(z, answers)
        elif answers.reduce == "shared":
            is_shared = torch.arange(z[0].shape[-1], device=z[0].device) < answers.shared_channels  # [H]
            self.launch_all_reduce([z[k] * is_shared for k in range(self.r)])
            self.keep([z[k] * ~is_shared for k in range(self.r)], answers)

    def launch_all_reduce(self, q: list[Tensor]) -> None:
        self.flights.append(Flight([sum(q)] * self.r, q, [self.zeros] * self.r))

    def write_quantised(self, z: list[Tensor], answers: Answers) -> None:
        """The ranks send what is quantised, and get back what is quantised; what rounding leaves is kept."""
        is_sent = torch.arange(z[0].shape[-1], device=z[0].device) < answers.shared_channels  # [H]
        q = [(z[k] + self.d_folded[k]) * is_sent for k in range(self.r)]
        sent = [quantise_channels(part, answers.payload, 0) for part in q]
        total = sum(sent)
        u = quantise_channels(total, answers.payload, 1)
        flight = Flight([u] * self.r, q if answers.is_last else sent, [self.zeros] * self.r)
        self.flights.append(flight)
        self.d = [d * ~is_sent for d in self.d]
        self.d_folded = [d * ~is_sent for d in self.d_folded]
        if not answers.is_last:
            self.keep([(z[k] * ~is_sent) + (q[k] - sent[k]).detach() for k in range(self.r)], answers)
            left = (total - u).detach()
            flight.e = [left * of_rank(k, self.r, answers.payload, left) for k in range(self.r)]
            flight.e_scale = 1 / self.r if answers.merge == "mean" else 1.0

    def keep(self, z: list[Tensor], answers: Answers) -> None:
        scale = 1 / self.r if answers.merge == "mean" else 1
        for k in range(self.r):
            self.d[k] = self.d[k] + z[k]
            self.d_folded[k] = self.d_folded[k] + z[k] * scale


# ---- Payloads: docs/payloads.md ----


def quantise_channels(x: Tensor, payload: tuple[tuple[int, int, int], ...], which: int) -> Tensor:  # [B, T, H]
    """The sections one after another, each in groups of 64 channels; channels behind them are zero.

    With the bits of the parts (`which` 0) or those of the sum (1).
    """
    groups = []
    for section in payload:
        channels, x = x[..., : section[2]], x[..., section[2] :]
        groups += [quantise_group(group, section[which]) for group in channels.split(64, dim=-1)]
    return torch.cat([*groups, torch.zeros_like(x)], dim=-1)


def of_rank(k: int, r: int, payload: tuple[tuple[int, int, int], ...], like: Tensor) -> Tensor:  # [H]
    """Which channels rank k of r adds up: of the G groups of each section, those from ceil(k G / r) on."""
    owners = []
    for _, _, channels in payload:
        count = math.ceil(channels / 64)
        owners += [
            rank for c in range(channels) for rank in range(r) if rank * count <= c // 64 * r < (rank + 1) * count
        ]
    owners += [-1] * (like.shape[-1] - len(owners))
    return torch.tensor(owners, device=like.device) == k


def quantise_group(x: Tensor, bits: int) -> Tensor:  # [B, T, up to 64]
    """Whole numbers up to 7, 31 or 127 times a bfloat16 scale; the gradient goes straight through."""
    most = {4: 7, 6: 31, 8: 127}[bits]
    scale = (x.detach().abs().max(dim=-1, keepdim=True).values / most).bfloat16().to(x.dtype)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # a group of zeros stays one
    quantised = scale * torch.clamp(torch.round(x.detach() / scale), -most, most)
    return x + (quantised - x.detach())


# ---- The wiring: the table of docs/semantics.md ----


def answers_by_module(wiring: Sequence[dict], config: LlamaConfig) -> dict[Module, Answers]:
    """The answers of every module that the wiring names. Each comma-separated range is a region of its own."""
    wired: dict[Module, Answers] = {}
    for rule in wiring:
        for span in rule["layers"].split(","):
            region = modules_of(span)
            for position, module in enumerate(region):
                assert module not in wired, f"{module} is wired twice"
                wired[module] = answers_of(rule, module, position, len(region), config)
    return wired


def modules_of(span: str) -> list[Module]:
    """The modules of "a-b" (half-open), "a-b:attn" or "a-b:mlp", in the order they run."""
    layers, _, only = span.strip().partition(":")
    first, end = layers.split("-")
    return [(layer, kind) for layer in range(int(first), int(end)) for kind in ("attn", "mlp") if only in ("", kind)]


def answers_of(rule: dict, module: Module, position: int, region_size: int, config: LlamaConfig) -> Answers:
    preset, hidden_size = rule["preset"], config.hidden_size
    reduce, shared_channels = "all", 0  # standard and ladder reduce all, everywhere
    if position == region_size - 1:
        pass  # the last module of any region leaves nothing local behind
    elif preset == "parallel":
        reduce = "none" if module[1] == "attn" else "all"
    elif preset == "desync":
        reduce = "all" if (position + 1) % rule.get("every", 2) == 0 else "none"
    elif preset == "partial":
        shared_channels = math.floor(rule["shared_fraction"] * hidden_size)
        reduce = {0: "none", hidden_size: "all"}.get(shared_channels, "shared")
    else:
        assert preset in ("standard", "ladder"), preset
    is_last = position == region_size - 1
    payload = payload_of(rule.get("payload", "full"), hidden_size, is_last)
    if payload:  # the first channels: those that the preset reduces and that have bits
        limit = {"all": hidden_size, "none": 0, "shared": shared_channels}[reduce]
        payload = first_channels(payload, limit)
        shared_channels = sum(channels for _, _, channels in payload)
        reduce = {0: "none", hidden_size: "all"}.get(shared_channels, "shared")
        if module == (config.num_hidden_layers - 1, "mlp"):
            payload = ((8, 8, hidden_size),)
    return Answers(
        delay=rule.get("delay", 1) if rule.get("overlap", preset == "ladder" or "delay" in rule) else 0,
        peek=rule.get("peek", preset in ("desync", "partial")),
        reduce=reduce,
        shared_channels=shared_channels,
        merge="sum" if preset == "parallel" else rule.get("merge", "sum"),
        payload=payload,
        is_last=is_last,
    )


def payload_of(spec: str | dict, hidden_size: int, is_last: bool) -> tuple[tuple[int, int, int], ...]:
    """(bits, bits of the sum, channels) of "full", "int8", "int4", "int4/int8" or {bits: share}, bits as 8 or "4/8".

    The last module of a region sends all channels.
    """
    if isinstance(spec, str):
        spec = {} if spec == "full" else {spec.replace("int", ""): 1}
    pairs = [tuple(int(bits) for bits in (str(bits).split("/") * 2)[:2]) for bits in spec]
    sections, begun = [], 0
    for number, (bits, sum_bits) in enumerate(pairs):
        end = math.floor(round(sum(list(spec.values())[: number + 1]) * hidden_size, 6))
        if bits > 0 or is_last:
            sections.append((*(pairs[0] if bits == 0 else (bits, sum_bits)), end - begun))
        begun = end
    return tuple(sections)


def first_channels(payload: tuple[tuple[int, int, int], ...], limit: int) -> tuple[tuple[int, int, int], ...]:
    cut = []
    for bits, sum_bits, channels in payload:
        channels = min(channels, limit)
        limit -= channels
        if channels:
            cut.append((bits, sum_bits, channels))
    return tuple(cut)


# ---- One module on rank k of r: a partial output [B, T, H], to be summed over the ranks ----


def attention(
    x: Tensor,
    weights: dict[str, Tensor],
    config: LlamaConfig,
    rotary: tuple[Tensor, Tensor],
    k: int,
    r: int,
    window: float = math.inf,
) -> Tensor:
    """Causal attention on rank k's own heads, with grouped key and value heads; `window` tokens are seen."""
    head_dim = rotary[0].shape[-1]
    q, key, value = (  # [B, heads of this rank, T, D]
        column_parallel(x, weights, f"self_attn.{name}_proj", k, r).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for name in ("q", "k", "v")
    )
    if "self_attn.q_norm.weight" in weights:  # Qwen3's QK-Norm: each head's RMS norm, before the rotation
        q, key = (rms_norm(x, weights[f"self_attn.{name}_norm.weight"], config) for x, name in ((q, "q"), (key, "k")))
    q, key = rotate(q, *rotary), rotate(key, *rotary)

    queries_per_key = config.num_attention_heads // config.num_key_value_heads
    key, value = key.repeat_interleave(queries_per_key, dim=1), value.repeat_interleave(queries_per_key, dim=1)
    scores = q @ key.transpose(-1, -2) / math.sqrt(head_dim)  # [B, heads, T, T]
    back = torch.arange(scores.shape[-1])[:, None] - torch.arange(scores.shape[-1])  # how far back a key lies, [T, T]
    unseen = (back < 0) | (back >= window)
    heads = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1) @ value  # [B, heads, T, D]
    return row_parallel(heads.transpose(1, 2).flatten(-2), weights, "self_attn.o_proj", k, r)


def window_of(config: LlamaConfig, layer: int) -> float:
    """How many tokens a layer's attention sees: Mistral's layers alike, Qwen's from max_window_layers on, if at all."""
    if config.model_type.endswith("mistral"):
        return config.sliding_window or math.inf
    if getattr(config, "use_sliding_window", False) and layer >= config.max_window_layers:
        return config.sliding_window
    return math.inf


def mlp(x: Tensor, weights: dict[str, Tensor], k: int, r: int) -> Tensor:
    gate = column_parallel(x, weights, "mlp.gate_proj", k, r)
    up = column_parallel(x, weights, "mlp.up_proj", k, r)
    return row_parallel(gate * torch.sigmoid(gate) * up, weights, "mlp.down_proj", k, r)


def column_parallel(x: Tensor, weights: dict[str, Tensor], name: str, k: int, r: int) -> Tensor:
    """Rank k's rows of the weight, and of the bias."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    n = weight.shape[0] // r
    y = x @ weight[k * n : (k + 1) * n].T
    return y if bias is None else y + bias[k * n : (k + 1) * n]


def row_parallel(x: Tensor, weights: dict[str, Tensor], name: str, k: int, r: int) -> Tensor:
    """Rank k's columns of the weight, and a share of the bias: the ranks' sum must hold it once."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    n = weight.shape[1] // r
    y = x @ weight[:, k * n : (k + 1) * n].T
    return y if bias is None else y + bias / r


def rms_norm(x: Tensor, weight: Tensor, config: LlamaConfig) -> Tensor:
    return weight * x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]): Llama's checkpoints pair the halves, not neighbours."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def rotary_table(config: LlamaConfig, like: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [1, T, D], from transformers, so that every scaling variant of the angles is right."""
    return LlamaRotaryEmbedding(config)(like, torch.arange(length, device=like.device)[None])


def layer_weights(state_dict: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
