"""Phi-1, 1.5 and 2: GPT-J's block with a half-rotated head and biases everywhere. arXiv 2306.11644, 2309.05463."""

from typing import Any

from ..entries import Const, Derived, Field
from ..ops import both
from ..rules import Family
from .common import ALL_BIASES, CAUSAL_LM, HEAD, HEAD_DIM, LAYER, LAYER_NORM_MLP, PARTIAL_ROPE, SIZES, SPELLINGS


def _qk_norm(native: Any) -> dict[str, Any]:
    return {"qk_norm": "head" if native.qk_layernorm else "none"}


FAMILY = Family(
    "phi",
    config=[
        *SIZES,
        *HEAD_DIM,
        *PARTIAL_ROPE,
        Field("hidden_act"),
        Field("layer_norm_eps", "norm_eps"),
        Field("resid_pdrop", "hidden_dropout"),
        Field("embd_pdrop", "embedding_dropout"),
        *LAYER_NORM_MLP,
        *ALL_BIASES,
        Const("lm_head_bias", True),
        Const("parallel_block", True),
        Derived(("qk_layernorm",), _qk_norm, lambda config: {"qk_layernorm": config.qk_norm == "head"}),
    ],
    weights=[
        *HEAD,
        *both(f"{LAYER}.input_layernorm", f"{LAYER}.attn_norm.pre"),
        *[rule for part in "qkv" for rule in both(f"{LAYER}.self_attn.{part}_proj")],
        *both(f"{LAYER}.self_attn.dense", f"{LAYER}.self_attn.o_proj"),
        *both(f"{LAYER}.self_attn.q_layernorm", f"{LAYER}.self_attn.q_norm"),
        *both(f"{LAYER}.self_attn.k_layernorm", f"{LAYER}.self_attn.k_norm"),
        *both(f"{LAYER}.mlp.fc1", f"{LAYER}.mlp.up_proj"),
        *both(f"{LAYER}.mlp.fc2", f"{LAYER}.mlp.down_proj"),
        *both("model.final_layernorm", "model.norm"),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "PhiForCausalLM"},
)
