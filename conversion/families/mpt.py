"""MPT: ALiBi, LayerNorm and projections without biases, q|k|v fused. MosaicML 2023."""

from typing import Any

from ..entries import Const, Derived, Field, Values
from ..errors import UnsupportedField
from ..ops import qkv_rows, weight
from ..rules import Family
from .common import CAUSAL_LM, LAYER, LAYER_NORM_MLP, QKV, TOKENS

BLOCK = "transformer.blocks.{i}"
# transformers' class computes this alone, whatever else the nested config says.
FIXED = {"attn_type": "multihead_attention", "alibi": True, "prefix_lm": False, "qk_ln": False}


def _attention(native: Any) -> Values:
    nested = native.attn_config
    other = {name: getattr(nested, name) for name, value in FIXED.items() if getattr(nested, name) != value}
    if other:
        raise UnsupportedField(f"attn_config has {other}: transformers' MPT class has {FIXED} only.")
    return {
        "attention_scale": nested.softmax_scale,
        "clip_qkv": nested.clip_qkv,
        "alibi_bias_max": nested.alibi_bias_max,
        # Also what that class drops from the branches' outputs, instead of resid_pdrop.
        "attention_dropout": nested.attn_pdrop,
        "hidden_dropout": nested.attn_pdrop,
    }


FAMILY = Family(
    "mpt",
    config=[
        *TOKENS,
        Field("d_model", "hidden_size"),
        Field("n_layers", "num_hidden_layers"),
        Field("n_heads", "num_attention_heads"),
        Field("max_seq_len", "max_position_embeddings"),
        Field("layer_norm_epsilon", "norm_eps"),
        Derived(
            ("attn_config",),
            _attention,
            lambda config: {
                "attn_config": {
                    **FIXED,
                    "softmax_scale": config.attention_scale,
                    "clip_qkv": config.clip_qkv,
                    "alibi_bias_max": config.alibi_bias_max,
                    "attn_pdrop": config.attention_dropout,
                }
            },
        ),
        *LAYER_NORM_MLP,
        Const("norm_bias", False),
        Const("hidden_act", "gelu"),
        Const("position_encoding", "alibi"),
    ],
    weights=[
        *weight("transformer.wte", "model.embed_tokens"),
        *weight(f"{BLOCK}.norm_1", f"{LAYER}.attn_norm.pre"),
        *weight(f"{BLOCK}.attn.Wqkv", QKV, qkv_rows),
        *weight(f"{BLOCK}.attn.out_proj", f"{LAYER}.self_attn.o_proj"),
        *weight(f"{BLOCK}.norm_2", f"{LAYER}.mlp_norm.pre"),
        *weight(f"{BLOCK}.ffn.up_proj", f"{LAYER}.mlp.up_proj"),
        *weight(f"{BLOCK}.ffn.down_proj", f"{LAYER}.mlp.down_proj"),
        *weight("transformer.norm_f", "model.norm"),
        *weight("lm_head", "lm_head"),
    ],
    architectures={CAUSAL_LM: "MptForCausalLM"},
)
