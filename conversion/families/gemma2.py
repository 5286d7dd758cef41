"""Gemma 2: Gemma with norms on both sides of a branch, soft-caps, every other layer windowed. arXiv 2408.00118."""

from ..entries import Const, Derived, Entry, Field
from ..ops import weight
from ..rules import Family, Rule
from .common import ATTENTION, CAUSAL_LM, HEAD, LAYER, LAYER_TYPES, MLP, ROPE, SPELLINGS
from .gemma import GEMMA

GEMMA2: list[Entry] = [
    *GEMMA,
    *LAYER_TYPES,
    Field("hidden_activation", "hidden_act"),
    Field("final_logit_softcapping"),
    # The width that scores are normed by, as an integer; 144 in the 27B model, whose heads are 128 wide.
    Derived(
        ("query_pre_attn_scalar",),
        to_ours=lambda native: {
            "attention_scale": None
            if native.query_pre_attn_scalar == native.head_dim
            else native.query_pre_attn_scalar**-0.5
        },
        to_theirs=lambda config: {
            "query_pre_attn_scalar": config.head_dim
            if config.attention_scale is None
            else round(config.attention_scale**-2)
        },
    ),
]
SANDWICH: list[Entry] = [Const("norm_placement", "sandwich")]

GEMMA2_WEIGHTS: list[Rule] = [
    *HEAD,
    *ATTENTION,
    *MLP,
    *weight(f"{LAYER}.input_layernorm", f"{LAYER}.attn_norm.pre"),
    *weight(f"{LAYER}.post_attention_layernorm", f"{LAYER}.attn_norm.post"),
    *weight(f"{LAYER}.pre_feedforward_layernorm", f"{LAYER}.mlp_norm.pre"),
    *weight(f"{LAYER}.post_feedforward_layernorm", f"{LAYER}.mlp_norm.post"),
    *weight("model.norm", "model.norm"),
]

FAMILY = Family(
    "gemma2",
    config=[*GEMMA2, *SANDWICH, *ROPE, Field("attn_logit_softcapping")],
    weights=GEMMA2_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Gemma2ForCausalLM"},
    # Caches of older releases; the activation is in hidden_activation.
    inert=("cache_implementation", "sliding_window_size", "hidden_act"),
)
