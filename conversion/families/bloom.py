"""BLOOM: ALiBi, a norm after the embedding, queries, keys and values fused head by head. arXiv 2211.05100."""

from ..entries import Const, Field
from ..ops import both, qkv_heads
from ..rules import Family
from .common import ALL_BIASES, CAUSAL_LM, LAYER, LAYER_NORM_MLP, QKV, TOKENS

BLOCK = "transformer.h.{i}"

FAMILY = Family(
    "bloom",
    config=[
        *TOKENS,
        Field("hidden_size"),
        Field("n_layer", "num_hidden_layers"),
        Field("n_head", "num_attention_heads"),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("hidden_dropout"),
        Field("attention_dropout"),
        *LAYER_NORM_MLP,
        *ALL_BIASES,
        Const("hidden_act", "gelu_pytorch_tanh"),
        Const("position_encoding", "alibi"),
        Const("positions_follow_mask", True),
        Const("embedding_norm", True),
    ],
    weights=[
        *both("transformer.word_embeddings", "model.embed_tokens"),
        *both("transformer.word_embeddings_layernorm", "model.embed_norm"),
        *both(f"{BLOCK}.input_layernorm", f"{LAYER}.attn_norm.pre"),
        *both(f"{BLOCK}.self_attention.query_key_value", QKV, qkv_heads),
        *both(f"{BLOCK}.self_attention.dense", f"{LAYER}.self_attn.o_proj"),
        *both(f"{BLOCK}.post_attention_layernorm", f"{LAYER}.mlp_norm.pre"),
        *both(f"{BLOCK}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *both("transformer.ln_f", "model.norm"),
        *both("lm_head", "lm_head"),
    ],
    # BigScience's releases are the bare base model.
    spellings=({}, {"transformer.": ""}),
    architectures={CAUSAL_LM: "BloomForCausalLM"},
    # The same numbers up to rounding, in the order in which Megatron's slices were summed.
    inert=("slow_but_exact",),
)
