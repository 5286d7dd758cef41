"""Persimmon-8B: GPT-NeoX's fused heads in LLaMA's frame, squared ReLU, LayerNorm on queries and keys. Adept 2023."""

from typing import Any

from ..entries import Derived, Field
from ..ops import both, qkv_heads
from .common import ALL_BIASES, EQUAL_HEADS, HEAD, LAYER, LAYER_NORM_MLP, PARTIAL_ROPE, PRE_NORMS, QKV
from .decoders import CLASSIFIERS, decoder
from .experts import always


def _qk_norm(native: Any) -> dict[str, Any]:
    return {"qk_norm": "head" if native.qk_layernorm else "none"}


FAMILY = decoder(
    "persimmon",
    "Persimmon",
    [
        *EQUAL_HEADS,
        Field("attention_dropout"),
        *PARTIAL_ROPE,
        *LAYER_NORM_MLP,
        *ALL_BIASES,
        Field("hidden_act"),
        Field("layer_norm_eps", "norm_eps"),
        # Theirs drops out what the feed-forward makes alone, ours what both branches do; it is 0 in what is published.
        always("hidden_dropout", 0.0),
        Derived(("qk_layernorm",), _qk_norm, lambda config: {"qk_layernorm": config.qk_norm == "head"}),
    ],
    [
        *HEAD,
        *PRE_NORMS[:-2],
        *both(f"{LAYER}.self_attn.query_key_value", QKV, qkv_heads),
        *both(f"{LAYER}.self_attn.dense", f"{LAYER}.self_attn.o_proj"),
        *both(f"{LAYER}.self_attn.q_layernorm", f"{LAYER}.self_attn.q_norm"),
        *both(f"{LAYER}.self_attn.k_layernorm", f"{LAYER}.self_attn.k_norm"),
        *both(f"{LAYER}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *both(f"{LAYER}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *both("model.final_layernorm", "model.norm"),
    ],
    *CLASSIFIERS,
)
