"""GPT-2: learned positions, LayerNorm, projections stored as [in, out] and q|k|v fused. OpenAI 2019."""

from ..ops import both, chain, qkv_rows, transpose
from ..relation import Const, Derived, Field
from ..rules import Drop, Family
from .common import CAUSAL_LM, LAYER, LAYER_NORM_MLP, QKV, TOKENS

BLOCK = "transformer.h.{i}"

FAMILY = Family(
    "gpt2",
    config=[
        *TOKENS,
        Field("n_embd", "hidden_size"),
        Field("n_layer", "num_hidden_layers"),
        Field("n_head", "num_attention_heads"),
        Field("n_inner", "intermediate_size"),
        Field("n_positions", "max_position_embeddings"),
        Field("activation_function", "hidden_act"),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("resid_pdrop", "hidden_dropout"),
        Field("embd_pdrop", "embedding_dropout"),
        Field("attn_pdrop", "attention_dropout"),
        Field("scale_attn_by_inverse_layer_idx", "attention_scale_by_layer"),
        Derived(
            ("scale_attn_weights",),
            to_ours=lambda native: {"attention_scale": None if native.scale_attn_weights else 1.0},
            to_theirs=lambda config: {"scale_attn_weights": config.attention_scale is None},
        ),
        *LAYER_NORM_MLP,
        *[Const(name, True) for name in ("attention_bias", "attention_output_bias", "ffn_bias")],
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
    drops=[
        Drop(f"{BLOCK}.attn.bias", "causal mask, a constant"),
        Drop(f"{BLOCK}.attn.masked_bias", "the score of a masked position, a constant"),
    ],
    # OpenAI's release on the Hub is the bare base model.
    spellings=({}, {"transformer.": ""}),
    architectures={CAUSAL_LM: "GPT2LMHeadModel"},
    inert=(
        *("n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        # The same formula with another rounding in half precision.
        *("summary_first_dropout", "reorder_and_upcast_attn"),
    ),
)
