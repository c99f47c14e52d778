"""A family of these tests only: other names, a bias on q, k and v alone, and norms on the heads of q and k."""

from __future__ import annotations

from rewired.model.family import HEAD_DIM, HEADS, KV_HEADS, NEURONS, Family, Linear, Module, Replicated

TOY = Family(
    model_type="toy",
    name="Toy",
    modeling="tests.families.modeling_rewired_toy",
    modules=(
        Module(
            path="mixer",
            norm="mixer_norm",
            gain="mixer_gain",
            readers=(Linear("wq", HEADS, True), Linear("wk", KV_HEADS, True), Linear("wv", KV_HEADS, True)),
            writer=Linear("wo", HEADS),
            inside=(Replicated("q_scale", HEAD_DIM), Replicated("k_scale", HEAD_DIM)),
        ),
        Module(
            path="feed_forward",
            norm="feed_forward_norm",
            gain="feed_forward_gain",
            readers=(Linear("w1", NEURONS), Linear("w3", NEURONS)),
            writer=Linear("w2", NEURONS),
        ),
    ),
    layers="blocks",
    embedding="tokens",
    last_norm="final_norm",
    head="output",
)
