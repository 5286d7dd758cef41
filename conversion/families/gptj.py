"""GPT-J: attention and feed-forward in parallel behind one norm, interleaved partial RoPE. EleutherAI 2021."""

from typing import Any

from ..entries import Const, Derived, Field
from ..ops import both
from ..rules import Family
from .common import CAUSAL_LM, GPT_SIZES, LAYER, LAYER_NORM_MLP, mask_buffers

BLOCK = "transformer.h.{i}"


def _rotary_dim(config: Any) -> int:
    return int(config.head_dim * (config.rope_parameters or {}).get("partial_rotary_factor", 1.0))


FAMILY = Family(
    "gptj",
    config=[
        *GPT_SIZES,
        Field("n_inner", "intermediate_size"),
        Field("activation_function", "hidden_act"),
        *LAYER_NORM_MLP,
        Const("ffn_bias", True),
        Const("lm_head_bias", True),
        Const("parallel_block", True),
        Const("rope_interleaved", True),
        Const("scores_in_fp32", True),
        # The base is fixed, and the rotated part is given in channels.
        Derived(
            ("rotary_dim",),
            to_ours=lambda native: {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": native.rotary_dim * native.n_head / native.n_embd,
                }
            },
            to_theirs=lambda config: {"rotary_dim": _rotary_dim(config)},
        ),
    ],
    weights=[
        *both("transformer.wte", "model.embed_tokens"),
        *both(f"{BLOCK}.ln_1", f"{LAYER}.attn_norm.pre"),
        *[rule for part in "qkv" for rule in both(f"{BLOCK}.attn.{part}_proj", f"{LAYER}.self_attn.{part}_proj")],
        *both(f"{BLOCK}.attn.out_proj", f"{LAYER}.self_attn.o_proj"),
        *both(f"{BLOCK}.mlp.fc_in", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.fc_out", f"{LAYER}.mlp.down_proj"),
        *both("transformer.ln_f", "model.norm"),
        *both("lm_head", "lm_head"),
    ],
    drops=mask_buffers(f"{BLOCK}.attn"),
    architectures={CAUSAL_LM: "GPTJForCausalLM"},
    inert=("gradient_checkpointing",),
)
