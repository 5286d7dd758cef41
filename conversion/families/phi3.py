"""Phi-3 and Phi-4-mini: LLaMA with fused projections, LongRoPE, and a window on every layer. arXiv 2404.14219."""

from typing import Any

from ..entries import Derived, Field, Values
from ..ops import qkv_rows, weight
from ..rules import Family
from .common import (
    CAUSAL_LM,
    FUSED_MLP,
    HEAD,
    HEAD_DIM,
    LAYER,
    PRE_NORMS,
    QKV,
    RMS_NORM,
    SIZES,
    SPELLINGS,
    partial_rope,
)


def _rope_to_theirs(config: Any) -> Values:
    """The original length stands beside the RoPE parameters, where their class reads it with priority."""
    original = (config.rope_parameters or {}).get("original_max_position_embeddings")
    beside = {} if original is None else {"original_max_position_embeddings": original}
    return {**partial_rope("rope_theta", "partial_rotary_factor")(config), **beside}


FAMILY = Family(
    "phi3",
    config=[
        *SIZES,
        *HEAD_DIM,
        *RMS_NORM,
        Field("hidden_act"),
        Field("sliding_window"),
        Field("resid_pdrop", "hidden_dropout"),
        Derived(
            (
                *("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"),
                "original_max_position_embeddings",
            ),
            to_ours=lambda native: {"rope_parameters": native.rope_parameters},
            to_theirs=_rope_to_theirs,
        ),
    ],
    weights=[
        *HEAD,
        *PRE_NORMS,
        *weight(f"{LAYER}.self_attn.qkv_proj", QKV, qkv_rows),
        *weight(f"{LAYER}.self_attn.o_proj", f"{LAYER}.self_attn.o_proj"),
        *FUSED_MLP,
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Phi3ForCausalLM"},
    # transformers' class has no dropout on the embedding.
    inert=("embd_pdrop",),
)
