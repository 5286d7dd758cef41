"""GPT-2: learned positions, LayerNorm, projections stored as [in, out] and q|k|v fused. OpenAI 2019."""

from ..entries import Const, Derived, Field
from ..ops import both, chain, qkv_rows, transpose
from ..rules import Family
from .common import ALL_BIASES, CAUSAL_LM, GPT_SIZES, LAYER, LAYER_NORM_MLP, QKV, SUMMARY, mask_buffers

BLOCK = "transformer.h.{i}"

FAMILY = Family(
    "gpt2",
    config=[
        *GPT_SIZES,
        Field("n_inner", "intermediate_size"),
        Field("activation_function", "hidden_act"),
        Field("scale_attn_by_inverse_layer_idx", "attention_scale_by_layer"),
        Field("reorder_and_upcast_attn", "scores_in_fp32"),
        Derived(
            ("scale_attn_weights",),
            to_ours=lambda native: {"attention_scale": None if native.scale_attn_weights else 1.0},
            to_theirs=lambda config: {"scale_attn_weights": config.attention_scale is None},
        ),
        *LAYER_NORM_MLP,
        *ALL_BIASES,
        Const("position_encoding", "learned"),
    ],
    weights=[
        *both("transformer.wte", "model.embed_tokens"),
        *both("transformer.wpe", "model.embed_positions"),
        *both(f"{BLOCK}.ln_1", f"{LAYER}.attn_norm.pre"),
        *both(f"{BLOCK}.attn.c_attn", QKV, chain(transpose, qkv_rows)),
        *both(f"{BLOCK}.attn.c_proj", f"{LAYER}.self_attn.o_proj", transpose),
        *both(f"{BLOCK}.ln_2", f"{LAYER}.mlp_norm.pre"),
        *both(f"{BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj", transpose),
        *both(f"{BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj", transpose),
        *both("transformer.ln_f", "model.norm"),
        *both("lm_head", "lm_head"),
    ],
    drops=mask_buffers(f"{BLOCK}.attn"),
    # OpenAI's release on the Hub is the bare base model.
    spellings=({}, {"transformer.": ""}),
    architectures={CAUSAL_LM: "GPT2LMHeadModel"},
    inert=SUMMARY,
)
