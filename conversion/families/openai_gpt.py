"""GPT-1: GPT-2's tensors with the norm after each residual sum and none at the end. OpenAI 2018."""

from ..entries import Const, Derived
from ..ops import both, chain, qkv_rows, transpose
from ..rules import Family
from .common import ALL_BIASES, CAUSAL_LM, GPT_SIZES, LAYER, LAYER_NORM_MLP, QKV, SUMMARY, mask_buffers

BLOCK = "transformer.h.{i}"
# Their names of activations; their "gelu" is the tanh approximation.
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
NAMES = {"gelu_new": "gelu", "relu": "relu", "silu": "silu"}

FAMILY = Family(
    "openai-gpt",
    config=[
        *GPT_SIZES,
        Derived(
            ("afn",),
            to_ours=lambda native: {"hidden_act": ACTIVATIONS[native.afn]},
            to_theirs=lambda config: {"afn": NAMES.get(config.hidden_act, "gelu")},
        ),
        *LAYER_NORM_MLP,
        *ALL_BIASES,
        Const("norm_placement", "post"),
        Const("final_norm", False),
        Const("position_encoding", "learned"),
    ],
    weights=[
        *both("transformer.tokens_embed", "model.embed_tokens"),
        *both("transformer.positions_embed", "model.embed_positions"),
        *both(f"{BLOCK}.attn.c_attn", QKV, chain(transpose, qkv_rows)),
        *both(f"{BLOCK}.attn.c_proj", f"{LAYER}.self_attn.o_proj", transpose),
        *both(f"{BLOCK}.ln_1", f"{LAYER}.attn_norm.out"),
        *both(f"{BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj", transpose),
        *both(f"{BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj", transpose),
        *both(f"{BLOCK}.ln_2", f"{LAYER}.mlp_norm.out"),
        *both("lm_head", "lm_head"),
    ],
    drops=mask_buffers(f"{BLOCK}.attn"),
    spellings=({}, {"transformer.": ""}),
    architectures={CAUSAL_LM: "OpenAIGPTLMHeadModel"},
    inert=SUMMARY,
)
