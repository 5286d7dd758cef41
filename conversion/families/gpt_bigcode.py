"""StarCoder, SantaCoder and Granite Code: GPT-2 with one key and value head, stored as [out, in]. arXiv 2305.06161."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Field
from ..ops import both, only, qkv_heads, qkv_rows
from ..rules import Family
from .common import ALL_BIASES, CAUSAL_LM, GPT_SIZES, LAYER, LAYER_NORM_MLP, QKV, SUMMARY, mask_buffers
from .decoders import HEADS
from .encoders import MODEL, SEQUENCE, TOKEN, named, of_task

BLOCK = "transformer.h.{i}"
FUSED = f"{BLOCK}.attn.c_attn"


def _shares_one(config: Any) -> bool:
    return config.num_key_value_heads == 1


def _has_each(config: Any) -> bool:
    return not _shares_one(config)


FAMILY = Family(
    "gpt_bigcode",
    config=[
        *GPT_SIZES,
        Field("n_inner", "intermediate_size"),
        Field("activation_function", "hidden_act"),
        Derived(
            ("scale_attn_weights",),
            lambda native: {"attention_scale": None if native.scale_attn_weights else 1.0},
            lambda config: {"scale_attn_weights": config.attention_scale is None},
        ),
        Derived(
            ("multi_query",),
            lambda native: {"num_key_value_heads": 1 if native.multi_query else native.n_head},
            lambda config: {"multi_query": _shares_one(config)},
        ),
        *LAYER_NORM_MLP,
        *ALL_BIASES,
        Const("position_encoding", "learned"),
        *HEADS,
    ],
    weights=[
        *both("transformer.wte", "model.embed_tokens"),
        *both("transformer.wpe", "model.embed_positions"),
        *both(f"{BLOCK}.ln_1", f"{LAYER}.attn_norm.pre"),
        # Queries, then the key, then the value; or head by head.
        *only(_shares_one, both(FUSED, QKV, qkv_rows)),
        *only(_has_each, both(FUSED, QKV, qkv_heads)),
        *both(f"{BLOCK}.attn.c_proj", f"{LAYER}.self_attn.o_proj"),
        *both(f"{BLOCK}.ln_2", f"{LAYER}.mlp_norm.pre"),
        *both(f"{BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj"),
        *both("transformer.ln_f", "model.norm"),
        *both("lm_head"),
        *of_task("SequenceClassification", both("score")),
        *of_task("TokenClassification", both("classifier", "score")),
    ],
    drops=mask_buffers(f"{BLOCK}.attn"),
    spellings=({}, {"transformer.": ""}),
    architectures=named("GPTBigCode", CAUSAL_LM, MODEL, SEQUENCE, TOKEN),
    # The first two: where half precision is left for a softmax. The others: of BigCode's own code.
    inert=(
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "validate_runner_input"),
        *(*SUMMARY, "pre_allocate_kv_cache", "max_sequence_length", "max_batch_size", "pad_key_length"),
    ),
)
