"""nanoGPT: GPT-2's architecture with optional biases, plain linears, and a `ckpt.pt` of its own. A. Karpathy 2022."""

from pathlib import Path
from typing import Any

from ..entries import Const, Field
from ..ops import both, qkv_rows
from ..rules import Drop, Family
from .common import CAUSAL_LM, LAYER, LAYER_NORM_MLP, QKV

BLOCK = "transformer.h.{i}"


def native(**values: Any) -> Any:
    from ..sources.nanogpt import NanoGptConfig

    return NanoGptConfig(**values)


def container(folder: Path) -> None:
    from ..sources.nanogpt import pack

    pack(folder)


FAMILY = Family(
    "nanogpt",
    config=[
        Field("vocab_size"),
        Field("n_embd", "hidden_size"),
        Field("n_layer", "num_hidden_layers"),
        Field("n_head", "num_attention_heads"),
        Field("block_size", "max_position_embeddings"),
        Field("dropout", "attention_dropout", "hidden_dropout", "embedding_dropout"),
        Field("bias", "attention_bias", "attention_output_bias", "ffn_bias", "norm_bias"),
        *LAYER_NORM_MLP,
        Const("norm_eps", 1e-5),
        Const("hidden_act", "gelu"),
        Const("position_encoding", "learned"),
        Const("tie_word_embeddings", True),
    ],
    weights=[
        *both("transformer.wte", "model.embed_tokens"),
        *both("transformer.wpe", "model.embed_positions"),
        *both(f"{BLOCK}.ln_1", f"{LAYER}.attn_norm.pre"),
        *both(f"{BLOCK}.attn.c_attn", QKV, qkv_rows),
        *both(f"{BLOCK}.attn.c_proj", f"{LAYER}.self_attn.o_proj"),
        *both(f"{BLOCK}.ln_2", f"{LAYER}.mlp_norm.pre"),
        *both(f"{BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj"),
        *both("transformer.ln_f", "model.norm"),
        *both("lm_head", "lm_head"),
    ],
    drops=[Drop(f"{BLOCK}.attn.bias", "causal mask, a constant")],
    architectures={CAUSAL_LM: "GPT"},
    # Not in its file: the name that this family has here.
    inert=("architectures",),
    native=native,
    container=container,
)
