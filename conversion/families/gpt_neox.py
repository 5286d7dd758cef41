"""GPT-NeoX-20B, Pythia, RedPajama-INCITE: partial RoPE, two norms that may run in parallel. arXiv 2204.06745."""

from ..entries import Const, Derived, Field
from ..ops import both, qkv_heads
from ..rules import Drop, Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LAYER, LAYER_NORM_MLP, QKV, TOKENS, mask_buffers, partial_rope

BLOCK = "gpt_neox.layers.{i}"

ROPE = Derived(
    ("rope_parameters", "rotary_pct", "rotary_emb_base", "rope_scaling"),
    to_ours=lambda native: {"rope_parameters": native.rope_parameters},
    to_theirs=partial_rope("rotary_emb_base", "rotary_pct"),
)

FAMILY = Family(
    "gpt_neox",
    config=[
        *TOKENS,
        Field("hidden_size"),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("intermediate_size"),
        Field("max_position_embeddings"),
        Field("hidden_act"),
        Field("layer_norm_eps", "norm_eps"),
        Field("attention_dropout"),
        Field("hidden_dropout", "hidden_dropout", "embedding_dropout"),
        *ATTENTION_BIAS,
        ROPE,
        *LAYER_NORM_MLP,
        Const("ffn_bias", True),
        # Either way each branch has its own norm.
        Derived(
            ("use_parallel_residual",),
            to_ours=lambda native: {
                "parallel_block": native.use_parallel_residual,
                "parallel_norms": 2 if native.use_parallel_residual else 1,
            },
            to_theirs=lambda config: {"use_parallel_residual": config.parallel_block},
        ),
    ],
    weights=[
        *both("gpt_neox.embed_in", "model.embed_tokens"),
        *both(f"{BLOCK}.input_layernorm", f"{LAYER}.attn_norm.pre"),
        *both(f"{BLOCK}.attention.query_key_value", QKV, qkv_heads),
        *both(f"{BLOCK}.attention.dense", f"{LAYER}.self_attn.o_proj"),
        *both(f"{BLOCK}.post_attention_layernorm", f"{LAYER}.mlp_norm.pre"),
        *both(f"{BLOCK}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *both("gpt_neox.final_layer_norm", "model.norm"),
        *both("embed_out", "lm_head"),
    ],
    drops=[
        *mask_buffers(f"{BLOCK}.attention"),
        Drop(f"{BLOCK}.attention.rotary_emb.inv_freq", "RoPE table of older releases: follows from rotary_emb_base"),
    ],
    # A model class saved by hand calls the head as every other family does.
    spellings=({}, {"embed_out.": "lm_head."}, {"gpt_neox.": ""}),
    architectures={CAUSAL_LM: "GPTNeoXForCausalLM"},
)
